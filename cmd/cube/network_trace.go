package main

import (
	"fmt"
	"io"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/cni/trace"
)

func networkTrace(c *cli.Context, n *network.Network) error {
	to, err := trace.ParseTarget(c.Args().Get(1))
	if err != nil {
		return err
	}
	a, err := attached(c, n)
	if err != nil {
		return err
	}
	r, err := trace.Run(c.Context, at(c).cfg, a, to)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		err = writeJSON(c.App.Writer, r)
	} else {
		err = writeTrace(c.App.Writer, r)
	}
	if err == nil && len(r.Problems) > 0 {
		err = fmt.Errorf("%s is not reached: %s", r.Target, r.Problems[0])
	}
	return err
}

// maxTracedFlows is how many of the flows to a destination are shown. JSON has all.
const maxTracedFlows = 10

func writeTrace(w io.Writer, r *trace.Report) error {
	t := fields(w)
	t.row("container", fmt.Sprintf("%s, known as %s, at %s", r.Container, r.Address, r.Tap))
	t.row("to", r.Target)
	t.row("verdict", r.Verdict.String())
	for _, f := range r.Flows[:min(len(r.Flows), maxTracedFlows)] {
		t.row("flow", fmt.Sprintf("from port %d, %s, idle %s; sent %s; received %s", f.GuestPort, f.State, idle(f), traffic(f.TXPackets, f.TXBytes), traffic(f.RXPackets, f.RXBytes)))
		if k := f.Connection; k == nil {
			t.row("", "the kernel tracks no connection of it")
		} else {
			t.row("", fmt.Sprintf("leaves as %s, %sforgotten in %d s", k.As, prefix(k.State), k.Expires))
		}
	}
	switch more := len(r.Flows) - maxTracedFlows; {
	case len(r.Flows) == 0:
		t.row("flow", "none")
	case more > 0:
		t.row("", fmt.Sprintf("and %d more", more))
	}
	if r.Route != nil {
		way := "directly"
		if r.Route.Gateway != nil {
			way = "via " + r.Route.Gateway.String()
		}
		t.row("route", fmt.Sprintf("%s, device %s, MTU %d", way, r.Route.Device, r.Route.MTU))
	}
	for _, n := range r.Neighbours {
		name, who := "neighbour", ""
		if n.NextHop {
			name, who = "next hop", ", the destination"
		}
		if n.Gateway {
			who = ", the gateway"
		}
		t.row(name, fmt.Sprintf("%s%s: %s%s", n.Address, who, prefix(n.MAC), n.State))
	}
	for _, p := range r.Problems {
		t.row("problem", p)
	}
	return t.flush()
}

// prefix puts what there is before something else.
func prefix(s string) string {
	if s == "" {
		return ""
	}
	return s + ", "
}
