// Package image works on the files that are root disks: raw ext4 images, cloned from one another. It knows nothing of
// snapshots and their metadata, and never has the host kernel mount an image.
package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/guestmark"
)

// copyChunk is how much is copied between two looks at the context, in bytes.
const copyChunk = 16 << 20

// Clone gives the empty file dst the content of src: sharing its blocks where the file system can (shared is true),
// otherwise as a sparse copy. The guest-written mark, which the kernel doesn't clone, goes with it. Nothing is synced.
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
	err = unix.IoctlFileClone(int(dst.Fd()), int(src.Fd()))
	switch {
	case err == nil:
		return true, nil
	case !noReflink(err):
		return false, fmt.Errorf("clone %s: %w", src.Name(), err)
	}
	if err := sparseCopy(ctx, dst, src); err != nil {
		return false, fmt.Errorf("copy %s: %w", src.Name(), err)
	}
	return false, nil
}

// CanReflink tells whether files in dir can share blocks, by making two that do.
func CanReflink(dir string) (bool, error) {
	a, err := scratch(dir)
	if err != nil {
		return false, err
	}
	defer a.Close()
	b, err := scratch(dir)
	if err != nil {
		return false, err
	}
	defer b.Close()
	// One block of data, since cloning nothing might succeed anywhere.
	if _, err := a.Write(make([]byte, os.Getpagesize())); err != nil {
		return false, err
	}
	err = unix.IoctlFileClone(int(b.Fd()), int(a.Fd()))
	if err != nil && !noReflink(err) {
		return false, fmt.Errorf("clone a file in %s: %w", dir, err)
	}
	return err == nil, nil
}

// noReflink tells whether FICLONE failed because these files can never share blocks.
func noReflink(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EXDEV) ||
		errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS)
}

// scratch is a file in dir that has no name any more.
func scratch(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, ".probe-*")
	if err != nil {
		return nil, err
	}
	return f, os.Remove(f.Name())
}

// sparseCopy copies what src has data for; the rest of dst stays a hole.
func sparseCopy(ctx context.Context, dst, src *os.File) error {
	st, err := src.Stat()
	if err != nil {
		return err
	}
	if err := dst.Truncate(st.Size()); err != nil {
		return err
	}
	for off := int64(0); off < st.Size(); {
		start, err := src.Seek(off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // nothing but a hole up to the end
		}
		if err != nil {
			return err
		}
		end, err := src.Seek(start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if err := copyRange(ctx, dst, src, start, end); err != nil {
			return err
		}
		off = end
	}
	return nil
}

func copyRange(ctx context.Context, dst, src *os.File, start, end int64) error {
	if _, err := src.Seek(start, io.SeekStart); err != nil {
		return err
	}
	if _, err := dst.Seek(start, io.SeekStart); err != nil {
		return err
	}
	for left := end - start; left > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		// Between two files io.CopyN is copy_file_range, or reads and writes where that can't work.
		n, err := io.CopyN(dst, src, min(left, copyChunk))
		if err != nil {
			return err
		}
		left -= n
	}
	return nil
}
