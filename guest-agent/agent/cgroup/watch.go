package cgroup

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// watch calls check at once and after each change of a file of the cgroup, until it answers true or fails, or ctx ends.
// A cgroup that isn't there, or goes, is a change too.
func (g Group) watch(ctx context.Context, file string, check func() (bool, error)) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fmt.Errorf("watch %s: %w", file, err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	defer f.Close()
	// The kernel's "modify" is the file's own notification; the file goes with its cgroup.
	if _, err := unix.InotifyAddWatch(fd, filepath.Join(g.dir(), file), unix.IN_MODIFY|unix.IN_DELETE_SELF); err != nil {
		if gone(err) == nil {
			_, err = check()
			return err
		}
		return fmt.Errorf("watch %s: %w", file, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	b := make([]byte, 4096)
	for {
		if done, err := check(); done || err != nil {
			return err
		}
		if _, err := f.Read(b); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return fmt.Errorf("watch %s: %w", file, err)
		}
	}
}
