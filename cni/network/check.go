package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/gateway"
)

// Attachment is a pod's place in the network.
type Attachment struct {
	Key     string // its name there
	Pod     *Pod   // nil: no shim has claimed it
	Tap     string
	Sandbox bpf.ID // in the datapath, while it is open
	MTU     int    // of the gateway device, and of all taps
	// Changed is when it was claimed, released, opened or closed, the last of that.
	Changed time.Time
	// The rest is of what is open.
	Open            bool
	Network, IfName string
	NetNS           string
	Address         netip.Addr
	Policy          *policy.Policy
	TX, RX          bpf.Rate
	Ports           []Port
}

func (s *session) describe(a *attachment) *Attachment {
	d := &Attachment{Key: a.key, Pod: a.Pod, Tap: s.tapName(a.Tap), Sandbox: bpf.ID(a.Tap), Changed: a.written}
	if s.gateway != nil {
		d.MTU = s.gateway.Attrs().MTU
	}
	if o := a.Open; o != nil {
		d.Open, d.Network, d.IfName, d.NetNS, d.Address = true, o.Network, o.IfName, o.NetNS, o.Address
		d.Policy, d.TX, d.RX, d.Ports = o.Policy, o.TX, o.RX, o.Ports
	}
	return d
}

// Get returns an attachment by its CNI id; errdefs.ErrNotFound if there is none.
func (n *Network) Get(ctx context.Context, id string) (_ *Attachment, err error) {
	key, err := keyOf(id)
	if err != nil {
		return nil, err
	}
	s, err := n.beginUp(ctx)
	if err != nil {
		return nil, err
	}
	defer s.end(&err)
	a, err := s.take(ctx, key, false)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if a == nil {
		return nil, fmt.Errorf("container %s has no place in the network: %w", id, errdefs.ErrNotFound)
	}
	defer s.done(a, &err)
	if !a.exists {
		return nil, fmt.Errorf("container %s has no place in the network: %w", id, errdefs.ErrNotFound)
	}
	return s.describe(a), nil
}

// List lists all attachments. Those whose records are damaged are the error's.
func (n *Network) List(ctx context.Context) (all []*Attachment, err error) {
	s, err := n.begin(ctx, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer s.end(&err)
	keys, err := s.keys()
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, key := range keys {
		a := &attachment{key: key}
		exists, err := s.read(key, &a.record)
		errs = append(errs, err)
		if exists {
			all = append(all, s.describe(a))
		}
	}
	return all, errors.Join(errs...)
}

// Check verifies that all that Open made is in force, and that the address is among those that the runtime remembers.
// errdefs.ErrNotFound for what isn't open, errdefs.ErrFailedPrecondition for what isn't as it must be.
func (n *Network) Check(ctx context.Context, id, network, ifName string, remembered []netip.Addr) error {
	return n.look(ctx, id, func(s *session, a *attachment) error {
		if a.Open.Network != network || a.Open.IfName != ifName {
			return notOpen(id)
		}
		if !slices.Contains(remembered, a.Open.Address) {
			return fmt.Errorf("container %s has the address %s, and not one of %v: %w", id, a.Open.Address, remembered, errdefs.ErrFailedPrecondition)
		}
		l, err := s.tap(a.Tap)
		if err != nil {
			return err
		}
		if err := s.datapath.CheckGateway(); err != nil {
			return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
		}
		if err := s.datapath.CheckSandbox(bpf.ID(a.Tap), l.Attrs().Index, a.Open.Address); err != nil {
			return err
		}
		return s.checkPorts(ctx, a)
	})
}

// CheckGateway verifies that the gateway device runs the datapath's program; errdefs.ErrFailedPrecondition if not,
// errdefs.ErrUnavailable if the network isn't up.
func (n *Network) CheckGateway(ctx context.Context) (err error) {
	s, err := n.beginUp(ctx)
	if err != nil {
		return err
	}
	defer s.end(&err)
	if err := s.datapath.CheckGateway(); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// Status says why nothing could be opened, errdefs.ErrUnavailable or errdefs.ErrResourceExhausted, or why what is opened
// has not all of the network, errdefs.ErrFailedPrecondition.
func (n *Network) Status(ctx context.Context) (err error) {
	s, err := n.beginUp(ctx)
	if err != nil {
		return err
	}
	defer s.end(&err)
	if err := s.datapath.CheckGateway(); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	full, err := s.full()
	if err != nil {
		return err
	}
	if full != nil {
		return fmt.Errorf("%s; %s: %w", full.Detail, full.Remedy, errdefs.ErrResourceExhausted)
	}
	found, err := gateway.Check(ctx, n.cfg)
	if err != nil {
		return err
	}
	for _, level := range []gateway.Level{gateway.Broken, gateway.Blocked} {
		for _, f := range found {
			if f.Level == level {
				return fmt.Errorf("%s; %s: %w", f.Detail, f.Remedy, map[gateway.Level]error{gateway.Broken: errdefs.ErrUnavailable, gateway.Blocked: errdefs.ErrFailedPrecondition}[level])
			}
		}
	}
	return nil
}

// full says what there is no more of; nil: nothing.
func (s *session) full() (*Finding, error) {
	count := map[string]int{}
	for _, dir := range []string{tapsDir, freeDir, addressesDir} {
		names, err := s.names(dir)
		if err != nil {
			return nil, err
		}
		count[dir] = len(names)
	}
	pool := s.cfg.Network.Pool
	most := 1<<(32-pool.Bits()) - 3 // without the first, the last and the gateway's
	switch {
	case count[tapsDir] >= bpf.MaxSandboxes && count[freeDir] == 0:
		return &Finding{gateway.Hint, fmt.Sprintf("all %d taps are in use", bpf.MaxSandboxes), "end sandboxes: no host has more"}, nil
	case count[addressesDir] >= most:
		return &Finding{gateway.Hint, fmt.Sprintf("all %d addresses of network.pool %s are in use", most, pool), "end sandboxes, or set network.pool to a larger network"}, nil
	}
	return nil, nil
}
