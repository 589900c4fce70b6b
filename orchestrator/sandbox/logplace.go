package sandbox

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// LogPlace is a place in a log: behind the first bytes of one of its files, which it finds whatever number that has by then. The zero
// value is no place.
type LogPlace struct {
	// inode and made, when the file was in nanoseconds, name the file: numbers of inodes are given again.
	inode  uint64
	made   int64
	offset int64
}

// LogStart is where a copy of a log begins.
type LogStart struct {
	// Tail is how many of the last lines are copied; negative: all.
	Tail int
	// After has what follows that place be copied, whatever Tail is. If its file has been removed, all that there is has come later.
	After LogPlace
}

// Placed is a writer that is told of where in the log the next byte is, when that isn't behind the one before.
type Placed interface {
	io.Writer
	Place(LogPlace)
}

// String is what ParseLogPlace takes.
func (p LogPlace) String() string { return fmt.Sprintf("%x-%x-%x", p.inode, p.made, p.offset) }

// Add is the place n bytes further in the same file.
func (p LogPlace) Add(n int) LogPlace {
	p.offset += int64(n)
	return p
}

// ParseLogPlace reads a place. The error is errdefs.ErrInvalidArgument.
func ParseLogPlace(s string) (p LogPlace, err error) {
	parts := strings.Split(s, "-")
	bad := errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%.80q is no place in a log", s))
	if len(parts) != 3 {
		return LogPlace{}, bad
	}
	if p.inode, err = strconv.ParseUint(parts[0], 16, 64); err != nil {
		return LogPlace{}, bad
	}
	for i, to := range []*int64{&p.made, &p.offset} {
		n, err := strconv.ParseUint(parts[i+1], 16, 63)
		if err != nil {
			return LogPlace{}, bad
		}
		*to = int64(n)
	}
	return p, nil
}

// placeOf is where a file is read next.
func placeOf(f *os.File) (p LogPlace, err error) {
	var x unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_BTIME, &x); err != nil {
		return LogPlace{}, &os.PathError{Op: "statx", Path: f.Name(), Err: err}
	}
	p.inode = x.Ino
	if x.Mask&unix.STATX_BTIME != 0 {
		p.made = x.Btime.Sec*1e9 + int64(x.Btime.Nsec)
	}
	p.offset, err = f.Seek(0, io.SeekCurrent)
	return p, err
}

// seek moves to where the copy begins. It returns how many files, oldest first, are before that.
func (s LogStart) seek(files []*os.File) (skip int, err error) {
	if s.After == (LogPlace{}) {
		if s.Tail < 0 {
			return 0, nil
		}
		return seekTail(files, s.Tail)
	}
	skip = slices.IndexFunc(files, func(f *os.File) bool {
		p, err := placeOf(f)
		return err == nil && p.inode == s.After.inode && p.made == s.After.made
	})
	if skip < 0 {
		return 0, nil
	}
	_, err = files[skip].Seek(s.After.offset, io.SeekStart)
	return skip, err
}
