package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/internal/whole"
)

// compile makes rows of a policy, with what protects the host as it is now.
func (s *session) compile(p *policy.Policy) ([]policy.Row, error) {
	if p == nil {
		return nil, nil
	}
	g, err := s.guard()
	if err != nil {
		return nil, err
	}
	return policy.Compile(*p, g)
}

// guard has the pool, the host's addresses and the networks it is in.
func (s *session) guard() (policy.Guard, error) {
	g := policy.Guard{Denied: []netip.Prefix{s.cfg.Network.Pool}}
	for _, o := range s.cfg.Network.Openings {
		g.Openings = append(g.Openings, policy.Opening{To: o.To, Ports: o.Ports, Protocol: o.Protocol})
	}
	addrs, err := whole.List(func() ([]netlink.Addr, error) { return s.links.AddrList(nil, unix.AF_INET) })
	if err != nil {
		return g, fmt.Errorf("list the host's addresses: %w", err)
	}
	for _, a := range addrs {
		for _, in := range []*net.IPNet{a.IPNet, a.Peer} {
			if in == nil {
				continue
			}
			ip, ok := netip.AddrFromSlice(in.IP.To4())
			bits, _ := in.Mask.Size()
			if !ok {
				continue
			}
			g.Denied = append(g.Denied, netip.PrefixFrom(ip, 32))
			if bits > 0 {
				g.Denied = append(g.Denied, netip.PrefixFrom(ip, bits).Masked())
			}
		}
	}
	return g, nil
}

// Refresh has all that is open follow the host: its addresses, which policies can't open, and the gateway device's MTU; and
// the limits of this version and its configuration. One that fails doesn't keep the others from it.
func (n *Network) Refresh(ctx context.Context) (err error) {
	keys, err := n.keys()
	if err != nil {
		return err
	}
	var errs []error
	for _, key := range keys {
		if err := n.refresh(ctx, key); err != nil {
			errs = append(errs, fmt.Errorf("refresh the network of %s: %w", key, err))
		}
	}
	return errors.Join(errs...)
}

func (n *Network) refresh(ctx context.Context, key string) (err error) {
	s, err := n.beginUp(ctx)
	if err != nil {
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
	if a.Open != nil { // first, and for a tap that is down too: it may come up again
		rows, err := s.compile(a.Open.Policy)
		if err != nil {
			return err
		}
		if err := s.datapath.SetPolicy(bpf.ID(a.Tap), rows); err != nil {
			return err
		}
		if err := s.datapath.UpdateSandbox(bpf.ID(a.Tap), s.settings(a.Open)); err != nil {
			return err
		}
	}
	l, err := s.tap(a.Tap)
	if err != nil {
		return err
	}
	return s.setMTU(l)
}

// forgetConnections removes from the kernel's table those of sandboxes with addresses of a network.
func (s *session) forgetConnections(with netip.Prefix) error {
	if _, err := s.links.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, of(with)); err != nil {
		return fmt.Errorf("forget the connections of %s: %w", with, err)
	}
	return nil
}

// of matches connections from or to addresses of a network.
type of netip.Prefix

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (o of) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	for _, ip := range [][]byte{f.Forward.SrcIP, f.Forward.DstIP} {
		if a, ok := netip.AddrFromSlice(ip); ok && netip.Prefix(o).Contains(a.Unmap()) {
			return true
		}
	}
	return false
}
