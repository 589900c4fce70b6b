package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/gateway"
)

// Find returns the attachment that people mean by a name: NAMESPACE/ID, the id of a container in the given namespace, or the
// id that CNI plugins are told. errdefs.ErrNotFound if there is none.
func (n *Network) Find(ctx context.Context, namespace, name string) (*Attachment, error) {
	ids := []string{Pod{namespace, name}.cniID(), name}
	if ns, id, ok := strings.Cut(name, "/"); ok {
		ids = []string{Pod{ns, id}.cniID()}
	}
	for _, id := range ids {
		if a, err := n.Get(ctx, id); !errdefs.IsNotFound(err) {
			return a, err
		}
	}
	return nil, fmt.Errorf("container %s has no place in the network: %w", name, errdefs.ErrNotFound)
}

// look runs f on what is open under a CNI id, which nobody else changes meanwhile; errdefs.ErrNotFound if it isn't.
func (n *Network) look(ctx context.Context, id string, f func(*session, *attachment) error) (err error) {
	key, err := keyOf(id)
	if err != nil {
		return err
	}
	s, err := n.beginUp(ctx)
	if err != nil {
		return err
	}
	defer s.end(&err)
	a, err := s.take(ctx, key, false)
	if errors.Is(err, fs.ErrNotExist) {
		return notOpen(id)
	} else if err != nil {
		return err
	}
	defer s.done(a, &err)
	if a.Open == nil {
		return notOpen(id)
	}
	return f(s, a)
}

// Flows lists what a container has open, in no order.
func (n *Network) Flows(ctx context.Context, id string) (flows []bpf.Flow, err error) {
	err = n.look(ctx, id, func(s *session, a *attachment) (err error) {
		flows, err = s.datapath.Flows(bpf.ID(a.Tap))
		return err
	})
	return flows, err
}

// Counters returns what was counted since the container's tap was opened.
func (n *Network) Counters(ctx context.Context, id string) (counters bpf.Counters, err error) {
	err = n.look(ctx, id, func(s *session, a *attachment) (err error) {
		counters, err = s.datapath.Counters(bpf.ID(a.Tap))
		return err
	})
	return counters, err
}

// Decide says what becomes of a container's packet of no flow, by the policy that is in force. ICMP has port 0.
func (n *Network) Decide(ctx context.Context, id string, to netip.Addr, p policy.Protocol, port uint16) (d bpf.Decision, err error) {
	err = n.look(ctx, id, func(s *session, a *attachment) (err error) {
		d, err = s.datapath.Decide(bpf.ID(a.Tap), to, p, port)
		return err
	})
	return d, err
}

// CheckTap verifies that a container's tap is there, up, and runs the datapath's programs; errdefs.ErrFailedPrecondition if
// not.
func (n *Network) CheckTap(ctx context.Context, id string) error {
	return n.look(ctx, id, func(s *session, a *attachment) error {
		l, err := s.tap(a.Tap)
		if err != nil {
			return err
		}
		return s.datapath.CheckSandbox(bpf.ID(a.Tap), l.Attrs().Index, a.Open.Address)
	})
}

// Overview is the network as a whole.
type Overview struct {
	Device   string       `json:"device"` // the gateway's
	Address  netip.Addr   `json:"address"`
	Pool     netip.Prefix `json:"pool"`
	MTU      int          `json:"mtu"`
	Hook     string       `json:"hook"` // tcx or clsact; "": none
	Uplink   []string     `json:"uplink"`
	Open     int          `json:"open"`   // containers that have a network
	Closed   int          `json:"closed"` // and that have a tap, but nobody opened it
	Warm     int          `json:"warm"`   // taps that are ready
	Ports    int          `json:"ports"`  // of the host that lead to containers
	Findings []Finding    `json:"findings"`
}

// Finding is something of the network that isn't as it should be.
type Finding struct {
	Level  gateway.Level `json:"level"`
	Detail string        `json:"detail"`
	Remedy string        `json:"remedy,omitempty"`
}

// Overview looks at all of the network; errdefs.ErrUnavailable if it isn't up.
func (n *Network) Overview(ctx context.Context) (_ *Overview, err error) {
	s, err := n.beginUp(ctx)
	if err != nil {
		return nil, err
	}
	defer s.end(&err)
	o := &Overview{
		Device: n.cfg.Network.Device, Address: n.cfg.Network.Gateway(), Pool: n.cfg.Network.Pool, MTU: s.gateway.Attrs().MTU,
		Uplink: []string{}, Findings: []Finding{},
	}
	if o.Hook, err = s.datapath.HookKind(); err != nil {
		return nil, err
	}
	if err := s.datapath.CheckGateway(); err != nil {
		o.Findings = append(o.Findings, Finding{Level: gateway.Broken, Detail: err.Error(), Remedy: gateway.Mend})
	}
	if full, err := s.full(); err != nil {
		return nil, err
	} else if full != nil {
		o.Findings = append(o.Findings, *full)
	}
	free, err := s.names(freeDir)
	if err != nil {
		return nil, err
	}
	o.Warm = len(free)
	keys, err := s.keys()
	if err != nil {
		return nil, err
	}
	for _, key := range keys {
		var r record
		exists, err := s.read(key, &r)
		switch {
		case err != nil:
			o.Findings = append(o.Findings, Finding{Level: gateway.Broken, Detail: err.Error()})
		case exists && r.Open != nil:
			o.Open++
		case exists:
			o.Closed++
		}
	}
	if err := s.lookAtPorts(ctx, o); err != nil {
		return nil, err
	}
	up, err := gateway.LookUplink()
	if err != nil {
		return nil, err
	}
	o.Uplink = append(o.Uplink, up.Devices...)
	found, err := gateway.Check(ctx, n.cfg)
	if err != nil {
		return nil, err
	}
	for _, f := range found {
		o.Findings = append(o.Findings, Finding(f))
	}
	return o, nil
}
