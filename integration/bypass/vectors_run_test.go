package bypass

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
)

// TestVectors: every frame that a sandbox can make up goes where the policy says or nowhere, and whatever the policy says,
// to no one of this host's and its networks. With the host's rules flushed that holds too, but for what a vector says.
func TestVectors(t *testing.T) {
	w := newWorld(t, strict)
	for _, stage := range []struct {
		name   string
		before func()
		policy *policy.Policy
		bare   bool
	}{
		{"strict policy", nil, strict, false},
		{"careless policy", nil, careless, false},
		{"strict policy, filters in the place of TCX", w.filters, strict, false},
		{"strict policy without the guard", w.unguard, strict, true},
		{"careless policy without the guard", nil, careless, true},
	} {
		if stage.before != nil {
			stage.before()
		}
		must(t, w.SetPolicy(t.Context(), w.a.id(), stage.policy))
		_, err := w.datapath.Reap(bpf.Timeouts{})
		must(t, err)
		w.seen()                // what this has set in motion
		time.Sleep(time.Second) // until the sandbox has all of its echoes again: it is a rate
		var table strings.Builder
		out := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
		vectors := w.vectors()
		for _, v := range vectors {
			want := v.want
			if stage.policy == careless && v.careless != nil {
				want = *v.careless
			}
			why := ""
			if stage.bare {
				want.seen = w.unmasked(want.seen)
				if v.bare != nil {
					want.seen, why = v.bare, v.why
				}
			}
			got := w.attack(v)
			if got.counted != want.counted || !slices.Equal(got.seen, want.seen) {
				t.Errorf("%s: %s: counted as %q, seen %q; want %q, %q", stage.name, v.name, got.counted, got.seen, want.counted, want.seen)
			}
			fmt.Fprintf(out, "%s\t%s\t%s\t%s\n", v.name, got.counted, strings.Join(got.seen, "; "), why)
		}
		_ = out.Flush()
		t.Logf("%s: %d vectors\n%s", stage.name, len(vectors), &table)
	}
}

// filters has the datapath attached as it is where the kernel has no TCX.
func (w *world) filters() {
	m := w.cfg.Network.Marks()
	d, err := bpf.Open(bpf.Config{
		Dir: filepath.Join(w.cfg.NetworkDir(), "bpf"), Clsact: true,
		Gateway: bpf.Gateway{Ifindex: w.index(w.host, w.cfg.Network.Device), IP: network.GuestGateway, MAC: gateway.MAC},
		Marks:   bpf.Marks{Mask: m.Mask, Direct: m.Direct, Proxy: m.Proxy, Resolver: m.Resolver, Guest: m.Guest},
		Echo:    bpf.Echo{MaxPayload: 128, Rate: bpf.Rate{PerSecond: 64, Burst: 64}},
	})
	must(w.t, err)
	w.t.Cleanup(func() { _ = d.Close() })
	must(w.t, d.AttachGateway())
	for _, s := range []*sandbox{w.a, w.b} {
		must(w.t, d.AttachTap(w.index(w.host, s.at.Tap)))
	}
}

// attack sends a vector's frames and tells what became of them.
func (w *world) attack(v vector) result {
	w.t.Helper()
	before := w.counts(w.a)
	var r result
	for _, f := range v.frames {
		if err := w.send(w.a, v.header, f); err != nil {
			r.counted = refused.counted
		}
	}
	r.seen = w.seen()
	after := w.counts(w.a)
	after[bpf.TX]-- // the barrier's
	delete(after, bpf.RX)
	var counted []string
	for reason, n := range after {
		switch n -= before[reason]; {
		case n == 1:
			counted = append(counted, reason.String())
		case n != 0:
			counted = append(counted, fmt.Sprintf("%d %s", n, reason))
		}
	}
	if len(counted) > 0 {
		slices.Sort(counted)
		r.counted += strings.Join(counted, ", ")
	}
	return r
}

// unmasked is what is seen on the wire when nobody masquerades.
func (w *world) unmasked(seen []string) (out []string) {
	for _, s := range seen {
		if strings.HasPrefix(s, "wire: ") {
			s = strings.ReplaceAll(s, " uplink > ", " a > ")
		}
		out = append(out, s)
	}
	return out
}
