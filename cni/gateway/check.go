package gateway

import (
	"context"
	"fmt"
	"strconv"

	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/internal/config"
)

// Level is what a finding means for sandboxes.
type Level string

// The levels.
const (
	Broken  Level = "broken"  // what Up made isn't in force; Repair and a further Up put it in order
	Blocked Level = "blocked" // somebody else's rules stop sandboxes' packets
	Hint    Level = "hint"    // it works, but not for all or not for long
)

// Finding is something that isn't as it should be.
type Finding struct {
	Level  Level
	Detail string
	Remedy string // what to do about it
}

// Mend is the remedy for what is broken.
const Mend = "cube up puts it in order at once while it runs: start it, or see its log"

// fewSandboxes is how many sandboxes at their limit the kernel's table of connections should hold.
const fewSandboxes = 16

// Check compares what is in force with what Up makes, and looks for what is in the way: nothing is found where all is well.
// Without an Up before, only the latter can be found. It changes nothing.
func Check(ctx context.Context, cfg *config.Config) ([]Finding, error) {
	h, err := netlink.NewHandle()
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	rec, err := readRecord(cfg.NetworkDir())
	if err != nil {
		return nil, err
	}
	n := &cfg.Network
	var out []Finding
	if rec != nil {
		diff, err := rec.diff(h, n)
		if err != nil {
			return nil, err
		}
		for _, d := range diff {
			out = append(out, Finding{Broken, d, Mend})
		}
	}
	if err := checkPool(h, n); err != nil {
		out = append(out, Finding{Blocked, err.Error(), "see network.pool in docs/configuration.md"})
	}
	for _, look := range []func() ([]Finding, error){
		func() ([]Finding, error) { return checkForwarding(h, rec) },
		func() ([]Finding, error) { return checkForeign(n, rec) },
		func() ([]Finding, error) { return checkConntrack(n) },
	} {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		f, err := look()
		if err != nil {
			return nil, err
		}
		out = append(out, f...)
	}
	return out, nil
}

// diff says what isn't as Up left it.
func (r *record) diff(h *netlink.Handle, n *config.Network) ([]string, error) {
	if !sameObjects(&r.Network, n) {
		return []string{"the network that is up has another configuration"}, nil
	}
	want, err := fingerprint(n, ruleset(n, r.Forwarding != nil))
	if err != nil {
		return nil, err
	}
	have, err := inForce(n.NFTable)
	if err != nil {
		return nil, err
	}
	var diff []string
	switch {
	case have == "":
		diff = append(diff, "nftables table inet "+n.NFTable+" is missing")
	case have != r.InForce:
		diff = append(diff, "nftables table inet "+n.NFTable+" has been changed")
	case want != r.Ruleset:
		diff = append(diff, "nftables table inet "+n.NFTable+" is of another configuration")
	}
	up, err := lookUplink(h)
	if err != nil {
		return nil, err
	}
	more, err := diffDevice(h, n, up.MTU)
	if err != nil {
		return nil, err
	}
	diff = append(diff, more...)
	if more, err = diffSteering(h, n); err != nil {
		return nil, err
	}
	diff = append(diff, more...)
	if on, err := getSysctl(ipForward); err != nil {
		return nil, err
	} else if on != "1" {
		diff = append(diff, "net.ipv4.ip_forward is "+on+": somebody has turned it off")
	}
	return diff, nil
}

// checkForwarding looks whether packets can get to the uplink and back.
func checkForwarding(h *netlink.Handle, rec *record) ([]Finding, error) {
	up, err := lookUplink(h)
	if err != nil {
		return nil, err
	}
	if len(up.Devices) == 0 {
		return []Finding{{Hint, "there is no default route: sandboxes reach what the host has routes to, not the internet", "add one"}}, nil
	}
	if rec == nil {
		return nil, nil
	}
	var out []Finding
	for _, d := range up.Devices {
		if v, err := getSysctl(forwardingOf(d)); err == nil && v != "1" {
			out = append(out, Finding{Blocked, fmt.Sprintf("net.ipv4.conf.%s.forwarding is %s: answers to sandboxes don't come back", d, v), fmt.Sprintf("sysctl -w net.ipv4.conf.%s.forwarding=1", d)})
		}
	}
	return out, nil
}

// checkConntrack looks whether a few sandboxes could fill the kernel's table of connections.
func checkConntrack(n *config.Network) ([]Finding, error) {
	v, err := getSysctl("netfilter/nf_conntrack_max")
	if err != nil {
		return nil, fmt.Errorf("%w: the kernel has no connection tracking", err)
	}
	most, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("net.netfilter.nf_conntrack_max = %q is not a number", v)
	}
	if enough := uint64(n.MaxFlows) * fewSandboxes; most != 0 && most < enough { // 0 is no limit
		return []Finding{{Hint, fmt.Sprintf("net.netfilter.nf_conntrack_max is %d: %d sandboxes with network.max_flows = %d connections fill it for all of the host", most, most/uint64(n.MaxFlows), n.MaxFlows),
			fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_max=%d, or lower network.max_flows", enough)}}, nil
	}
	return nil, nil
}
