package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
)

// Hold has nothing pass to or from the machine of a pod that has claimed its place, whether it is open or somebody opens it
// meanwhile, until Resume or Renew. What was on its way by then is in the tap's queue or gone. It can be called again.
// errdefs.ErrNotFound if nothing is claimed.
func (n *Network) Hold(ctx context.Context, pod Pod) error {
	return n.claimed(ctx, pod, func(s *session, a *attachment) error {
		// Written before it is so: who opens it in between has it held.
		if !a.Held {
			a.Held = true
			if err := s.write(a); err != nil {
				return err
			}
		}
		if a.Open == nil {
			return nil
		}
		if err := s.datapath.Suspend(bpf.ID(a.Tap)); err != nil {
			return fmt.Errorf("hold the network of %s: %w", a.key, err)
		}
		return nil
	})
}

// Resume ends a Hold with all connections as they were.
func (n *Network) Resume(ctx context.Context, pod Pod) error {
	return n.claimed(ctx, pod, func(s *session, a *attachment) error { return s.unhold(a) })
}

// Renew ends a Hold for a machine with another past than the one that had the tap before, or the same one put back: with its
// address, its policy and its ports, but none of the connections. The guest's are reset when it sends something by them, those
// of the host's own sockets to it, such as behind its ports, are broken off at once, and whoever else sends something by one
// finds that there is none.
func (n *Network) Renew(ctx context.Context, pod Pod) error {
	return n.claimed(ctx, pod, func(s *session, a *attachment) error {
		if !a.Held {
			return fmt.Errorf("the network of %s isn't held: %w", a.key, errdefs.ErrFailedPrecondition)
		}
		if a.Open != nil {
			if err := s.datapath.Renew(bpf.ID(a.Tap)); err != nil {
				return fmt.Errorf("renew the network of %s: %w", a.key, err)
			}
			if err := s.breakSockets(a.Open.Address); err != nil {
				return err
			}
			if err := s.forgetConnections(netip.PrefixFrom(a.Open.Address, 32)); err != nil {
				return err
			}
		}
		return s.unhold(a)
	})
}

// unhold lets packets pass again, if it is open.
func (s *session) unhold(a *attachment) error {
	if !a.Held {
		return nil
	}
	if a.Open != nil {
		if err := s.datapath.Resume(bpf.ID(a.Tap)); err != nil && !errdefs.IsNotFound(err) { // one that isn't there is closed, as Check tells
			return fmt.Errorf("let packets of %s pass: %w", a.key, err)
		}
	}
	a.Held = false
	return s.write(a)
}

// claimed runs f on what a pod has claimed, which nobody else changes meanwhile; errdefs.ErrNotFound if it has claimed nothing.
func (n *Network) claimed(ctx context.Context, pod Pod, f func(*session, *attachment) error) (err error) {
	key, err := pod.key()
	if err != nil {
		return err
	}
	s, err := n.beginUp(ctx)
	if err != nil {
		return err
	}
	defer s.end(&err)
	a, err := s.take(ctx, key, false)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if a == nil {
		return notClaimed(pod)
	}
	defer s.done(a, &err)
	if a.Pod == nil || *a.Pod != pod {
		return notClaimed(pod)
	}
	return f(s, a)
}

// Drain takes what is in the queue of a tap, which is one that OpenTap has returned or a copy of it. Nothing is added to it
// while the place is held. Reads of the tap don't wait afterwards, whoever has had it: a machine's must not.
func Drain(tap *os.File) error {
	raw, err := tap.SyscallConn()
	if err != nil {
		return err
	}
	b := make([]byte, 1<<17) // more than any frame with its header
	var rerr error
	if err := raw.Control(func(fd uintptr) {
		rerr = unix.SetNonblock(int(fd), true)
		for rerr == nil || errors.Is(rerr, unix.EINTR) {
			_, rerr = unix.Read(int(fd), b)
		}
	}); err != nil {
		return err
	}
	if !errors.Is(rerr, unix.EAGAIN) {
		return fmt.Errorf("empty the queue of tap %s: %w", tap.Name(), rerr)
	}
	return nil
}
