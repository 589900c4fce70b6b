package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
)

// rounds is how often each stream is measured on each path, in turn.
const rounds = 15

// streams are measured as they are, and UDP's by what it costs too.
var streams = []struct {
	name, unit string
	scale      float64
	measure    func(p *path, toClient bool) (float64, error)
	toClient   bool
	cut        bool // into a frame for each segment
}{
	{name: "TCP from the sandbox", unit: "Gbit/s", scale: 1e9, measure: tcp},
	{name: "TCP to the sandbox", unit: "Gbit/s", scale: 1e9, measure: tcp, toClient: true},
	{name: "TCP from the sandbox, a frame for each segment", unit: "Gbit/s", scale: 1e9, measure: tcp, cut: true},
	{name: "UDP of 64 bytes from the sandbox", unit: "1,000 packets/s", scale: 1e3, measure: udp},
	{name: "UDP of 64 bytes to the sandbox", unit: "1,000 packets/s", scale: 1e3, measure: udp, toClient: true},
	{name: "UDP of 64 bytes from the sandbox, of a processor", unit: "1,000 packets/s", scale: 1e3, measure: udpCost},
	{name: "UDP of 64 bytes to the sandbox, of a processor", unit: "1,000 packets/s", scale: 1e3, measure: udpCost, toClient: true},
}

// plainPath is forwarded and masqueraded by the kernel, and no more.
func plainPath(u *undo.Stack) (*path, error) {
	p, err := newPath(u, netip.PrefixFrom(network.GuestGateway, network.GuestPrefix.Bits()))
	if err != nil {
		return nil, err
	}
	return p, p.host.Do(func() error {
		if err := testhost.Sysctl("ipv4/ip_forward", "1"); err != nil {
			return err
		}
		c, err := nftables.New()
		if err != nil {
			return err
		}
		table := c.AddTable(&nftables.Table{Name: "plain", Family: nftables.TableFamilyINet})
		chain := c.AddChain(&nftables.Chain{
			Name: "masquerade", Table: table, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
		})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte(testhost.UplinkDevice + "\x00")},
			&expr.Masq{},
		}})
		return c.Flush()
	})
}

// throughput compares a host that only forwards and masquerades with Cube's whole datapath and rules, on devices of the same
// kind: kernels are at both ends of them, in place of a machine's.
func (b *networkBench) throughput(ctx context.Context) (err error) {
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()
	plain, err := plainPath(&u)
	if err != nil {
		return err
	}
	id, err := b.addClient(&u)
	if err != nil {
		return err
	}
	all, err := compare(ctx, plain, b.path)
	if err != nil {
		return err
	}
	fmt.Printf("\n### Throughput: forwarding and masquerade alone, and Cube's whole datapath\n\n"+
		"Medians of %d rounds in turn, %v each, between network namespaces on veth pairs (MTU %d), one stream, the policy `allow`, no rate limit. "+
		"Of a processor: packets that arrived for each second of the sending thread's time, in which the kernel does all the work on them.\n\n"+
		"| | | kernel alone | Cube | ratio | half of the rounds |\n| --- | --- | --- | --- | --- | --- |\n", rounds, window, testhost.MTU)
	for i, s := range streams {
		ratios := make([]float64, rounds)
		for k := range ratios {
			ratios[k] = all[i].cube[k] / all[i].plain[k]
		}
		p, c := quantile(all[i].plain, 0.5), quantile(all[i].cube, 0.5)
		fmt.Printf("| %s | %s | %.1f | %.1f | %.2f | %.2f to %.2f |\n", s.name, s.unit, p, c, c/p, quantile(ratios, 0.25), quantile(ratios, 0.75))
	}
	return b.passed(id)
}

// rates are a stream's on both paths, round by round.
type rates struct{ plain, cube []float64 }

// compare measures all streams on both paths in turn, and has either path be the first as often.
func compare(ctx context.Context, plain, cube *path) ([]rates, error) {
	all := make([]rates, len(streams))
	for round := range rounds {
		for i, s := range streams {
			turns := []struct {
				on *path
				to *[]float64
			}{{plain, &all[i].plain}, {cube, &all[i].cube}}
			if round%2 == 1 {
				slices.Reverse(turns)
			}
			for _, turn := range turns {
				if err := turn.on.segmentation(!s.cut); err != nil {
					return nil, err
				}
				rate, err := s.measure(turn.on, s.toClient)
				if err = errors.Join(err, ctx.Err()); err != nil {
					return nil, fmt.Errorf("%s: %w", s.name, err)
				}
				*turn.to = append(*turn.to, rate/s.scale)
			}
		}
	}
	return all, nil
}

// addClient makes a sandbox of the path's client, behind a device that takes the place of its tap.
func (b *networkBench) addClient(u *undo.Stack) (bpf.ID, error) {
	const id = bpf.MaxSandboxes // the last that Open would give
	rows, err := policy.Compile(policy.Policy{Default: policy.Direct}, policy.Guard{Denied: []netip.Prefix{b.cfg.Network.Pool, hostUplink.Masked()}})
	if err != nil {
		return 0, err
	}
	return id, b.path.host.Do(func() error {
		l, err := netlink.LinkByName(tap)
		if err != nil {
			return err
		}
		index := l.Attrs().Index
		if err := b.datapath.AttachTap(index); err != nil {
			return err
		}
		u.Push(func() error { return b.datapath.DetachTap(index) })
		if err := b.datapath.AddSandbox(bpf.Sandbox{
			ID: id, Ifindex: index, GuestIP: network.GuestPrefix.Addr(), GuestMAC: network.GuestMAC, HostIP: b.cfg.Network.Pool.Addr().Next(),
			Settings: settings(b.cfg),
		}, rows); err != nil {
			return err
		}
		u.Push(func() error { _, err := b.datapath.RemoveSandbox(id); return err })
		return b.datapath.CheckTap(index)
	})
}

// passed verifies that the streams have been through the datapath, and tells what it dropped.
func (b *networkBench) passed(id bpf.ID) error {
	counters, err := b.datapath.Counters(id)
	if err != nil {
		return err
	}
	if counters[bpf.TX].Packets == 0 || counters[bpf.RX].Packets == 0 {
		return fmt.Errorf("the streams haven't been through the datapath, which has counted %v", counters)
	}
	for reason, count := range counters {
		if reason.Dropped() {
			fmt.Printf("\nDropped by the datapath, %s: %d frames.\n", reason, count.Packets)
		}
	}
	return nil
}

// settings are those of Open's, without a limit of bytes.
func settings(cfg *config.Config) bpf.Settings {
	return bpf.Settings{Resolver: true, MaxFlows: cfg.Network.MaxFlows, NewFlows: bpf.Rate{PerSecond: 1000, Burst: 2000}}
}
