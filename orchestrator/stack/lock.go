package stack

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// BusyError says that another process holds the run directory.
type BusyError struct {
	PID    int
	RunDir string
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("already running as process %d in %s; `cube down` stops it, or give this one another run_dir and state_dir", e.PID, e.RunDir)
}

// lock is the run directory's owner. It is a POSIX record lock: the kernel drops it with the process, however that
// ends, and knows the holder's pid, so that there is no pid file to go stale. Such a lock belongs to the process and
// falls when any descriptor of the file is closed: nothing else in this process may open it.
type lock struct{ file *os.File }

func lockPath(cfg *config.Config) string { return filepath.Join(cfg.RunDir, "lock") }

// acquire takes the run directory, or says who has it (*BusyError).
func acquire(cfg *config.Config) (*lock, error) {
	for {
		f, err := os.OpenFile(lockPath(cfg), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock the run directory: %w", err)
		}
		err = unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
		if err == nil && current(f) {
			return &lock{file: f}, nil
		}
		if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
			f.Close()
			return nil, fmt.Errorf("lock the run directory: %w", err)
		}
		pid, err := holder(f)
		f.Close()
		switch {
		case err != nil:
			return nil, err
		case pid != 0:
			return nil, &BusyError{PID: pid, RunDir: cfg.RunDir}
		}
		// The holder has gone in the meantime, and may have taken the file away.
	}
}

// since is when the run directory's first owner took it: what ran before that isn't there any more, as the directory doesn't
// survive a restart of the host, nor the file `cube down`.
func (l *lock) since() (time.Time, error) {
	info, err := l.file.Stat()
	if err != nil {
		return time.Time{}, fmt.Errorf("look at the run directory's lock: %w", err)
	}
	return info.ModTime(), nil // nobody writes to it
}

// current says whether the file still is the one of that name.
func current(f *os.File) bool {
	here, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(f.Name())
	return err == nil && os.SameFile(here, there)
}

// remove removes the file and releases the lock, in this order: whoever opened the file before finds out.
func (l *lock) remove() error { return errors.Join(os.Remove(l.file.Name()), l.release()) }

func (l *lock) release() error { return l.file.Close() }

// holder is the pid of the process that has the lock, 0 for none.
func holder(f *os.File) (int, error) {
	q := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &q); err != nil {
		return 0, fmt.Errorf("ask who holds the run directory: %w", err)
	}
	if q.Type == unix.F_UNLCK {
		return 0, nil
	}
	return int(q.Pid), nil
}
