package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/internal/undo"
)

// Request is what Open is asked for.
type Request struct {
	// ID is the container's, as CNI plugins are told it: "NAMESPACE-ID", and "ID" for a pod of CRI's.
	ID string
	// Network is the name of the CNI network, IfName what the runtime calls the card, NetNS the path it gave.
	Network, IfName, NetNS string
	// Policy is what the sandbox may reach; nil: nothing.
	Policy *policy.Policy
	// TX and RX limit bytes from and to the sandbox.
	TX, RX bpf.Rate
	// Ports of the host lead to the sandbox. It takes the daemon: while none runs, they are refused.
	Ports []Port
}

// Open lets a pod's packets through, by a policy, whether its shim has been there yet or not. The tap is open when Open
// returns and not before, unless it is held. errdefs.ErrAlreadyExists if it is open, errdefs.ErrInvalidArgument for a policy of which an entry
// can't be had, errdefs.ErrUnavailable if the network isn't up, errdefs.ErrResourceExhausted if no tap or address is left,
// or no room for the policy. Of ports, errdefs.ErrAlreadyExists is for one that is mapped to another sandbox, and ports.Update's
// errors are Open's.
func (n *Network) Open(ctx context.Context, r Request) (_ *Attachment, err error) {
	key, err := keyOf(r.ID)
	if err != nil {
		return nil, err
	}
	if err := n.validatePorts(r.Ports); err != nil {
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
	if a.Open != nil {
		return nil, fmt.Errorf("container %s has an interface already, %s of network %s: %w", r.ID, a.Open.IfName, a.Open.Network, errdefs.ErrAlreadyExists)
	}
	// With the lock: a Refresh is either before, as is the change that it is for, or it comes to this one too.
	rows, err := s.compile(r.Policy)
	if err != nil {
		return nil, err
	}
	address, err := s.takeAddress()
	if err != nil {
		return nil, err
	}
	open := &opened{Network: r.Network, IfName: r.IfName, NetNS: r.NetNS, Address: address, Policy: r.Policy, TX: r.TX, RX: r.RX, Ports: r.Ports}
	var tap netlink.Link
	if a.exists {
		a.Open = open
		err = s.write(a)
	} else {
		tap, err = s.place(a, func() { a.Open = open })
	}
	if err != nil {
		return nil, errors.Join(err, s.unmark(addressesDir, address.String()))
	}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return s.drop(ctx, a) })
	if tap == nil {
		if tap, err = s.tap(a.Tap); err != nil {
			return nil, err
		}
	}
	if err := s.openTap(a, tap, rows); err != nil {
		return nil, err
	}
	if err := s.openPorts(ctx, a); err != nil {
		return nil, err
	}
	return s.describe(a), nil
}

// drop closes what is open, and frees what then is nobody's. What can't be closed stays as it is written down, open, for the
// next Close.
func (s *session) drop(ctx context.Context, a *attachment) error {
	if err := s.close(ctx, a); err != nil {
		return err
	}
	return s.settle(a)
}

func (s *session) openTap(a *attachment, tap netlink.Link, rows []policy.Row) error {
	if err := s.setMTU(tap); err != nil {
		return err
	}
	return s.datapath.AddSandbox(bpf.Sandbox{
		ID: bpf.ID(a.Tap), Ifindex: tap.Attrs().Index, GuestIP: GuestPrefix.Addr(), GuestMAC: GuestMAC, HostIP: a.Open.Address,
		Suspended: a.Held, Settings: s.settings(a.Open),
	}, rows)
}

func (s *session) settings(o *opened) bpf.Settings {
	return bpf.Settings{Resolver: true, MaxFlows: s.cfg.Network.MaxFlows, NewFlows: newFlows, TX: o.TX, RX: o.RX}
}

// takeAddress reserves one of the pool's, anywhere in it: one that was just somebody's would get what is still sent to it.
func (s *session) takeAddress() (netip.Addr, error) {
	pool, gateway := s.cfg.Network.Pool, s.cfg.Network.Gateway()
	size := uint32(1) << (32 - pool.Bits())
	base := pool.Addr().As4()
	first := rand.Uint32N(size)
	for i := range size {
		k := (first + i) % size
		b := base
		for j := range b {
			b[j] |= byte(k >> (24 - 8*j))
		}
		address := netip.AddrFrom4(b)
		if k == 0 || k == size-1 || address == gateway {
			continue
		}
		if err := s.mark(addressesDir, address.String()); err == nil {
			return address, nil
		} else if !errors.Is(err, fs.ErrExist) {
			return netip.Addr{}, fmt.Errorf("reserve address %s: %w", address, err)
		}
	}
	return netip.Addr{}, fmt.Errorf("all addresses of network.pool %s are in use: %w", pool, errdefs.ErrResourceExhausted)
}

// SetPolicy replaces a policy, for live connections too; nil closes all. The names of errors are Open's, and
// errdefs.ErrNotFound for what isn't open.
func (n *Network) SetPolicy(ctx context.Context, id string, p *policy.Policy) error {
	return n.look(ctx, id, func(s *session, a *attachment) error {
		rows, err := s.compile(p)
		if err != nil {
			return err
		}
		// Written before it is in force: what another process puts in force then is the latest, if maybe twice.
		a.Open.Policy = p
		if err := s.write(a); err != nil {
			return err
		}
		return s.datapath.SetPolicy(bpf.ID(a.Tap), rows)
	})
}

func notOpen(id string) error {
	return fmt.Errorf("container %s has no open place in the network: %w", id, errdefs.ErrNotFound)
}

// Close ends what Open began, from any state; that there is nothing, or another interface, is fine. The ports and the tap are
// closed first, then all is forgotten that its packets have left.
func (n *Network) Close(ctx context.Context, id, network, ifName string) error {
	key, err := keyOf(id)
	if err != nil {
		return err
	}
	return n.let(ctx, key, func(s *session, a *attachment) error {
		if a.Open == nil || a.Open.Network != network || a.Open.IfName != ifName {
			return nil
		}
		return s.close(ctx, a)
	})
}

// shut has nothing pass any more and forgets what has, from any state.
func (s *session) shut(ctx context.Context, a *attachment) error {
	if err := s.closePorts(ctx, a); err != nil {
		return err
	}
	if s.datapath != nil {
		if _, err := s.datapath.RemoveSandbox(bpf.ID(a.Tap)); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("close the tap of %s: %w", a.key, err)
		}
	}
	return s.forgetConnections(netip.PrefixFrom(a.Open.Address, 32))
}

func (s *session) close(ctx context.Context, a *attachment) error {
	if err := s.shut(ctx, a); err != nil {
		return err
	}
	address := a.Open.Address
	a.Open = nil
	if err := s.write(a); err != nil {
		return err
	}
	// Whoever has it from here on, nothing that is written down says that it is another's.
	if err := s.unmark(addressesDir, address.String()); err != nil {
		return fmt.Errorf("release address %s: %w", address, err)
	}
	return nil
}
