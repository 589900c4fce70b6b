package bypass

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
)

// TestVectors: every frame that a sandbox can make up goes where the policy says or nowhere, and whatever the policy says,
// to no one of this host's and its networks. With the host's rules flushed that holds too, but for what a vector says.
func TestVectors(t *testing.T) {
	for _, tc := range []struct {
		name   string
		policy *policy.Policy
		bare   bool
	}{
		{"strict policy", strict, false},
		{"careless policy", careless, false},
		{"strict policy without the guard", strict, true},
		{"careless policy without the guard", careless, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, tc.policy)
			if tc.bare {
				w.unguard()
			}
			w.seen() // what setting up has set in motion
			var table strings.Builder
			out := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
			vectors := w.vectors()
			for _, v := range vectors {
				want := v.want
				if tc.policy == careless && v.careless != nil {
					want = *v.careless
				}
				if tc.bare {
					want.seen = w.unmasked(want.seen)
					if v.bare != nil {
						want.seen = v.bare
					}
				}
				got := w.attack(v)
				if got.counted != want.counted || !slices.Equal(got.seen, want.seen) {
					t.Errorf("%s: counted as %q, seen %q; want %q, %q", v.name, got.counted, got.seen, want.counted, want.seen)
				}
				fmt.Fprintf(out, "%s\t%s\t%s\n", v.name, got.counted, strings.Join(got.seen, "; "))
			}
			_ = out.Flush()
			t.Logf("%d vectors\n%s", len(vectors), &table)
		})
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
