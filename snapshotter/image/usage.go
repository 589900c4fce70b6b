package image

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/reflink"
)

// span is a range of the store's device, in bytes.
type span struct{ start, end uint64 }

// Used is how many bytes of the store the image has that the parent doesn't: those that come free with it as long as
// the parent stays. parent may be nil. Where blocks can't be shared that is everything that the image has.
func Used(img, parent *os.File) (int64, error) {
	var used uint64
	var theirs []span // the parent's, sorted; read once a shared extent is met
	loaded := parent == nil
	err := reflink.EachExtent(img, func(e reflink.Extent) error {
		used += e.Length
		if parent == nil || !e.Shared() || !e.Known() {
			return nil
		}
		if !loaded {
			var err error
			if theirs, err = spans(parent); err != nil {
				return err
			}
			loaded = true
		}
		used -= overlap(theirs, span{e.Physical, e.Physical + e.Length})
		return nil
	})
	if errors.Is(err, reflink.ErrUnmapped) {
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
	err := reflink.EachExtent(f, func(e reflink.Extent) error {
		if e.Known() {
			s = append(s, span{e.Physical, e.Physical + e.Length})
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
