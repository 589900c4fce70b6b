package trace

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/internal/whole"
)

// Connection is what the kernel's connection tracking has of a flow.
type Connection struct {
	// As is what the remote sees it come from.
	As string `json:"as"`
	// State is TCP's, "" for others.
	State string `json:"state,omitempty"`
	// Expires is in how many seconds the kernel forgets it, if nothing comes.
	Expires uint32 `json:"expires_seconds"`
}

// tcpStates are those of linux/netfilter/nf_conntrack_tcp.h.
var tcpStates = [...]string{"NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT", "CLOSE", "SYN_SENT2"}

// connections lists the kernel's from the container to the target. Those of echoes have 0 for a port: the library doesn't
// read their identifiers.
func (t *tracer) connections() (map[bpf.FlowKey]*Connection, error) {
	all, err := whole.List(func() ([]*netlink.ConntrackFlow, error) {
		return t.links.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
	})
	if err != nil {
		return nil, fmt.Errorf("list the kernel's connections: %w", err)
	}
	found := map[bpf.FlowKey]*Connection{}
	for _, c := range all {
		f := c.Forward
		if policy.Protocol(f.Protocol) != t.to.Protocol || addr(f.SrcIP) != t.Address || addr(f.DstIP) != t.to.Address || f.DstPort != t.to.Port {
			continue
		}
		as := addr(c.Reverse.DstIP).String()
		if t.to.Protocol != policy.ICMP {
			as = netip.AddrPortFrom(addr(c.Reverse.DstIP), c.Reverse.DstPort).String()
		}
		k := &Connection{As: as, Expires: c.TimeOut}
		if tcp, ok := c.ProtoInfo.(*netlink.ProtoInfoTCP); ok && int(tcp.State) < len(tcpStates) {
			k.State = tcpStates[tcp.State]
		}
		found[bpf.FlowKey{Remote: t.to.Address, RemotePort: t.to.Port, GuestPort: f.SrcPort, Protocol: f.Protocol}] = k
	}
	return found, nil
}

func addr(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// Route is the way that the kernel takes.
type Route struct {
	Device string `json:"device"`
	MTU    int    `json:"mtu"`
	// Gateway is the next hop; none: the target is a neighbour itself.
	Gateway *netip.Addr `json:"gateway,omitempty"`
}

// Neighbour is what the kernel knows of an address on the device.
type Neighbour struct {
	Address netip.Addr `json:"address"`
	MAC     string     `json:"mac,omitempty"`
	State   string     `json:"state"`
	// NextHop: it gets the packets. Gateway: to pass them on.
	NextHop bool `json:"next_hop"`
	Gateway bool `json:"gateway"`
}

// neighbourStates are those of linux/neighbour.h. The kernel gives one at a time; unknown is none.
var neighbourStates = map[int]string{
	netlink.NUD_INCOMPLETE: "INCOMPLETE", netlink.NUD_REACHABLE: "REACHABLE", netlink.NUD_STALE: "STALE", netlink.NUD_DELAY: "DELAY",
	netlink.NUD_PROBE: "PROBE", netlink.NUD_FAILED: "FAILED", netlink.NUD_NOARP: "NOARP", netlink.NUD_PERMANENT: "PERMANENT",
}

// unknown is the state of a neighbour that the kernel hasn't looked for.
const unknown = "UNKNOWN"

// way asks the kernel for the route of a packet that comes in by the gateway device, as the datapath marks it.
func (t *tracer) way() error {
	if !t.leaves() {
		return nil
	}
	gw, err := t.links.LinkByName(t.cfg.Network.Device)
	if err != nil {
		return fmt.Errorf("look for device %s: %w", t.cfg.Network.Device, err)
	}
	routes, err := t.links.RouteGetWithOptions(t.to.Address.AsSlice(), &netlink.RouteGetOptions{
		IifIndex: gw.Attrs().Index, SrcAddr: t.Address.AsSlice(), Mark: t.cfg.Network.Marks().Direct,
	})
	switch {
	case errors.Is(err, unix.ENETUNREACH):
		return t.noRoute()
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EXDEV):
		t.problem("the host forwards nothing to %s (%v): see `ip route get %s from %s iif %s`", t.to.Address, err, t.to.Address, t.Address, t.cfg.Network.Device)
		return nil
	case err != nil:
		return fmt.Errorf("look for the route to %s: %w", t.to.Address, err)
	case len(routes) == 0:
		return t.noRoute()
	}
	r := routes[0]
	if r.Type != unix.RTN_UNICAST {
		// A packet of the policy's direct way that is for the host itself is the guard's to drop.
		t.problem("%s is the host's own, or one for many: sandboxes' packets to it don't pass", t.to.Address)
		return nil
	}
	l, err := t.links.LinkByIndex(r.LinkIndex)
	if err != nil {
		return fmt.Errorf("look for the device of the route to %s: %w", t.to.Address, err)
	}
	t.Route = &Route{Device: l.Attrs().Name, MTU: l.Attrs().MTU}
	hop := t.to.Address
	if via, ok := r.Via.(*netlink.Via); ok {
		hop = addr(via.Addr)
	} else if r.Gw != nil {
		hop = addr(r.Gw)
	}
	if hop != t.to.Address {
		t.Route.Gateway = &hop
	}
	if l.Attrs().RawFlags&unix.IFF_NOARP != 0 {
		return nil // nobody has to be looked for there
	}
	return t.neighbours(l, hop)
}

// noRoute says whether the host has a way to the internet at all.
func (t *tracer) noRoute() error {
	routes, err := whole.List(func() ([]netlink.Route, error) {
		return t.links.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	if slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Dst == nil || strings.HasSuffix(r.Dst.String(), "/0") }) {
		t.problem("the host has no route to %s: see `ip route get %[1]s`", t.to.Address)
	} else {
		t.problem("the host has no route to %s, and no default route: add one, as by `ip route add default via ADDRESS`", t.to.Address)
	}
	return nil
}

// neighbours lists those on the device that the packet leaves by: whose MAC address it is sent to, and who else is there.
func (t *tracer) neighbours(l netlink.Link, hop netip.Addr) error {
	family := netlink.FAMILY_V4
	if hop.Is6() {
		family = netlink.FAMILY_V6
	}
	all, err := whole.List(func() ([]netlink.Neigh, error) { return t.links.NeighList(l.Attrs().Index, family) })
	if err != nil {
		return fmt.Errorf("list the neighbours on %s: %w", l.Attrs().Name, err)
	}
	next := Neighbour{Address: hop, State: unknown, NextHop: true, Gateway: t.Route.Gateway != nil}
	var others []Neighbour
	for _, n := range all {
		state, ok := neighbourStates[n.State]
		if !ok || n.State == netlink.NUD_NOARP {
			continue // multicast and its like
		}
		one := Neighbour{Address: addr(n.IP), State: state}
		if n.State&(netlink.NUD_INCOMPLETE|netlink.NUD_FAILED) == 0 {
			one.MAC = n.HardwareAddr.String()
		}
		if one.Address == hop {
			next.MAC, next.State = one.MAC, one.State
			continue
		}
		others = append(others, one)
	}
	slices.SortFunc(others, func(a, b Neighbour) int { return a.Address.Compare(b.Address) })
	t.Neighbours = append([]Neighbour{next}, others...)
	if next.State == "FAILED" || next.State == "INCOMPLETE" {
		who := "the destination"
		if next.Gateway {
			who = "the gateway"
		}
		t.problem("%s %s doesn't answer on %s (its neighbour entry is %s): is it up, and on that network?", who, hop, t.Route.Device, next.State)
	}
	return nil
}
