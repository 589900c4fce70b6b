package ociarchive

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/platforms"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// TestContainerdReadsIt has containerd's own importer read an archive back.
func TestContainerdReadsIt(t *testing.T) {
	dir := t.TempDir()
	rootfs := filepath.Join(dir, "rootfs.tar")
	if err := os.WriteFile(rootfs, tarOf(t, "etc/hello", "world\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	img := Image{Name: "cube.local/test:1", Platform: "linux/arm64", Rootfs: rootfs, Config: v1.Config{Cmd: []string{"sh"}}}
	first, again := filepath.Join(dir, "a.tar"), filepath.Join(dir, "b.tar")
	for _, file := range []string{first, again} {
		if err := Write(file, img); err != nil {
			t.Fatal(err)
		}
	}
	a, errA := os.ReadFile(first)
	b, errB := os.ReadFile(again)
	if errA != nil || errB != nil || !bytes.Equal(a, b) {
		t.Fatal("two archives of one image differ", errA, errB)
	}

	ctx := context.Background()
	store, err := local.NewStore(filepath.Join(dir, "content"))
	if err != nil {
		t.Fatal(err)
	}
	index, err := archive.ImportIndex(ctx, store, bytes.NewReader(a))
	if err != nil {
		t.Fatal(err)
	}
	manifests, err := images.Children(ctx, store, index)
	if err != nil || len(manifests) != 1 || manifests[0].Annotations[nameAnnotation] != img.Name {
		t.Fatalf("got manifests %+v (%v), want one named %s", manifests, err, img.Name)
	}
	config, err := images.Config(ctx, store, manifests[0], platforms.All)
	if err != nil {
		t.Fatal(err)
	}
	got, err := images.ConfigPlatform(ctx, store, config)
	if err != nil || platforms.Format(got) != img.Platform {
		t.Fatalf("got platform %s (%v), want %s", platforms.Format(got), err, img.Platform)
	}
	manifest, err := images.Manifest(ctx, store, manifests[0], platforms.All)
	if err != nil || len(manifest.Layers) != 1 || manifest.Layers[0].MediaType != "application/vnd.oci.image.layer.v1.tar+zstd" {
		t.Fatalf("got layers %+v (%v), want one zstd layer", manifest.Layers, err)
	}
}

func TestNothingIsLeftOnFailure(t *testing.T) {
	dir := t.TempDir()
	if err := Write(filepath.Join(dir, "a.tar"), Image{Name: "x", Rootfs: filepath.Join(dir, "missing")}); err == nil {
		t.Fatal("a missing root file system must be an error")
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 0 {
		t.Fatal("left behind:", entries, err)
	}
}

func tarOf(t *testing.T, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
