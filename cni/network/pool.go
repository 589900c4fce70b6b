package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strconv"

	"github.com/containerd/errdefs"
	"github.com/fsnotify/fsnotify"
	"github.com/vishvananda/netlink"
)

// takeTap returns a tap that is ready, or one that is made now, and its number.
func (s *session) takeTap() (int, netlink.Link, error) {
	names, err := s.names(freeDir)
	if err != nil {
		return 0, nil, err
	}
	for _, name := range names {
		number, err := strconv.Atoi(name)
		if err != nil || !validNumber(number) {
			return 0, nil, fmt.Errorf("%s is not ours", s.path(freeDir, name))
		}
		if err := os.Remove(s.path(freeDir, name)); errors.Is(err, fs.ErrNotExist) {
			continue // somebody was faster
		} else if err != nil {
			return 0, nil, fmt.Errorf("take tap %d: %w", number, err)
		}
		l, err := s.tap(number)
		if err == nil {
			return number, l, nil
		}
		// Whatever has become of it, another one will do.
		if err := s.removeTap(number); err != nil {
			return 0, nil, err
		}
	}
	return s.newTap()
}

func (s *session) newTap() (int, netlink.Link, error) {
	number, err := s.reserve()
	if err != nil {
		return 0, nil, err
	}
	l, err := s.makeTap(number)
	if err != nil {
		return 0, nil, errors.Join(err, s.unmark(tapsDir, strconv.Itoa(number)))
	}
	return number, l, nil
}

// giveTap returns a tap that is closed. One that a machine may have had is removed: what its end can set, as owners, filters
// and offloads, would be the next machine's.
func (s *session) giveTap(number int, used bool) error {
	if used || s.datapath == nil {
		return s.removeTap(number)
	}
	if err := s.mark(freeDir, strconv.Itoa(number)); err != nil {
		return fmt.Errorf("return tap %d: %w", number, err)
	}
	return nil
}

// Refill makes taps until as many are ready as configured, and returns how many it made.
func (n *Network) Refill(ctx context.Context) (made int, err error) {
	for ctx.Err() == nil {
		more, err := n.refillOne(ctx)
		if err != nil || !more {
			return made, err
		}
		made++
	}
	return made, ctx.Err()
}

// refillOne is an operation by itself, so that nobody who wants to be alone waits for all of them.
func (n *Network) refillOne(ctx context.Context) (_ bool, err error) {
	s, err := n.beginUp(ctx)
	if err != nil {
		return false, err
	}
	defer s.end(&err)
	names, err := s.names(freeDir)
	if err != nil || len(names) >= n.cfg.Network.WarmTaps {
		return false, err
	}
	number, _, err := s.newTap()
	if err != nil {
		return false, err
	}
	return true, s.giveTap(number, false)
}

// KeepWarm refills now and after each take, until ctx ends, which is no error. A refill that fails is logged and tried again
// with the next take. An error is a directory that can't be watched, as when the network has been taken down.
func (n *Network) KeepWarm(ctx context.Context) (err error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch the taps: %w", err)
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	if err := w.Add(n.path(freeDir)); err != nil {
		return fmt.Errorf("watch the taps: %w", err)
	}
	for {
		if _, err := n.Refill(ctx); err != nil && ctx.Err() == nil {
			slog.Error("make taps ready", "error", err)
		}
		for taken := false; !taken; {
			select {
			case <-ctx.Done():
				return nil
			case err := <-w.Errors:
				if !errors.Is(err, fsnotify.ErrEventOverflow) {
					return fmt.Errorf("watch the taps: %w", err)
				}
				taken = true
			case e := <-w.Events:
				if e.Name == n.path(freeDir) && e.Has(fsnotify.Remove) {
					return fmt.Errorf("the network has been taken down: %w", errdefs.ErrUnavailable)
				}
				taken = e.Has(fsnotify.Remove)
			}
		}
	}
}
