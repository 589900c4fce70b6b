package cgroup

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/cubesandbox/cube/internal/process"
	"golang.org/x/sys/unix"
)

// retry is the pause between two attempts to remove a v1 group, whose last task may still be on its way out. v1 has no
// event for that.
const retry = 5 * time.Millisecond

// Remove kills what is in the group and removes it. Nothing there is no error.
func (g *Group) Remove(ctx context.Context) error {
	var errs []error
	for _, dir := range g.dirs {
		if err := remove(ctx, dir); err != nil {
			errs = append(errs, fmt.Errorf("remove cgroup %s: %w", dir, err))
		}
	}
	return errors.Join(errs...)
}

// Remove kills what is in the group /cube/<name>, if there is one, and removes it.
func Remove(ctx context.Context, name string) error {
	g := &Group{name: name, dirs: dirsOf(filepath.Join(Parent, name))}
	return g.Remove(ctx)
}

func remove(ctx context.Context, dir string) error {
	for {
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		if err := kill(ctx, dir); err != nil {
			return err
		}
		if err := waitEmpty(ctx, dir); err != nil {
			return err
		}
	}
}

// kill ends all processes of the group.
func kill(ctx context.Context, dir string) error {
	err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
		return err
	}
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			return nil
		}
		return err
	}
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		pid, err := strconv.Atoi(s.Text())
		if err != nil || pid == 0 { // 0: a process of another pid namespace
			continue
		}
		id, err := process.Of(pid)
		if err != nil {
			continue // gone
		}
		if err := id.Kill(ctx); err != nil {
			return err
		}
	}
	return nil
}

// waitEmpty returns when another attempt to remove the group makes sense: v2 tells through cgroup.events, v1 can only
// be asked again.
func waitEmpty(ctx context.Context, dir string) error {
	fd, err := unix.Open(filepath.Join(dir, "cgroup.events"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("still in use: %w", ctx.Err())
		case <-time.After(retry):
			return nil
		}
	}
	defer unix.Close(fd)
	buf := make([]byte, 128)
	for {
		n, err := unix.Pread(fd, buf, 0)
		if err != nil || !bytes.Contains(buf[:n], []byte("populated 1")) {
			return nil // gone, or empty
		}
		left := time.Second
		if d, ok := ctx.Deadline(); ok {
			left = min(left, time.Until(d))
		}
		if ctx.Err() != nil || left <= 0 {
			return fmt.Errorf("still in use: %w", context.DeadlineExceeded)
		}
		// A change of the file is a POLLPRI since it was last read (Documentation/admin-guide/cgroup-v2.rst).
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}, int(left.Milliseconds())+1); err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
