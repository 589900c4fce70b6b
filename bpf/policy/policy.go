// Package policy compiles what sandboxes may reach into rows for the datapath: prefixes, each with the whole verdict on its
// addresses, so that the longest one that an address is in decides.
//
// Of the rules that a packet matches, one that has it proxied beats one that allows it, which beats one that denies it;
// neither their order nor the length of their prefixes counts. A packet that matches none has the policy's default. What is
// hard-denied no rule opens; only the operator does, by address and port, and then the rules decide.
package policy

import (
	"net/netip"
	"strconv"
)

// Action is what becomes of a packet.
type Action uint8

// The actions. HardDeny is never a rule's.
const (
	Deny Action = iota
	Direct
	Proxy
	HardDeny
)

func (a Action) String() string {
	switch a {
	case Deny:
		return "deny"
	case Direct:
		return "allow"
	case Proxy:
		return "proxy"
	case HardDeny:
		return "hard-deny"
	}
	return "unknown"
}

// Protocol is an IP protocol's number.
type Protocol uint8

// The protocols that pass the datapath.
const (
	ICMP Protocol = 1
	TCP  Protocol = 6
	UDP  Protocol = 17
)

// String is the protocol's name, as rules have it, or its number.
func (p Protocol) String() string {
	switch p {
	case ICMP:
		return "icmp"
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	}
	return strconv.Itoa(int(p))
}

// Policy is what a sandbox may reach, as its owner says it.
type Policy struct {
	// Default is Direct or Deny.
	Default Action
	Rules   []Rule
}

// Rule is about packets to addresses, ports and protocols.
type Rule struct {
	// Action is Direct, Proxy or Deny. Only TCP can be proxied.
	Action Action
	// To is an IPv4 prefix or address.
	To string
	// Ports are numbers ("443") and ranges ("8000-8010"); none are all. ICMP has none.
	Ports []string
	// Protocol is tcp, udp, icmp or any, which is the same as none.
	Protocol string
}

// Guard is what protects the host and its networks, whatever the policy.
type Guard struct {
	// Denied are the host's addresses, networks and pools, besides the built-in list.
	Denied []netip.Prefix
	// Openings are the operator's exceptions.
	Openings []Opening
}

// Opening takes ports of addresses out of what is hard-denied. All its fields are as in Rule.
type Opening struct {
	To       string
	Ports    []string
	Protocol string
}

// Row is a row of the compiled policy.
type Row struct {
	Prefix  netip.Prefix
	Verdict Verdict
}

// Verdict is on a packet to one of a row's addresses: that of the range it is in, or else the first one.
type Verdict struct {
	Action Action
	Rule   uint16 // counted from 1; 0: none
	Ranges []Range
}

// MaxRanges is how many ranges a verdict can have.
const MaxRanges = 16

// Range is about a protocol's ports, First to Last. ICMP has port 0. The ranges of a verdict are disjoint.
type Range struct {
	Protocol    Protocol
	First, Last uint16
	Action      Action
	Rule        uint16
}

// Of returns what the verdict says of a protocol and port.
func (v Verdict) Of(p Protocol, port uint16) (Action, uint16) {
	for _, r := range v.Ranges {
		if r.Protocol == p && r.First <= port && port <= r.Last {
			return r.Action, r.Rule
		}
	}
	return v.Action, v.Rule
}
