package image

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From linux/fiemap.h and linux/fs.h.
const (
	fsIocFiemap = 0xc020660b

	fiemapFlagSync = 1 << 0 // write delayed allocations first, so that they have a place

	extentLast    = 1 << 0
	extentUnknown = 1 << 1 // its place isn't known, so that it can't be compared
	extentShared  = 1 << 13
)

// fiemapBatch is how many extents one call asks for: 14 KiB of answers.
const fiemapBatch = 256

type fiemapExtent struct {
	logical, physical, length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

type fiemapRequest struct {
	start, length               uint64
	flags, mapped, count, extra uint32
	extents                     [fiemapBatch]fiemapExtent
}

// span is a range of the store's device, in bytes.
type span struct{ start, end uint64 }

// Used is how many bytes of the store the image has that the parent doesn't: those that come free with it as long as
// the parent stays. parent may be nil. Where blocks can't be shared that is everything that the image has.
func Used(img, parent *os.File) (int64, error) {
	var used uint64
	var theirs []span // the parent's, sorted; read once a shared extent is met
	loaded := parent == nil
	err := eachExtent(img, func(e fiemapExtent) error {
		used += e.length
		if parent == nil || e.flags&extentShared == 0 || e.flags&extentUnknown != 0 {
			return nil
		}
		if !loaded {
			var err error
			if theirs, err = spans(parent); err != nil {
				return err
			}
			loaded = true
		}
		used -= overlap(theirs, span{e.physical, e.physical + e.length})
		return nil
	})
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) {
		return allocated(img)
	}
	if err != nil {
		return 0, fmt.Errorf("measure %s: %w", img.Name(), err)
	}
	return int64(used), nil
}

// allocated is what the file takes on a file system that doesn't tell where; such a one can't share blocks either.
func allocated(f *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("measure %s: %w", f.Name(), err)
	}
	return st.Blocks * 512, nil // st_blocks is in 512-byte units, see stat(2)
}

// spans are where the file's extents lie, sorted.
func spans(f *os.File) ([]span, error) {
	var s []span
	err := eachExtent(f, func(e fiemapExtent) error {
		if e.flags&extentUnknown == 0 {
			s = append(s, span{e.physical, e.physical + e.length})
		}
		return nil
	})
	slices.SortFunc(s, func(a, b span) int { return cmp.Compare(a.start, b.start) })
	return s, err
}

// overlap is how many bytes of x are in the sorted, disjoint spans.
func overlap(sorted []span, x span) (n uint64) {
	i, _ := slices.BinarySearchFunc(sorted, x.start, func(s span, at uint64) int { return cmp.Compare(s.end, at+1) })
	for ; i < len(sorted) && sorted[i].start < x.end; i++ {
		n += min(sorted[i].end, x.end) - max(sorted[i].start, x.start)
	}
	return n
}

// eachExtent calls fn for what the file has allocated, in the file's order.
func eachExtent(f *os.File, fn func(fiemapExtent) error) error {
	req := new(fiemapRequest)
	for start := uint64(0); ; {
		*req = fiemapRequest{start: start, length: math.MaxUint64 - start, flags: fiemapFlagSync, count: fiemapBatch}
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocFiemap, uintptr(unsafe.Pointer(req)))
		if errno != 0 {
			return errno
		}
		for _, e := range req.extents[:req.mapped] {
			if err := fn(e); err != nil {
				return err
			}
			if e.flags&extentLast != 0 {
				return nil
			}
			start = e.logical + e.length
		}
		if req.mapped == 0 {
			return nil
		}
	}
}
