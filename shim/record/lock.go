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

	"github.com/cubesandbox/cube/internal/flock"
)

// killLimit is how long a killed shim may take to be gone.
const killLimit = time.Second

// ErrAlive says that a shim of this bundle lives.
var ErrAlive = errors.New("a shim of this bundle is running")

// Lock takes the lock that says "the shim of this bundle lives". The lock belongs to the open file: whoever inherits
// it keeps it, and the kernel frees it with the last of them.
func (d Dir) Lock() (*os.File, error) {
	f, err := os.OpenFile(d.pidFile(), os.O_RDWR|os.O_CREATE, 0o600)
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
// kills it. unlock ends the lock that keeps others away. A pid is only believed while the lock is held, which proves that
// its process hasn't been replaced by another.
func (d Dir) KillShim(ctx context.Context, grace time.Duration) (unlock func(), err error) {
	unlock, err = d.lockWithin(ctx, grace)
	if err == nil {
		return unlock, nil
	}
	b, err := os.ReadFile(d.pidFile())
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
	return d.lockWithin(ctx, killLimit)
}

func (d Dir) lockWithin(ctx context.Context, limit time.Duration) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return flock.Lock(ctx, d.pidFile())
}

func (d Dir) pidFile() string { return filepath.Join(string(d), "shim.pid") }
