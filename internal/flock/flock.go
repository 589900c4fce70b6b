// Package flock locks files between processes. A lock ends with its holder.
package flock

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrLocked says that somebody else has the lock.
var ErrLocked = errors.New("locked by another process")

// Lock waits for the exclusive lock on the file at path, which is made if need be and must not be removed. unlock
// releases it.
func Lock(ctx context.Context, path string) (unlock func(), err error) {
	unlock, err = TryLock(path)
	if !errors.Is(err, ErrLocked) {
		return unlock, err
	}
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	return wait(ctx, f, unix.LOCK_EX)
}

// LockDir waits for the lock on a directory itself: exclusive, or shared with all who share it. It is the lock on the
// directory that has the path when LockDir returns; fs.ErrNotExist if it has been removed meanwhile.
func LockDir(ctx context.Context, dir string, shared bool) (unlock func(), err error) {
	how := unix.LOCK_EX
	if shared {
		how = unix.LOCK_SH
	}
	for {
		f, err := os.Open(dir)
		if err != nil {
			return nil, err
		}
		unlock := func() { _ = f.Close() }
		err = acquire(f, how|unix.LOCK_NB)
		if errors.Is(err, ErrLocked) {
			unlock, err = wait(ctx, f, how)
		} else if err != nil {
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			return nil, err
		}
		if same, err := isAt(f, dir); same {
			return unlock, nil
		} else if err != nil {
			unlock()
			return nil, err
		}
		unlock() // another has taken its place
	}
}

// TryLockDir takes the exclusive lock on a directory itself, or returns ErrLocked at once; fs.ErrNotExist if there is none.
func TryLockDir(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	err = acquire(f, unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		var same bool
		if same, err = isAt(f, dir); err == nil && !same {
			err = ErrLocked // another has taken its place just now
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// isAt tells whether f is what the path leads to.
func isAt(f *os.File, path string) (bool, error) {
	have, err := f.Stat()
	if err != nil {
		return false, err
	}
	want, err := os.Stat(path)
	if err != nil {
		return false, err
	}
	return os.SameFile(have, want), nil
}

// wait takes the lock on f, which it closes if it can't.
func wait(ctx context.Context, f *os.File, how int) (unlock func(), err error) {
	got := make(chan error, 1)
	go func() { got <- acquire(f, how) }()
	select {
	case err = <-got:
	case <-ctx.Done():
		go func() { // a wait for a lock can't be called off
			<-got
			_ = f.Close()
		}()
		return nil, fmt.Errorf("wait for the lock %s: %w", f.Name(), ctx.Err())
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// TryLock takes the lock, or returns ErrLocked at once.
func TryLock(path string) (unlock func(), err error) {
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	if err := acquire(f, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

func open(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
}

func acquire(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("%s: %w", f.Name(), ErrLocked)
		case err != nil:
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		default:
			return nil
		}
	}
}
