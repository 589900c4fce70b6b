package stack

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// smallBlob bounds what of an archive is no layer, in bytes.
const smallBlob = 1 << 20

// Derive makes an archive of an image of another one's, which has one manifest: with one layer more, a file with a tar, and with variables
// beside its own.
func Derive(from, to, name, layer string, env ...string) (err error) {
	small := map[string][]byte{}
	err = EachFile(from, func(h *tar.Header, r io.Reader) error {
		if h.Size >= smallBlob {
			return nil
		}
		b, err := io.ReadAll(r)
		small[h.Name] = b
		return err
	})
	if err != nil {
		return err
	}
	var index ocispec.Index
	var manifest ocispec.Manifest
	var config ocispec.Image
	parse := func(name string, into any) {
		if err == nil {
			err = json.Unmarshal(small[name], into)
		}
	}
	parse("index.json", &index)
	if err == nil && len(index.Manifests) == 0 {
		err = fmt.Errorf("%s has no image", from)
	}
	if err != nil {
		return err
	}
	parse(blobPath(index.Manifests[0].Digest), &manifest)
	parse(blobPath(manifest.Config.Digest), &config)
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}

	added := map[string][]byte{}
	add := func(d *ocispec.Descriptor, content any) {
		b, encoded := json.Marshal(content)
		err = errors.Join(err, encoded)
		d.Digest, d.Size = digest.FromBytes(b), int64(len(b))
		added[blobPath(d.Digest)] = b
	}
	l := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer}
	if l.Digest, l.Size, err = sumOf(layer); err != nil {
		return err
	}
	manifest.Layers = append(manifest.Layers, l)
	config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, l.Digest)
	config.Config.Env = append(config.Config.Env, env...)
	add(&manifest.Config, config)
	add(&index.Manifests[0], manifest)
	index.Manifests[0].Annotations = map[string]string{"io.containerd.image.name": name}
	whole, encoded := json.Marshal(index)
	if err = errors.Join(err, encoded); err != nil {
		return err
	}
	added["index.json"] = whole
	return writeArchive(from, to, added, blobPath(l.Digest), layer)
}

// writeArchive copies an archive, but for files that are added, and adds one that is where layer is.
func writeArchive(from, to string, added map[string][]byte, name, layer string) (err error) {
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := tar.NewWriter(f)
	err = EachFile(from, func(h *tar.Header, r io.Reader) error {
		if added[h.Name] != nil {
			return nil
		}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err := io.Copy(w, r)
		return err
	})
	for name, content := range added {
		if err == nil {
			err = w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))})
		}
		if err == nil {
			_, err = w.Write(content)
		}
	}
	if err != nil {
		return err
	}
	in, err := os.Open(layer)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err == nil {
		err = w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: info.Size()})
	}
	if err == nil {
		_, err = io.Copy(w, in)
	}
	return errors.Join(err, w.Close())
}

// EachFile calls do with what is in an archive.
func EachFile(archive string, do func(h *tar.Header, r io.Reader) error) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = do(h, r)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", archive, err)
		}
	}
}

// blobPath is where an archive has a blob.
func blobPath(d digest.Digest) string {
	return path.Join("blobs", d.Algorithm().String(), d.Encoded())
}

func sumOf(file string) (digest.Digest, int64, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, f)
	return digest.NewDigestFromEncoded(digest.SHA256, hex.EncodeToString(h.Sum(nil))), n, err
}

// WriteLayer writes a layer with files of random content, which doesn't become smaller, that many bytes each, below a directory. It
// returns the SHA-256 sums of their contents, by name.
func WriteLayer(to, dir string, files int, size int64, seed byte) (sums map[string]string, err error) {
	f, err := os.Create(to)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := tar.NewWriter(f)
	sums = map[string]string{}
	for i := range files {
		name := fmt.Sprintf("%s/%d", dir, i)
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size}); err != nil {
			return nil, err
		}
		h := sha256.New()
		if _, err := io.CopyN(io.MultiWriter(w, h), rand.NewChaCha8([32]byte{seed, byte(i)}), size); err != nil {
			return nil, err
		}
		sums["/"+name] = hex.EncodeToString(h.Sum(nil))
	}
	return sums, w.Close()
}
