package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Looks at the writers' count come with an event, and then again in growing steps: the kernel tells of a close a moment
// before it counts the writer out.
const (
	firstLook = time.Millisecond
	lastLook  = 256 * time.Millisecond
)

// ErrBusy is an image that somebody still has open for writing: a loop device, a virtual machine.
var ErrBusy = errors.New("image is still in use")

// Settle waits until nobody has the file open for writing, and keeps it so until release. f must be open read-only.
//
// umount(2) doesn't promise that: a mount namespace that was copied meanwhile keeps the mount, and whoever probes the
// loop device keeps that. A read lease tells; the close of the last writer is an inotify event.
func Settle(ctx context.Context, f *os.File) (release func(), err error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w", err)
	}
	events := os.NewFile(uintptr(fd), "inotify")
	defer events.Close()
	if _, err := unix.InotifyAddWatch(fd, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.IN_CLOSE_WRITE); err != nil {
		return nil, fmt.Errorf("inotify %s: %w", f.Name(), err)
	}
	buf := make([]byte, 4096)
	for look := lastLook; ; look = min(2*look, lastLook) {
		_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
		if err == nil {
			return func() { unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK) }, nil
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, fmt.Errorf("lease %s: %w", f.Name(), err)
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w: %w", ErrBusy, ctx.Err())
		}
		if err := events.SetReadDeadline(time.Now().Add(look)); err != nil {
			return nil, fmt.Errorf("inotify: %w", err)
		}
		if _, err := events.Read(buf); err == nil {
			look = firstLook
		}
	}
}
