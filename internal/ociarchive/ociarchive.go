// Package ociarchive writes an OCI image archive (what `ctr image import` reads) from the tar of a root file system.
package ociarchive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/cubesandbox/cube/internal/undo"
)

// nameAnnotation is where containerd looks for an image's whole name.
const nameAnnotation = "io.containerd.image.name"

// Image is what goes into an archive.
type Image struct {
	// Name is the image's whole name, as in "cube.local/debian:bookworm".
	Name string
	// Platform is what the image says it is for; "" means linux/amd64.
	Platform string
	// Rootfs is the file with the only layer: an uncompressed tar.
	Rootfs string
	// Config is how its containers run.
	Config v1.Config
}

// Write writes the archive to a file, which appears whole or not at all. The same image gives the same bytes.
func Write(file string, img Image) (err error) {
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()
	dir, err := os.MkdirTemp(filepath.Dir(file), ".oci-")
	if err != nil {
		return err
	}
	u.Push(func() error { return os.RemoveAll(dir) })
	built, err := build(img)
	if err != nil {
		return fmt.Errorf("image %s: %w", img.Name, err)
	}
	index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), mutate.IndexAddendum{
		Add:        built,
		Descriptor: v1.Descriptor{Annotations: map[string]string{nameAnnotation: img.Name}},
	})
	tree := filepath.Join(dir, "layout")
	if _, err := layout.Write(tree, index); err != nil {
		return fmt.Errorf("image %s: %w", img.Name, err)
	}
	tmp := filepath.Join(dir, "archive")
	if err := pack(tmp, tree); err != nil {
		return fmt.Errorf("pack %s: %w", img.Name, err)
	}
	return os.Rename(tmp, file)
}

func build(img Image) (v1.Image, error) {
	if img.Platform == "" {
		img.Platform = "linux/amd64"
	}
	platform, err := v1.ParsePlatform(img.Platform)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromFile(img.Rootfs, tarball.WithCompression(compression.ZStd), tarball.WithMediaType(types.OCILayerZStd))
	if err != nil {
		return nil, err
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	built, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return nil, err
	}
	config, err := built.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Variant = platform.OS, platform.Architecture, platform.Variant
	config.Config = img.Config
	return mutate.ConfigFile(built, config)
}

// pack writes the files of an OCI layout into a tar.
func pack(file, tree string) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	err = filepath.WalkDir(tree, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		rel, err := filepath.Rel(tree, path)
		if err != nil {
			return err
		}
		return packFile(w, rel, path)
	})
	return errors.Join(err, w.Close(), f.Sync(), f.Close())
}

func packFile(w *tar.Writer, name, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: info.Size()}); err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return err
}
