package sandbox

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Blank is an image with an empty disk, which containers have whose disk comes from elsewhere: containerd knows none without an image. It is made where it
// is needed.
const Blank = "cube.local/blank:1"

// makeBlank makes it, and its disk.
func (c *Client) makeBlank(ctx context.Context) (client.Image, error) {
	archive, err := blankArchive()
	if err == nil {
		_, err = c.Import(ctx, bytes.NewReader(archive), ImportOptions{})
	}
	if err != nil {
		return nil, fmt.Errorf("make image %s: %w", Blank, err)
	}
	return c.ctrd.GetImage(ctx, Blank)
}

// blankArchive is the image as an OCI archive. Its one layer is an empty tar.
func blankArchive() ([]byte, error) {
	var empty, archive bytes.Buffer
	if err := tar.NewWriter(&empty).Close(); err != nil {
		return nil, err
	}
	w := tar.NewWriter(&archive)
	var errs []error
	file := func(name string, b []byte) {
		errs = append(errs, w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(b))}))
		_, err := w.Write(b)
		errs = append(errs, err)
	}
	blob := func(mediaType string, v any) ocispec.Descriptor {
		b, ok := v.([]byte)
		if !ok {
			var err error
			b, err = json.Marshal(v)
			errs = append(errs, err)
		}
		d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}
		file("blobs/sha256/"+d.Digest.Encoded(), b)
		return d
	}
	layer := blob(ocispec.MediaTypeImageLayer, empty.Bytes())
	config := blob(ocispec.MediaTypeImageConfig, ocispec.Image{
		Platform: platforms.DefaultSpec(), RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{layer.Digest}},
	})
	version := specs.Versioned{SchemaVersion: 2}
	manifest := blob(ocispec.MediaTypeImageManifest, ocispec.Manifest{Versioned: version, MediaType: ocispec.MediaTypeImageManifest, Config: config, Layers: []ocispec.Descriptor{layer}})
	manifest.Annotations = map[string]string{images.AnnotationImageName: Blank}
	index, err := json.Marshal(ocispec.Index{Versioned: version, MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{manifest}})
	errs = append(errs, err)
	file(ocispec.ImageIndexFile, index)
	layout, err := json.Marshal(ocispec.ImageLayout{Version: ocispec.ImageLayoutVersion})
	errs = append(errs, err)
	file(ocispec.ImageLayoutFile, layout)
	return archive.Bytes(), errors.Join(append(errs, w.Close())...)
}
