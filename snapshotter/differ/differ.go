// Package differ is the diff service that stands before containerd's own: it refuses to compare what a guest has
// written, since the host would have to mount it, and leaves everything else to the next service in the order.
package differ

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/cubesandbox/cube/internal/guestmark"
)

// Gate is the diff service. Its methods only ever fail: with FailedPrecondition for what the host must not mount, with
// NotImplemented otherwise.
type Gate struct{}

var (
	_ diff.Comparer = Gate{}
	_ diff.Applier  = Gate{}
)

// Compare refuses where one of the mounts is an image that a guest has written.
func (Gate) Compare(_ context.Context, lower, upper []mount.Mount, _ ...diff.Opt) (ocispec.Descriptor, error) {
	return ocispec.Descriptor{}, check(append(append([]mount.Mount(nil), lower...), upper...))
}

// Apply refuses where one of the mounts is an image that a guest has written.
func (Gate) Apply(_ context.Context, _ ocispec.Descriptor, mounts []mount.Mount, _ ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	return ocispec.Descriptor{}, check(mounts)
}

func check(mounts []mount.Mount) error {
	for _, m := range mounts {
		written, err := guestWritten(m)
		if err != nil {
			return err
		}
		if written {
			return errdefs.ErrFailedPrecondition.WithMessage(m.Source + ": " + guestmark.Refusal)
		}
	}
	return errdefs.ErrNotImplemented
}

// guestWritten looks at the image itself too: the mounts may be older than the mark.
func guestWritten(m mount.Mount) (bool, error) {
	if m.Type == guestmark.MountType {
		return true, nil
	}
	if !filepath.IsAbs(m.Source) {
		return false, nil // "overlay" and the like
	}
	st, err := os.Stat(m.Source)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	case !st.Mode().IsRegular():
		return false, nil
	}
	return guestmark.IsSet(m.Source)
}
