package machines

import (
	"context"
	"net/netip"
	"slices"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// SetNetwork replaces what a running machine reaches, for its open connections too, and what it will after a resume.
func (m *Machines) SetNetwork(ctx context.Context, id string, e lifecycle.Egress) error {
	settings, err := Settings(e)
	if err != nil {
		return err
	}
	a, err := m.network.Find(ctx, m.cfg.Containerd.Namespace, id)
	if err != nil {
		return err
	}
	// First what holds later: if that fails, nothing has changed.
	if err := m.client.SetNetwork(ctx, id, settings); err != nil {
		return err
	}
	return m.network.SetPolicy(ctx, a.Key, settings.Policy)
}

// Traffic tells what was counted of a running machine's network.
func (m *Machines) Traffic(ctx context.Context, id string) (lifecycle.Traffic, error) {
	a, err := m.network.Find(ctx, m.cfg.Containerd.Namespace, id)
	if err != nil {
		return lifecycle.Traffic{}, err
	}
	counters, err := m.network.Counters(ctx, a.Key)
	if err != nil {
		return lifecycle.Traffic{}, err
	}
	t := lifecycle.Traffic{TX: lifecycle.Count(counters[bpf.TX]), RX: lifecycle.Count(counters[bpf.RX]), Dropped: map[string]uint64{}}
	for why, n := range counters {
		if why.Dropped() {
			t.Dropped[why.String()] = n.Packets
		}
	}
	return t, nil
}

// everything is what is denied to a sandbox that is to have no internet.
var everything = netip.MustParsePrefix("0.0.0.0/0")

// Settings are those of a sandbox's network. What is allowed beats what is denied, as it does in any policy.
func Settings(e lifecycle.Egress) (*network.Settings, error) {
	p := &policy.Policy{Default: policy.Direct}
	for _, to := range e.AllowOut {
		p.Rules = append(p.Rules, policy.Rule{Action: policy.Direct, To: to})
	}
	for _, to := range e.DenyOut {
		if prefix, err := netip.ParsePrefix(to); err == nil && prefix == everything {
			p.Default = policy.Deny
			continue
		}
		p.Rules = append(p.Rules, policy.Rule{Action: policy.Deny, To: to})
	}
	if p.Default == policy.Deny { // the rest is denied anyway, and rules are few
		p.Rules = slices.DeleteFunc(p.Rules, func(r policy.Rule) bool { return r.Action == policy.Deny })
	}
	if _, err := policy.Compile(*p, policy.Guard{}); err != nil {
		return nil, err
	}
	return &network.Settings{Policy: p}, nil
}
