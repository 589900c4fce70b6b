package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Claim gives a pod its place in the network: the one that was opened for it, or a new, closed one. Asking again changes
// nothing. errdefs.ErrUnavailable if the network isn't up, errdefs.ErrAlreadyExists if the names of two pods make one id.
func (n *Network) Claim(ctx context.Context, pod Pod) (_ *Attachment, err error) {
	key, err := pod.key()
	if err != nil {
		return nil, err
	}
	s, err := n.beginUp(ctx)
	if err != nil {
		return nil, err
	}
	defer s.end(&err)
	a, err := s.take(ctx, key, true)
	if err != nil {
		return nil, err
	}
	defer s.done(a, &err)
	switch {
	case a.Pod != nil && *a.Pod != pod:
		err = fmt.Errorf("pod %s has the name %s in the network, which pod %s would have too: %w", a.Pod, key, pod, errdefs.ErrAlreadyExists)
	case a.Pod != nil:
	case a.exists:
		a.Pod = &pod
		err = s.write(a)
	default:
		_, err = s.place(a, func() { a.Pod = &pod })
	}
	if err != nil {
		return nil, err
	}
	return s.describe(a), nil
}

// place gives an attachment a tap, and writes it down with what set says.
func (s *session) place(a *attachment, set func()) (netlink.Link, error) {
	number, l, err := s.takeTap()
	if err != nil {
		return nil, err
	}
	if err := s.setMTU(l); err != nil {
		return nil, errors.Join(err, s.giveTap(number, false))
	}
	a.Tap = number
	set()
	if err := s.write(a); err != nil {
		return nil, errors.Join(err, s.giveTap(number, false))
	}
	return l, nil
}

// OpenTap opens the tap that the pod has claimed, for its machine: made with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR. The caller
// hands it on and closes it. errdefs.ErrNotFound if nothing is claimed, errdefs.ErrFailedPrecondition if the tap is in use
// or not as it must be.
func (n *Network) OpenTap(ctx context.Context, pod Pod) (tap *os.File, err error) {
	err = n.claimed(ctx, pod, func(s *session, a *attachment) (err error) {
		tap, err = s.openDevice(a)
		return err
	})
	return tap, err
}

func (s *session) openDevice(a *attachment) (*os.File, error) {
	l, err := s.tap(a.Tap)
	if err != nil {
		return nil, err
	}
	if !a.Used {
		a.Used = true
		if err := s.write(a); err != nil {
			return nil, err
		}
	}
	f, err := attach(l.Attrs().Name, tapFlags)
	if errors.Is(err, unix.EBUSY) {
		return nil, fmt.Errorf("tap %s of pod %s is in use by another machine: %w", l.Attrs().Name, a.Pod, errdefs.ErrFailedPrecondition)
	} else if err != nil {
		return nil, fmt.Errorf("open tap %s: %w", l.Attrs().Name, err)
	}
	// Had it gone meanwhile, this would be another one, without programs.
	if now, err := s.tap(a.Tap); err != nil || now.Attrs().Index != l.Attrs().Index {
		return nil, errors.Join(fmt.Errorf("tap %s has changed while it was opened", l.Attrs().Name), err, f.Close())
	}
	return f, nil
}

func notClaimed(pod Pod) error {
	return fmt.Errorf("pod %s has claimed no place in the network: %w", pod, errdefs.ErrNotFound)
}

// Release says that the pod's machine is no more. What Cube has opened for it itself is closed; what a CNI plugin has stays
// open until Close. That there is nothing is fine.
func (n *Network) Release(ctx context.Context, pod Pod) (err error) {
	key, err := pod.key()
	if err != nil {
		return err
	}
	return n.let(ctx, key, func(s *session, a *attachment) error {
		if a.Pod == nil || *a.Pod != pod {
			return nil
		}
		if a.Open != nil && a.Open.Network == Own {
			if err := s.close(ctx, a); err != nil {
				return err
			}
		}
		return s.unclaim(a)
	})
}

// unclaim forgets the pod, whose machine is no more. What is open is so for the next one.
func (s *session) unclaim(a *attachment) error {
	if a.Held && s.datapath != nil {
		if err := s.unhold(a); err != nil {
			return err
		}
	}
	a.Pod, a.Held = nil, false
	return nil
}

// let has change let go of a part of an attachment, and frees it if that was the last one.
func (n *Network) let(ctx context.Context, key string, change func(*session, *attachment) error) (err error) {
	s, err := n.begin(ctx, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer s.end(&err)
	a, err := s.take(ctx, key, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer s.done(a, &err)
	if !a.exists {
		return nil
	}
	if err := change(s, a); err != nil {
		return err
	}
	return s.settle(a)
}

// settle writes down what is left of an attachment, or frees its tap.
func (s *session) settle(a *attachment) error {
	if a.Pod != nil || a.Open != nil {
		return s.write(a)
	}
	if a.Used || s.datapath == nil {
		if err := s.removeDevice(a.Tap); err != nil {
			return err
		}
	}
	// Nobody's for a moment, but never two's.
	if err := s.forget(a); err != nil {
		return err
	}
	return s.giveTap(a.Tap, a.Used)
}
