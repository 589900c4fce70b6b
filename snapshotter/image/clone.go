// Package image works on the files that are root disks: raw ext4 images, cloned from one another. It knows nothing of
// snapshots and their metadata, and never has the host kernel mount an image.
package image

import (
	"context"
	"os"

	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/reflink"
)

// Clone is reflink.Clone, with the guest-written mark, which the kernel doesn't clone.
func Clone(ctx context.Context, dst, src *os.File) (shared bool, err error) {
	marked, err := guestmark.IsSet(src.Name())
	if err != nil {
		return false, err
	}
	if marked {
		if err := guestmark.Set(dst); err != nil {
			return false, err
		}
	}
	return reflink.Clone(ctx, dst, src)
}
