// Package reflink copies files by having both share their blocks, where the file system can, and sparsely where it can't.
package reflink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// copyChunk is how much is copied between two looks at the context, in bytes.
const copyChunk = 16 << 20

// Clone gives the empty file dst the content of src: sharing its blocks where the file system can (shared is true),
// otherwise as a sparse copy. The positions of the files don't matter, so that one src may be cloned many times at once.
// Extended attributes stay behind. Nothing is synced.
func Clone(ctx context.Context, dst, src *os.File) (shared bool, err error) {
	err = unix.IoctlFileClone(int(dst.Fd()), int(src.Fd()))
	switch {
	case err == nil:
		return true, nil
	case !impossible(err):
		return false, fmt.Errorf("clone %s: %w", src.Name(), err)
	}
	if err := sparseCopy(ctx, dst, src); err != nil {
		return false, fmt.Errorf("copy %s: %w", src.Name(), err)
	}
	return false, nil
}

// Possible tells whether files in dir can share blocks, by making two that do.
func Possible(dir string) (bool, error) {
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
	if err != nil && !impossible(err) {
		return false, fmt.Errorf("clone a file in %s: %w", dir, err)
	}
	return err == nil, nil
}

// impossible tells whether FICLONE failed because these files can never share blocks.
func impossible(err error) bool {
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
		start, err := unix.Seek(int(src.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // nothing but a hole up to the end
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(src.Fd()), start, unix.SEEK_HOLE)
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
	for start < end {
		if err := ctx.Err(); err != nil {
			return err
		}
		from, to := start, start
		n, err := unix.CopyFileRange(int(src.Fd()), &from, int(dst.Fd()), &to, int(min(end-start, copyChunk)), 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL):
			return readWrite(ctx, dst, src, start, end) // between file systems that the kernel doesn't copy between
		case err != nil:
			return err
		case n == 0:
			return io.ErrUnexpectedEOF // src has been cut short meanwhile
		default:
			start += int64(n)
		}
	}
	return nil
}

func readWrite(ctx context.Context, dst, src *os.File, start, end int64) error {
	buf := make([]byte, 1<<20)
	for start < end {
		if err := ctx.Err(); err != nil {
			return err
		}
		b := buf[:min(end-start, int64(len(buf)))]
		if _, err := src.ReadAt(b, start); err != nil {
			return err
		}
		if _, err := dst.WriteAt(b, start); err != nil {
			return err
		}
		start += int64(len(b))
	}
	return nil
}
