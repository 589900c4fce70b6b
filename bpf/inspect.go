package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"

	"github.com/cilium/ebpf"

	"github.com/cubesandbox/cube/bpf/policy"
)

// Decision is what is decided on a sandbox's packet of no flow.
type Decision struct {
	// Resolver has it go to the host's resolver. The rest says nothing then.
	Resolver bool
	Action   policy.Action
	Rule     uint16 // of the policy; 0: none
}

// dnsPort is what is the resolver's of sandboxes that have one.
const dnsPort = 53

// Decide asks the policy that is in force as the programs do. ICMP has port 0. errdefs.ErrNotFound if there is no such
// sandbox.
func (d *Datapath) Decide(id ID, to netip.Addr, p policy.Protocol, port uint16) (Decision, error) {
	s, unlock, err := d.lock(id)
	if err != nil {
		return Decision{}, err
	}
	defer unlock()
	switch {
	case s.Gen == 0:
		return Decision{Action: policy.Deny}, nil
	case s.Flags&sandboxResolver != 0 && port == dnsPort && (p == policy.TCP || p == policy.UDP):
		return Decision{Resolver: true}, nil
	}
	key := rowKey(s.Gen, netip.PrefixFrom(to, 32))
	var v dpVerdict
	if err := d.objs.Policy.Lookup(&key, &v); errors.Is(err, ebpf.ErrKeyNotExist) {
		return Decision{Action: policy.Deny}, nil
	} else if err != nil {
		return Decision{}, fmt.Errorf("look %v up in the policy of sandbox %d: %w", to, id, err)
	}
	for _, r := range v.Range[:v.Ranges] {
		if r.Proto == uint8(p) && r.Lo <= port && port <= r.Hi {
			return Decision{Action: actionOf(r.Action), Rule: r.Rule}, nil
		}
	}
	return Decision{Action: actionOf(v.Action), Rule: v.Rule}, nil
}

// actionOf is the other way of action.
func actionOf(a uint8) policy.Action {
	for _, one := range []policy.Action{policy.Direct, policy.Proxy, policy.HardDeny} {
		if action(one) == a {
			return one
		}
	}
	return policy.Deny
}

// HookKind tells what the kernel runs the gateway device's programs by, "tcx" or "clsact"; "" if they aren't attached.
func (d *Datapath) HookKind() (string, error) {
	h := hook{d.cfg.Gateway.Ifindex, gwOut}
	for _, kind := range []struct{ name, pins string }{{"clsact", filtersDir(d.cfg.Dir)}, {"tcx", linksDir(d.cfg.Dir)}} {
		if _, err := os.Stat(h.pin(kind.pins)); err == nil {
			return kind.name, nil
		} else if !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("look for the programs of %s: %w", h, err)
		}
	}
	return "", nil
}
