// Package store makes sure that the directory of images, snapshots and base snapshots is there, on a file system whose
// files can share blocks wherever possible: the state directory itself, what the operator mounted there, or else an XFS
// image of a fixed size, mounted through a loop device.
package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
)

// Store is the directory, ready for use.
type Store struct {
	layout layout
}

// Ensure makes the store, or takes the one that is there. It is idempotent and may be killed at any point. On error
// nothing that it mounted is left.
func Ensure(ctx context.Context, cfg *config.Config, log *slog.Logger) (_ *Store, err error) {
	if err := os.MkdirAll(cfg.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the store: %w", err)
	}
	unlock, err := lock(cfg)
	if err != nil {
		return nil, err
	}
	defer unlock()
	l, err := inspect(cfg)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the store: %w", err)
	}
	if l.kind != Image {
		return &Store{layout: l}, nil
	}
	var u undo.Stack
	defer u.Run(&err)
	if !l.exists {
		if err := makeImage(ctx, cfg, log); err != nil {
			return nil, err
		}
	}
	if !l.mounted {
		dev, err := deviceOf(l)
		if err != nil {
			return nil, err
		}
		if err := mountImage(l, dev); err != nil {
			return nil, err
		}
		killpoint("mounted")
		u.Push(func() error { return unix.Unmount(l.dir, 0) })
	}
	if err := settle(ctx, cfg, log, l); err != nil {
		return nil, err
	}
	return &Store{layout: l}, nil
}

// settle brings the mounted image into its final form, whatever came before.
func settle(ctx context.Context, cfg *config.Config, log *slog.Logger, l layout) error {
	m, err := mountedOn(l.dir)
	if err != nil {
		return fmt.Errorf("set up the store: %w", err)
	}
	if m == nil {
		return fmt.Errorf("set up the store: %s was unmounted meanwhile", l.dir)
	}
	if err := allocate(cfg, log, l.image); err != nil {
		return err
	}
	return growFS(ctx, l.dir, m.Source, l.image)
}

// lock keeps two processes from making the same store at once.
func lock(cfg *config.Config) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(cfg.StateDir, "store.lock"), os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the store: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another process is setting up %s: wait for it, or set another state_dir", cfg.StoreDir())
	}
	return func() { f.Close() }, nil
}

// ErrBusy is a store that can't be unmounted because it is in use.
var ErrBusy = errors.New("the store is in use")

// Release unmounts the image, whose loop device goes with it. What isn't an image stays as it is. ErrBusy tells that
// something is still in use, such as a running container's disk; the store then stays mounted, which does no harm.
func (s *Store) Release() error {
	l := s.layout
	if l.kind != Image {
		return nil
	}
	err := unix.Unmount(l.dir, 0)
	switch {
	case err == nil, errors.Is(err, unix.EINVAL): // not mounted any more
		return nil
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("unmount %s: %w: stop its containers first", l.dir, ErrBusy)
	}
	return fmt.Errorf("unmount %s: %w", l.dir, err)
}
