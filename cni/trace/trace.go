// Package trace says what becomes of a container's packet on its way out of the host, as far as the host can know: what the
// policy in force says of it, which flows and connections there are and as what they leave, by which route and to which
// neighbour's MAC address. It looks at what the kernel has, sends nothing and changes nothing; it needs no daemon, only to be
// in the network namespace of the network.
package trace

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
)

// Report is the way of packets to a target.
type Report struct {
	Container string     `json:"container"` // its name in the network
	Address   netip.Addr `json:"address"`   // what the host knows it by
	Tap       string     `json:"tap"`
	Target    string     `json:"target"`
	Verdict   Verdict    `json:"verdict"`
	Flows     []Flow     `json:"flows"` // to the target, the latest first
	// Route and Neighbours are of what leaves the host, nil otherwise. Neighbours has the next hop first.
	Route      *Route      `json:"route,omitempty"`
	Neighbours []Neighbour `json:"neighbours,omitempty"`
	// Problems is what keeps packets from the target, each with what to do about it.
	Problems []string `json:"problems"`
}

// Verdict is what is decided on a first packet.
type Verdict struct {
	// Action is allow, deny, hard-deny or proxy, or resolver: the host's DNS forwarder answers it.
	Action string `json:"action"`
	Rule   int    `json:"rule,omitempty"` // counted from 1; 0: none
	Entry  string `json:"entry,omitempty"`
}

// resolver is the action of a lookup of names.
const resolver = "resolver"

func (v Verdict) String() string {
	switch {
	case v.Entry != "":
		return fmt.Sprintf("%s, by rule %d (%s)", v.Action, v.Rule, v.Entry)
	case v.Action == policy.HardDeny.String():
		return v.Action + ": an address of the host's, its networks or private ones, which no policy opens"
	case v.Action == resolver:
		return v.Action + ": the host's DNS forwarder answers"
	}
	return v.Action + ", by default"
}

// Flow is a flow as the datapath has it.
type Flow struct {
	Protocol  string        `json:"protocol"`
	Remote    string        `json:"remote"`     // with a port, if there is one
	GuestPort uint16        `json:"guest_port"` // an echo's identifier
	Inbound   bool          `json:"inbound"`    // the host opened it
	State     bpf.FlowState `json:"state"`
	Rule      int           `json:"rule,omitempty"`
	Idle      float64       `json:"idle_seconds"`
	TXPackets uint64        `json:"tx_packets"`
	TXBytes   uint64        `json:"tx_bytes"`
	RXPackets uint64        `json:"rx_packets"`
	RXBytes   uint64        `json:"rx_bytes"`
	// Connection is the kernel's, nil if it has none, or wasn't asked.
	Connection *Connection `json:"connection,omitempty"`
}

// FlowOf describes a flow.
func FlowOf(f bpf.Flow) Flow {
	remote := f.Remote.String()
	if f.RemotePort != 0 {
		remote = netip.AddrPortFrom(f.Remote, f.RemotePort).String()
	}
	return Flow{
		Protocol: policy.Protocol(f.Protocol).String(), Remote: remote, GuestPort: f.GuestPort, Inbound: f.Inbound, State: f.State,
		Rule: int(f.Rule), Idle: f.Idle.Round(time.Millisecond).Seconds(),
		TXPackets: f.TXPackets, TXBytes: f.TXBytes, RXPackets: f.RXPackets, RXBytes: f.RXBytes,
	}
}

// tracer makes a report.
type tracer struct {
	*Report
	ctx     context.Context
	cfg     *config.Config
	network *network.Network
	to      Target
	links   *netlink.Handle
}

// Run traces what a container, which network.Find has found, sends to a target. errdefs.ErrNotFound if its tap isn't open.
func Run(ctx context.Context, cfg *config.Config, a *network.Attachment, to Target) (*Report, error) {
	links, err := netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer links.Close()
	t := &tracer{
		Report: &Report{Container: a.Key, Address: a.Address, Tap: a.Tap, Target: to.String(), Flows: []Flow{}, Problems: []string{}},
		ctx:    ctx, cfg: cfg, network: network.New(cfg), to: to, links: links,
	}
	steps := []func() error{t.tap, func() error { return t.decide(a.Policy) }, t.flows, t.way, t.firewalls}
	for _, step := range steps {
		if err := step(); err != nil {
			return nil, err
		}
	}
	return t.Report, nil
}

func (t *tracer) problem(format string, args ...any) {
	t.Problems = append(t.Problems, fmt.Sprintf(format, args...))
}

// tap looks whether packets get from the machine to the datapath.
func (t *tracer) tap() error {
	if err := t.network.CheckTap(t.ctx, t.Container); errdefs.IsFailedPrecondition(err) {
		t.problem("%v; run the container again", err)
		return nil
	} else if err != nil {
		return err
	}
	l, err := t.links.LinkByName(t.Tap)
	if err != nil {
		return fmt.Errorf("look for tap %s: %w", t.Tap, err)
	}
	if l.Attrs().RawFlags&unix.IFF_LOWER_UP == 0 {
		t.problem("no machine has tap %s: start the container's task", t.Tap)
	}
	return nil
}

func (t *tracer) decide(p *policy.Policy) error {
	d, err := t.network.Decide(t.ctx, t.Container, t.to.Address, t.to.Protocol, t.to.Port)
	if err != nil {
		return err
	}
	if d.Resolver {
		t.Verdict.Action = resolver
		return nil
	}
	t.Verdict = Verdict{Action: d.Action.String(), Rule: int(d.Rule)}
	if n := int(d.Rule); p != nil && n > 0 && n <= len(p.Rules) {
		t.Verdict.Entry = p.Rules[n-1].String()
	}
	if d.Action == policy.Deny || d.Action == policy.HardDeny {
		t.problem("the policy in force says %s", t.Verdict)
	}
	return nil
}

// leaves says whether what is sent to the target is forwarded.
func (t *tracer) leaves() bool {
	return t.Verdict.Action != resolver && t.Verdict.Action != policy.Proxy.String()
}

func (t *tracer) flows() error {
	all, err := t.network.Flows(t.ctx, t.Container)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(f bpf.Flow) bool {
		return f.Remote != t.to.Address || f.RemotePort != t.to.Port || f.Protocol != uint8(t.to.Protocol)
	})
	slices.SortFunc(all, func(a, b bpf.Flow) int { return cmp.Compare(a.Idle, b.Idle) })
	if len(all) == 0 {
		return nil
	}
	connections, err := t.connections()
	if err != nil {
		return err
	}
	for _, f := range all {
		one := FlowOf(f)
		key := f.FlowKey
		if t.to.Protocol == policy.ICMP {
			key.GuestPort = 0
		}
		one.Connection = connections[key]
		t.Flows = append(t.Flows, one)
	}
	return nil
}

// firewalls looks for what stops all sandboxes' packets.
func (t *tracer) firewalls() error {
	found, err := gateway.Check(t.ctx, t.cfg)
	if err != nil {
		return err
	}
	for _, f := range found {
		if f.Level != gateway.Hint {
			t.problem("%s; %s", f.Detail, f.Remedy)
		}
	}
	return nil
}
