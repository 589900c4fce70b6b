package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

// MaxRules is how many rules a policy can have.
const MaxRules = 1 << 14

// maxPorts is how many ranges of ports a rule can have. More than MaxRanges make sense only if they touch.
const maxPorts = 1024

// ports is a range of ports.
type ports struct{ first, last uint16 }

var allPorts = ports{0, 65535}

// match is what a rule or opening is about. Its ranges are sorted and disjoint.
type match struct {
	prefix    netip.Prefix
	ports     []ports
	protocols []Protocol
}

// rule is a rule that was understood. number is its place, counted from 1.
type rule struct {
	match
	action Action
	number uint16
}

func (m match) covers(p Protocol, port uint16) bool {
	if !slices.Contains(m.protocols, p) {
		return false
	}
	if p == ICMP {
		return true
	}
	_, found := slices.BinarySearchFunc(m.ports, port, func(r ports, port uint16) int {
		switch {
		case r.last < port:
			return -1
		case r.first > port:
			return 1
		}
		return 0
	})
	return found
}

func (p Policy) parse() ([]rule, error) {
	if p.Default != Direct && p.Default != Deny {
		return nil, fmt.Errorf("default %s: it is allow or deny: %w", p.Default, errdefs.ErrInvalidArgument)
	}
	if len(p.Rules) > MaxRules {
		return nil, fmt.Errorf("%d rules: there can be %d: %w", len(p.Rules), MaxRules, errdefs.ErrInvalidArgument)
	}
	rules := make([]rule, 0, len(p.Rules))
	for i, r := range p.Rules {
		m, err := parseMatch(r.To, r.Ports, r.Protocol)
		if err == nil && r.Action != Direct && r.Action != Proxy && r.Action != Deny {
			err = fmt.Errorf("action %s: it is allow, proxy or deny", r.Action)
		}
		if err == nil && r.Action == Proxy && !slices.Equal(m.protocols, []Protocol{TCP}) {
			err = fmt.Errorf("protocol %q: only tcp can be proxied", r.Protocol)
		}
		if err != nil {
			return nil, fmt.Errorf("rule %d (%s): %w: %w", i+1, r, err, errdefs.ErrInvalidArgument)
		}
		rules = append(rules, rule{match: m, action: r.Action, number: uint16(i + 1)})
	}
	return rules, nil
}

func (r Rule) String() string {
	return r.Action.String() + " " + describe(r.To, r.Ports, r.Protocol)
}

func (o Opening) String() string { return describe(o.To, o.Ports, o.Protocol) }

func describe(to string, ports []string, protocol string) string {
	s := strconv.Quote(to)
	if len(ports) > 0 {
		s += " ports " + strings.Join(ports[:min(len(ports), MaxRanges)], ",")
	}
	if protocol != "" {
		s += " " + protocol
	}
	return short(s)
}

// short is what fits into a message of what somebody has written.
func short(s string) string {
	if len(s) > 100 {
		s = strings.ToValidUTF8(s[:100], "") + "…"
	}
	return s
}

func parseMatch(to string, ranges []string, protocol string) (match, error) {
	var m match
	var err error
	if m.prefix, err = parsePrefix(to); err != nil {
		return m, err
	}
	switch protocol {
	case "tcp":
		m.protocols = []Protocol{TCP}
	case "udp":
		m.protocols = []Protocol{UDP}
	case "icmp":
		m.protocols = []Protocol{ICMP}
	case "", "any":
		// With ports it is about the protocols that have them.
		m.protocols = []Protocol{TCP, UDP}
		if len(ranges) == 0 {
			m.protocols = []Protocol{TCP, UDP, ICMP}
		}
	default:
		return m, fmt.Errorf("protocol %q: it is tcp, udp, icmp or any", protocol)
	}
	if protocol == "icmp" && len(ranges) > 0 {
		return m, fmt.Errorf("icmp has no ports")
	}
	m.ports, err = parsePorts(ranges)
	return m, err
}

// parsePrefix takes a prefix with nothing after its length, so that nobody means one address and names a network.
func parsePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if addr, addrErr := netip.ParseAddr(s); addrErr == nil {
		p, err = netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	switch {
	case err != nil:
		return p, fmt.Errorf("it takes an IPv4 prefix or address")
	case !p.Addr().Is4():
		return p, fmt.Errorf("IPv6 does not pass; it takes an IPv4 prefix or address")
	case p != p.Masked():
		return p, fmt.Errorf("the prefix has bits set after its length; %s would be right", p.Masked())
	}
	return p, nil
}

// parsePorts returns the ranges sorted, with those that touch made one. No ranges are all ports.
func parsePorts(ranges []string) ([]ports, error) {
	if len(ranges) == 0 {
		return []ports{allPorts}, nil
	}
	if len(ranges) > maxPorts {
		return nil, fmt.Errorf("%d ranges of ports: there can be %d", len(ranges), maxPorts)
	}
	all := make([]ports, 0, len(ranges))
	for _, s := range ranges {
		first, last, isRange := strings.Cut(s, "-")
		if !isRange {
			last = first
		}
		lo, err := strconv.ParseUint(first, 10, 16)
		hi, err2 := strconv.ParseUint(last, 10, 16)
		if err != nil || err2 != nil || lo > hi || lo == 0 {
			return nil, fmt.Errorf("port %q: it is a number from 1 to 65535 or a range of them", s)
		}
		all = append(all, ports{uint16(lo), uint16(hi)})
	}
	slices.SortFunc(all, func(a, b ports) int { return int(a.first) - int(b.first) })
	merged := all[:1]
	for _, r := range all[1:] {
		end := &merged[len(merged)-1]
		if int(r.first) <= int(end.last)+1 {
			end.last = max(end.last, r.last)
		} else {
			merged = append(merged, r)
		}
	}
	return merged, nil
}
