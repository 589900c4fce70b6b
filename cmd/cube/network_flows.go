package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/daemon"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/cni/trace"
)

// watchEvery is how often flows are listed again: the kernel tells nobody of a packet.
const watchEvery = 2 * time.Second

func networkFlows(c *cli.Context, n *network.Network) error {
	if c.Bool("watch") && c.Bool("json") {
		return errors.New("--watch goes without --json")
	}
	a, err := attached(c, n)
	if err != nil {
		return err
	}
	list := func() error {
		flows, err := n.Flows(c.Context, a.Key)
		if err != nil {
			return err
		}
		// Those with a packet the shortest time ago come first.
		slices.SortFunc(flows, func(a, b bpf.Flow) int { return cmp.Compare(a.Idle, b.Idle) })
		all := make([]trace.Flow, 0, len(flows))
		for _, f := range flows {
			all = append(all, trace.FlowOf(f))
		}
		if c.Bool("json") {
			return writeJSON(c.App.Writer, all)
		}
		return writeFlows(c.App.Writer, all)
	}
	if err := list(); err != nil || !c.Bool("watch") {
		return err
	}
	return every(c.Context, watchEvery, func() error {
		fmt.Fprintln(c.App.Writer)
		return list()
	})
}

// every runs f again and again, until it fails or ctx ends.
func every(ctx context.Context, d time.Duration, f func() error) error {
	t := time.NewTicker(d)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		if err := f(); err != nil {
			return err
		}
	}
}

func writeFlows(w io.Writer, flows []trace.Flow) error {
	t := newTable(w, "PROTOCOL", "REMOTE", "GUEST PORT", "OPENED BY", "STATE", "RULE", "IDLE", "SENT", "RECEIVED")
	for _, f := range flows {
		opener := "guest"
		if f.Inbound {
			opener = "host"
		}
		t.row(f.Protocol, f.Remote, strconv.Itoa(int(f.GuestPort)), opener, string(f.State), ruleNumber(f.Rule), idle(f), traffic(f.TXPackets, f.TXBytes), traffic(f.RXPackets, f.RXBytes))
	}
	return t.flush()
}

// ruleNumber is as policy get has it.
func ruleNumber(rule int) string {
	if rule == 0 {
		return "default"
	}
	return strconv.Itoa(rule)
}

func idle(f trace.Flow) string {
	return time.Duration(f.Idle * float64(time.Second)).Round(100 * time.Millisecond).String()
}

func traffic(packets, bytes uint64) string {
	what := "packets"
	if packets == 1 {
		what = "packet"
	}
	return fmt.Sprintf("%d %s, %s", packets, what, units.BytesSize(float64(bytes)))
}

// dropped is what was dropped of a container's packets.
type dropped struct {
	Counters []reasonCount `json:"counters"`
	// Recent is of the daemon's, the oldest first; nil if none runs.
	Recent []daemon.Drop `json:"recent"`
}

type reasonCount struct {
	Reason  string `json:"reason"`
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

func networkDrops(c *cli.Context, n *network.Network) error {
	a, err := attached(c, n)
	if err != nil {
		return err
	}
	counters, err := n.Counters(c.Context, a.Key)
	if err != nil {
		return err
	}
	d := dropped{Counters: countDrops(counters)}
	ctx, cancel := context.WithTimeout(c.Context, at(c).cfg.Timeout(askTimeout))
	defer cancel()
	// Without the daemon the counters are still right.
	if d.Recent, err = daemon.Drops(ctx, at(c).cfg, a.Key); err != nil && !errdefs.IsUnavailable(err) {
		return err
	}
	if c.Bool("json") {
		return writeJSON(c.App.Writer, d)
	}
	if err != nil {
		at(c).clientLog.Warn("no drop is shown by itself: that takes the stack's daemon", "error", err)
	}
	return writeDrops(c.App.Writer, d)
}

// countDrops lists the reasons to drop, the most frequent first.
func countDrops(counters bpf.Counters) []reasonCount {
	all := []reasonCount{}
	for reason, n := range counters {
		if reason.Dropped() {
			all = append(all, reasonCount{reason.String(), n.Packets, n.Bytes})
		}
	}
	slices.SortFunc(all, func(a, b reasonCount) int {
		return cmp.Or(cmp.Compare(b.Packets, a.Packets), cmp.Compare(a.Reason, b.Reason))
	})
	return all
}

func writeDrops(w io.Writer, d dropped) error {
	t := newTable(w, "REASON", "PACKETS", "BYTES")
	for _, c := range d.Counters {
		t.row(c.Reason, strconv.FormatUint(c.Packets, 10), strconv.FormatUint(c.Bytes, 10))
	}
	if err := t.flush(); err != nil || len(d.Recent) == 0 {
		return err
	}
	fmt.Fprintln(w)
	t = newTable(w, "TIME", "DIRECTION", "REASON", "RULE", "PROTOCOL", "REMOTE", "GUEST PORT", "BYTES")
	for _, e := range d.Recent {
		direction, protocol, remote := "from guest", "-", "-"
		if e.ToGuest {
			direction = "to guest"
		}
		if e.Protocol != 0 {
			protocol = policy.Protocol(e.Protocol).String()
		}
		if e.Remote.IsValid() {
			remote = e.Remote.String()
		}
		if e.RemotePort != 0 {
			remote = netip.AddrPortFrom(e.Remote, e.RemotePort).String()
		}
		t.row(e.Time.Local().Format(time.StampMilli), direction, e.Reason, known(e.Rule), protocol, remote, known(e.GuestPort), strconv.Itoa(e.Length))
	}
	return t.flush()
}

// known is a number that isn't 0.
func known(n uint16) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(int(n))
}
