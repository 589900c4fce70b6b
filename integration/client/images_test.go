package client

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// busybox is Debian's, without libraries.
const busybox = "/bin/busybox"

// suiteImages makes the images that the suite pulls, with what its tests look for in them: busybox and the users of its
// image; a second layer; several platforms; one for another system only.
func suiteImages(t *testing.T) images {
	t.Helper()
	im := images{refs: map[string]ocispec.Descriptor{}, blobs: map[digest.Digest]blob{}}
	base, second := busyboxLayer(t), layer(t, file("test_dir/", ""), file("test_dir/test_file", "test_content"))
	linux := []string{"amd64", "arm64", "s390x", "ppc64le"}
	im.add(t, "ghcr.io/containerd/busybox:1.36", "linux", linux, base)
	im.add(t, "ghcr.io/containerd/volume-copy-up:2.2", "linux", linux, base, second)
	for _, ref := range []string{"pause:3.10.2", "pause:3.6", "e2e-test-images/busybox:1.29-2"} {
		im.add(t, "registry.k8s.io/"+ref, "linux", linux, layer(t, file("name", ref)))
	}
	im.add(t, "ghcr.io/containerd/windows/nanoserver:1809", "windows", []string{"amd64"}, layer(t, file("Files/", "")))
	return im
}

// add puts an index with an image for each architecture into the registry. All are ours, with the architecture's name in
// a layer of its own: what is there of one can be told from what is there of another.
func (im images) add(t *testing.T, ref, system string, architectures []string, layers ...[]byte) {
	t.Helper()
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	for _, arch := range architectures {
		platform := ocispec.Platform{OS: system, Architecture: arch}
		config := ocispec.Image{
			Platform: platform,
			Config:   ocispec.ImageConfig{Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, Cmd: []string{"sh"}},
			RootFS:   ocispec.RootFS{Type: "layers"},
		}
		manifest := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
		for _, l := range append(slices.Clone(layers), layer(t, file("architecture", arch))) {
			config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, digest.FromBytes(l))
			manifest.Layers = append(manifest.Layers, im.blob(ocispec.MediaTypeImageLayerGzip, compressed(t, l)))
		}
		manifest.Config = im.json(t, ocispec.MediaTypeImageConfig, config)
		d := im.json(t, ocispec.MediaTypeImageManifest, manifest)
		d.Platform = &platform
		index.Manifests = append(index.Manifests, d)
	}
	im.refs[ref] = im.json(t, ocispec.MediaTypeImageIndex, index)
}

func (im images) json(t *testing.T, mediaType string, v any) ocispec.Descriptor {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return im.blob(mediaType, b)
}

func (im images) blob(mediaType string, content []byte) ocispec.Descriptor {
	d := digest.FromBytes(content)
	im.blobs[d] = blob{mediaType, content}
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(content))}
}

// entry is a file of a layer.
type entry struct {
	header  tar.Header
	content string
}

// file is a file, or a directory if its name ends with a slash.
func file(name, content string) entry {
	if strings.HasSuffix(name, "/") {
		return entry{tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755}, ""}
	}
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(content))}, content}
}

// hostFile is a copy of a file of the host.
func hostFile(t *testing.T, name, path string) entry {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return file(name, string(content))
}

func layer(t *testing.T, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if err := w.WriteHeader(&e.header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// nc ends by SIGTERM also as the first process of its namespace, as that of busybox's own image does and Debian's doesn't.
const nc = `#!/bin/sh
trap 'exit 143' TERM
busybox nc "$@" &
wait $!
`

// busyboxLayer has all of busybox's commands in /bin and the users that the suite knows.
func busyboxLayer(t *testing.T) []byte {
	t.Helper()
	list, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		t.Fatalf("%v; make setup installs it", err)
	}
	entries := []entry{
		file("bin/", ""), file("etc/", ""), file("lib/", ""), file("lib/x86_64-linux-gnu/", ""), file("lib64/", ""),
		file("root/", ""), file("tmp/", ""),
		hostFile(t, "bin/busybox", busybox), file("bin/nc", nc),
		// busybox's seq counts in floating point: without KVM, 20 s for the million that the suite wants a hundred times.
		// And its shell takes no other.
		hostFile(t, "bin/sh", "/bin/dash"), hostFile(t, "bin/seq", "/usr/bin/seq"),
		hostFile(t, "lib/x86_64-linux-gnu/libc.so.6", "/lib/x86_64-linux-gnu/libc.so.6"),
		hostFile(t, "lib64/ld-linux-x86-64.so.2", "/lib64/ld-linux-x86-64.so.2"),
		file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nsys:x:3:3:sys:/:/bin/false\nwww-data:x:33:33:www-data:/:/bin/false\n"),
		file("etc/group", "root:x:0:\nsys:x:3:\nwww-data:x:33:\n"),
	}
	for _, name := range strings.Fields(string(list)) {
		if !slices.Contains([]string{"busybox", "nc", "seq", "sh"}, name) {
			entries = append(entries, entry{tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + name, Linkname: "busybox"}, ""})
		}
	}
	return layer(t, entries...)
}

func compressed(t *testing.T, content []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
