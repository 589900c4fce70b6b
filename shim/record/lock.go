package record

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrAlive says that a shim of this bundle lives.
var ErrAlive = errors.New("a shim of this bundle is running")

// Lock takes the lock that says "the shim of this bundle lives". The lock belongs to the open file: whoever inherits
// it keeps it, and the kernel frees it with the last of them.
func (d Dir) Lock() (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(string(d), "shim.pid"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the bundle: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, ErrAlive
		}
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f, nil
}

// WritePID puts the shim's pid in the file that Lock returned.
func WritePID(lock *os.File, pid int) error {
	if err := lock.Truncate(0); err != nil {
		return err
	}
	_, err := lock.WriteAt([]byte(strconv.Itoa(pid)), 0)
	return err
}

// KillShim makes sure that no shim of this bundle lives: it gives one that is on its way out the grace time, then
// kills it. The returned lock keeps others away until it is closed. A pid is only believed while the lock is held,
// which proves that its process hasn't been replaced by another.
func (d Dir) KillShim(ctx context.Context, grace time.Duration) (*os.File, error) {
	lock, err := d.lockWithin(ctx, grace)
	if !errors.Is(err, ErrAlive) {
		return lock, err
	}
	b, err := os.ReadFile(filepath.Join(string(d), "shim.pid"))
	if err != nil {
		return nil, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid <= 1 {
		return nil, fmt.Errorf("%w, but its pid file says %q", ErrAlive, b)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return nil, fmt.Errorf("kill shim %d: %w", pid, err)
	}
	return d.lockWithin(ctx, time.Second)
}

// lockWithin waits for the lock. flock(2) has no deadline, so the wait is a goroutine that at worst outlives its
// caller, a process that is about to end.
func (d Dir) lockWithin(ctx context.Context, limit time.Duration) (*os.File, error) {
	lock, err := d.Lock()
	if !errors.Is(err, ErrAlive) {
		return lock, err
	}
	f, err := os.OpenFile(filepath.Join(string(d), "shim.pid"), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	got := make(chan error, 1)
	go func() { got <- unix.Flock(int(f.Fd()), unix.LOCK_EX) }()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case err := <-got:
		if err != nil {
			f.Close()
			return nil, err
		}
		return f, nil
	case <-timer.C:
		return nil, ErrAlive
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
