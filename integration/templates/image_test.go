package templates

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// odd is an image with what images seldom have.
const odd = "cube.local/odd:1"

// oddLayer has files of owners that the image doesn't know, with modes and attributes that are easily lost.
func oddLayer(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []*tar.Header{
		{Name: "odd/", Typeflag: tar.TypeDir, Mode: 0o3775, Uid: 70001, Gid: 70002},
		{Name: "odd/suid", Typeflag: tar.TypeReg, Mode: 0o6755, Uid: 0, Gid: 42},
		{Name: "odd/far", Typeflag: tar.TypeReg, Mode: 0o604, Uid: 4294967000, Gid: 3000000000, PAXRecords: map[string]string{"SCHILY.xattr.user.e2b.kept": "yes"}},
		{Name: "odd/link", Typeflag: tar.TypeSymlink, Linkname: "far", Mode: 0o777, Uid: 7, Gid: 8},
		{Name: "odd/hard", Typeflag: tar.TypeLink, Linkname: "odd/far", Mode: 0o604, Uid: 4294967000, Gid: 3000000000},
	} {
		h.ModTime, h.Format = time.Unix(1_500_000_000, 0), tar.FormatPAX
		must(t, w.WriteHeader(h))
	}
	must(t, w.Close())
	return b.Bytes()
}

// derive makes an archive of an image of another one's, with one layer more. It has one manifest.
func derive(t *testing.T, from, to, name string, layer []byte) {
	t.Helper()
	small := map[string][]byte{} // all but layers
	each(t, from, func(h *tar.Header, r io.Reader) {
		if h.Size < 1<<20 {
			b, err := io.ReadAll(r)
			must(t, err)
			small[h.Name] = b
		}
	})
	blob := func(d digest.Digest) []byte { return small[path.Join("blobs", d.Algorithm().String(), d.Encoded())] }
	added := map[string][]byte{}
	add := func(d *ocispec.Descriptor, content []byte) {
		sum := sha256.Sum256(content)
		d.Digest, d.Size = digest.NewDigestFromEncoded(digest.SHA256, hex.EncodeToString(sum[:])), int64(len(content))
		added["blobs/sha256/"+d.Digest.Encoded()] = content
	}
	var index ocispec.Index
	var manifest ocispec.Manifest
	var config ocispec.Image
	must(t, json.Unmarshal(small["index.json"], &index))
	must(t, json.Unmarshal(blob(index.Manifests[0].Digest), &manifest))
	must(t, json.Unmarshal(blob(manifest.Config.Digest), &config))

	l := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer}
	add(&l, layer)
	manifest.Layers = append(manifest.Layers, l)
	config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, l.Digest)
	config.Config.Env = append(config.Config.Env, "ODD=image")
	add(&manifest.Config, encode(t, config))
	add(&index.Manifests[0], encode(t, manifest))
	index.Manifests[0].Annotations = map[string]string{"io.containerd.image.name": name}
	added["index.json"] = encode(t, index)

	f, err := os.Create(to)
	must(t, err)
	defer f.Close()
	w := tar.NewWriter(f)
	each(t, from, func(h *tar.Header, r io.Reader) {
		if added[h.Name] != nil {
			return
		}
		must(t, w.WriteHeader(h))
		_, err := io.Copy(w, r)
		must(t, err)
	})
	for name, content := range added {
		must(t, w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}))
		_, err := w.Write(content)
		must(t, err)
	}
	must(t, w.Close())
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	must(t, err)
	return b
}

// each calls do with what is in an archive.
func each(t *testing.T, archive string, do func(h *tar.Header, r io.Reader)) {
	t.Helper()
	f, err := os.Open(archive)
	must(t, err)
	defer f.Close()
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		must(t, err)
		do(h, r)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
