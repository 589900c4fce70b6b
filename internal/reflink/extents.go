package reflink

import (
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

	extentLast      = 1 << 0
	extentUnknown   = 1 << 1
	extentUnwritten = 1 << 11
	extentShared    = 1 << 13
)

// fiemapBatch is how many extents one call asks for: 14 KiB of answers.
const fiemapBatch = 256

// Extent is a part of a file that the file system has given a place on its device. All is in bytes.
type Extent struct {
	Logical, Physical, Length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

// Shared tells whether another file may have the same blocks.
func (e Extent) Shared() bool { return e.flags&extentShared != 0 }

// Known tells whether the place is: only then can it be compared.
func (e Extent) Known() bool { return e.flags&extentUnknown == 0 }

type fiemapRequest struct {
	start, length               uint64
	flags, mapped, count, extra uint32
	extents                     [fiemapBatch]Extent
}

// ErrUnmapped says that the file system doesn't tell where its files are, or that they are of different ones. Such files
// can't share blocks either.
var ErrUnmapped = errors.New("no file system tells where the files are")

// EachExtent calls fn for what the file has allocated, in the file's order.
func EachExtent(f *os.File, fn func(Extent) error) error {
	req := new(fiemapRequest)
	for start := uint64(0); ; {
		*req = fiemapRequest{start: start, length: math.MaxUint64 - start, flags: fiemapFlagSync, count: fiemapBatch}
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocFiemap, uintptr(unsafe.Pointer(req)))
		if errno == unix.EOPNOTSUPP || errno == unix.ENOTTY {
			return ErrUnmapped
		}
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
			start = e.Logical + e.Length
		}
		if req.mapped == 0 {
			return nil
		}
	}
}

// Differing lists the numbers of the units, of that many bytes, in which a may differ from b: in all others they share their
// blocks or are holes. Both have that size. ErrUnmapped: nothing is known of that.
func Differing(a, b *os.File, size, unit int64) ([]int64, error) {
	var stA, stB unix.Stat_t
	if err := errors.Join(unix.Fstat(int(a.Fd()), &stA), unix.Fstat(int(b.Fd()), &stB)); err != nil {
		return nil, err
	}
	if stA.Dev != stB.Dev {
		return nil, fmt.Errorf("compare %s and %s: %w", a.Name(), b.Name(), ErrUnmapped)
	}
	ours, err := places(a)
	var theirs []Extent
	if err == nil {
		theirs, err = places(b)
	}
	if err != nil {
		return nil, fmt.Errorf("compare %s and %s: %w", a.Name(), b.Name(), err)
	}
	var list []int64
	for n := int64(0); n*unit < size; n++ {
		from, to := uint64(n*unit), uint64((n+1)*unit)
		var x, y []Extent
		x, ours = cut(ours, from, to)
		y, theirs = cut(theirs, from, to)
		if !slices.Equal(x, y) || slices.ContainsFunc(x, func(e Extent) bool { return !e.Known() }) {
			list = append(list, n)
		}
	}
	return list, nil
}

// places are a file's extents, those joined that follow one another in the file and on the device.
func places(f *os.File) (all []Extent, err error) {
	err = EachExtent(f, func(e Extent) error {
		e.flags &= extentUnknown | extentUnwritten // what says something about the content
		if n := len(all); n > 0 {
			if l := &all[n-1]; l.Logical+l.Length == e.Logical && l.Physical+l.Length == e.Physical && l.flags == e.flags {
				l.Length += e.Length
				return nil
			}
		}
		all = append(all, e)
		return nil
	})
	return all, err
}

// cut takes what is between two places out of a list of extents, of which none begins before from. rest is what is left.
func cut(list []Extent, from, to uint64) (part, rest []Extent) {
	for len(list) > 0 && list[0].Logical < to {
		e := list[0]
		if e.Logical+e.Length <= to {
			part, list = append(part, e), list[1:]
			continue
		}
		first := e
		first.Length = to - e.Logical
		list[0].Logical, list[0].Physical, list[0].Length = to, e.Physical+first.Length, e.Length-first.Length
		part = append(part, first)
	}
	return part, list
}
