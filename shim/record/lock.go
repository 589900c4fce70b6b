package record

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/flock"
)

// killLimit is how long a killed shim may take to be gone.
const killLimit = time.Second

// ErrAlive says that a shim of this pod lives.
var ErrAlive = errors.New("a shim of this pod is running")

// LockShim takes the lock that says "the shim of this pod lives". The lock belongs to the open file: whoever inherits it
// keeps it, and the kernel frees it with the last of them.
func (p Pod) LockShim() (*os.File, error) {
	f, err := os.OpenFile(p.pidFile(), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the pod's shim: %w", err)
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

// WritePID puts the shim's pid in the file that LockShim returned.
func WritePID(lock *os.File, pid int) error {
	if err := lock.Truncate(0); err != nil {
		return err
	}
	_, err := lock.WriteAt([]byte(strconv.Itoa(pid)), 0)
	return err
}

// AwaitShim waits for the end of a shim that is on its way out.
func (p Pod) AwaitShim(ctx context.Context) error {
	unlock, err := flock.Lock(ctx, p.pidFile())
	if err != nil {
		return fmt.Errorf("%w, and doesn't end: %w", ErrAlive, err)
	}
	unlock()
	return nil
}

// KillShim makes sure that no shim of this pod lives: it gives one that is on its way out the grace time, then kills it.
// unlock ends the lock that keeps others away. A pid is only believed while the lock is held, which proves that its
// process hasn't been replaced by another.
func (p Pod) KillShim(ctx context.Context, grace time.Duration) (unlock func(), err error) {
	unlock, err = p.lockWithin(ctx, grace)
	if err == nil {
		return unlock, nil
	}
	b, err := os.ReadFile(p.pidFile())
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
	return p.lockWithin(ctx, killLimit)
}

func (p Pod) lockWithin(ctx context.Context, limit time.Duration) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return flock.Lock(ctx, p.pidFile())
}

func (p Pod) pidFile() string { return p.path("shim.pid") }
