package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
)

// policies measures how long the policy of an open sandbox takes to be replaced by one of the same size.
func (b *networkBench) policies(ctx context.Context) error {
	fmt.Printf("\n### Another policy for an open sandbox\n\n`SetPolicy` is all of it: compiled, written down, its rows set, the flip, and the rows of the policy before deleted when " +
		"no program has them in hands. The flip alone is one write of the sandbox's entry.\n\n" +
		"| rules | compiled p50 ms | rows set, flip, rows deleted p50 ms | `SetPolicy` p50 ms | p95 ms | flip alone p50 ms |\n| --- | --- | --- | --- | --- | --- |\n")
	return b.path.host.Do(func() error {
		a, err := b.open(ctx, "policies")
		if err != nil {
			return err
		}
		for _, rules := range []int{10, 1000, 8000} {
			if err := b.flips(ctx, a.Sandbox, rules); err != nil {
				return fmt.Errorf("a policy of %d rules: %w", rules, err)
			}
		}
		return b.Close(ctx, "policies", "bench", "eth0")
	})
}

func (b *networkBench) flips(ctx context.Context, sandbox bpf.ID, rules int) error {
	two := [2]policy.Policy{many(rules, "443"), many(rules, "8443")}
	guard := policy.Guard{Denied: []netip.Prefix{b.cfg.Network.Pool, hostUplink.Masked()}}
	var rows [2][]policy.Row
	compiled, err1 := b.sample(ctx, func(i int) (err error) {
		rows[i%2], err = policy.Compile(two[i%2], guard)
		return err
	})
	set, err2 := b.sample(ctx, func(i int) error { return b.datapath.SetPolicy(sandbox, rows[i%2]) })
	all, err3 := b.sample(ctx, func(i int) error { return b.SetPolicy(ctx, "policies", &two[i%2]) })
	flip, err4 := b.sample(ctx, func(int) error { return b.datapath.UpdateSandbox(sandbox, settings(b.cfg)) })
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	fmt.Printf("| %d | %.2f | %.2f | %.2f | %.2f | %.3f |\n", rules, ms(compiled.quantile(0.5)), ms(set.quantile(0.5)),
		ms(all.quantile(0.5)), ms(all.quantile(0.95)), ms(flip.quantile(0.5)))
	return nil
}

// many allows a port of as many networks, which touch none of each other.
func many(rules int, port string) policy.Policy {
	p := policy.Policy{Default: policy.Deny}
	for i := range rules {
		n := 2 * i
		to := netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(11 + n>>16), byte(n >> 8), byte(n), 0}), 24)
		p.Rules = append(p.Rules, policy.Rule{Action: policy.Direct, To: to.String(), Ports: []string{port}, Protocol: "tcp"})
	}
	return p
}
