package sandbox

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Blank is an image with an empty disk, which containers have whose disk comes from elsewhere: containerd knows none without an image.
const Blank = "cube.local/blank:1"

// EnsureBlank has Blank be here.
func (c *Client) EnsureBlank(ctx context.Context) error {
	ctx = c.context(ctx)
	img, _, err := c.find(ctx, Blank)
	if err == nil {
		return c.unpack(ctx, img, nil)
	}
	if !errdefs.IsNotFound(err) {
		return err
	}
	archive, err := blankArchive()
	if err == nil {
		_, err = c.Import(ctx, bytes.NewReader(archive), ImportOptions{})
	}
	if err != nil {
		return fmt.Errorf("make image %s: %w", Blank, err)
	}
	return nil
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
