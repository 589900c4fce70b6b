package network_test

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
)

var (
	remote = netip.MustParseAddrPort("1.2.3.4:443")
	pod    = network.Pod{Namespace: "default", ID: "box"}
	all    = &policy.Policy{Default: policy.Direct}
)

func request(id string) network.Request {
	return network.Request{ID: id, Network: "cube", IfName: "eth0", Policy: all}
}

// send has the machine at a tap send a packet to the internet, and returns the reason that counts it.
func send(t *testing.T, h *testnet.Host, tap *os.File, id bpf.ID) bpf.Reason {
	t.Helper()
	count := func() map[bpf.Reason]uint64 {
		n := map[bpf.Reason]uint64{}
		for _, id := range slices.Compact([]bpf.ID{0, id}) {
			c, err := h.Datapath.Counters(id)
			if !errdefs.IsNotFound(err) {
				testnet.Must(t, err)
			}
			for r, v := range c {
				n[r] += v.Packets
			}
		}
		return n
	}
	before := count()
	_, err := tap.Write(append(make([]byte, testnet.VnetHeader), testnet.UDP(remote, "hello")...))
	testnet.Must(t, err)
	for r, v := range count() {
		if v != before[r] {
			return r
		}
	}
	t.Fatal("nothing was counted")
	return 0
}

// TestOrders: shim and plugin come and go in any order; the place is the same, closed but between Open and Close, and free
// with the last.
func TestOrders(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	for _, tc := range []struct {
		pod   network.Pod
		id    string
		steps string
	}{
		{pod, "default-box", "claim tap open close release"},
		{pod, "default-box", "claim tap open release close"},
		{pod, "default-box", "open claim tap close release"},
		{pod, "default-box", "open claim tap release close"},
		{network.Pod{Namespace: "k8s.io", ID: "0123abcd"}, "0123abcd", "open claim tap release close"},
		{network.Pod{Namespace: "k8s.io", ID: "box"}, "k8s.io-box", "claim open tap claim close release"},
		{pod, "default-box", "claim release"},
		{pod, "default-box", "open close"},
	} {
		t.Run(tc.id+" "+tc.steps, func(t *testing.T) {
			testnet.Must(t, h.Enter())
			var a *network.Attachment
			var tap *os.File
			claimed, opened := false, false
			for _, step := range strings.Fields(tc.steps) {
				var now *network.Attachment
				var err error
				switch step {
				case "claim":
					now, err = h.Claim(ctx, tc.pod)
					claimed = true
				case "open":
					now, err = h.Open(ctx, request(tc.id))
					opened = true
				case "tap":
					tap, err = h.OpenTap(ctx, tc.pod)
				case "close":
					err = h.Close(ctx, tc.id, "cube", "eth0")
					opened = false
				case "release":
					_ = tap.Close()
					tap = nil
					err = h.Release(ctx, tc.pod)
					claimed = false
				}
				testnet.Must(t, err)
				if a != nil && now != nil && now.Tap != a.Tap {
					t.Errorf("%s: tap %s, before %s", step, now.Tap, a.Tap)
				}
				if now != nil {
					a = now
				}
				if got, err := h.Get(ctx, tc.id); claimed || opened {
					if err != nil || got.Open != opened || (got.Pod != nil) != claimed {
						t.Errorf("after %s: %+v, %v", step, got, err)
					}
				} else if !errdefs.IsNotFound(err) {
					t.Errorf("after %s: %+v, %v", step, got, err)
				}
				if tap != nil {
					if r := send(t, h, tap, a.Sandbox); (r == bpf.TX) != opened {
						t.Errorf("after %s a packet is counted as %s", step, r)
					}
				}
			}
			if len(h.Left()) > 4 { // a tap that nobody has had is kept: its file, that it is free, its hook, itself
				t.Errorf("left: %v", h.Left())
			}
		})
	}
}

// TestOwn: what Cube opens for a pod itself is open until the pod is released, and only by that pod.
func TestOwn(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	settings := &network.Settings{Policy: all}
	for _, p := range []network.Pod{pod, {Namespace: "k8s.io", ID: "0123abcd"}} {
		_, err := h.Claim(ctx, p)
		testnet.Must(t, err)
		a, err := h.Open(ctx, settings.Request(p))
		testnet.Must(t, err)
		if !a.Open || a.Pod == nil || *a.Pod != p {
			t.Errorf("opened %+v", a)
		}
		tap, err := h.OpenTap(ctx, p)
		testnet.Must(t, err)
		if r := send(t, h, tap, a.Sandbox); r != bpf.TX {
			t.Errorf("a packet is counted as %s", r)
		}
		if _, err := h.Open(ctx, request(a.Key)); !errdefs.IsAlreadyExists(err) {
			t.Errorf("opened by a plugin too: %v", err)
		}
		testnet.Must(t, h.Close(ctx, a.Key, "cube", "eth0"))
		testnet.Must(t, h.GC(ctx, "cube", func(string, string) bool { return false }))
		testnet.Must(t, h.Release(ctx, network.Pod{Namespace: "other", ID: p.ID}))
		if got, err := h.Get(ctx, a.Key); err != nil || !got.Open {
			t.Errorf("after others' ends: %+v, %v", got, err)
		}
		testnet.Must(t, tap.Close())
		for range 2 {
			testnet.Must(t, h.Release(ctx, p))
		}
		if left := h.Left(); len(left) != 0 {
			t.Errorf("left: %v", left)
		}
	}
	// Of two pods that have one name, the second has neither the place nor its end.
	_, err := h.Claim(ctx, network.Pod{Namespace: "a", ID: "b-c"})
	testnet.Must(t, err)
	_, err = h.Open(ctx, settings.Request(network.Pod{Namespace: "a", ID: "b-c"}))
	testnet.Must(t, err)
	testnet.Must(t, h.Release(ctx, network.Pod{Namespace: "a-b", ID: "c"}))
	if a, err := h.Get(ctx, "a-b-c"); err != nil || !a.Open {
		t.Errorf("%+v, %v", a, err)
	}
}

// TestInherit: who comes after, on the same tap or with its number, has nothing of who was before.
func TestInherit(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	_, err := h.Claim(ctx, pod)
	testnet.Must(t, err)
	a, err := h.Open(ctx, request("default-box"))
	testnet.Must(t, err)
	tap, err := h.OpenTap(ctx, pod)
	testnet.Must(t, err)
	if r := send(t, h, tap, a.Sandbox); r != bpf.TX {
		t.Fatalf("counted as %s", r)
	}
	if f, err := h.Datapath.Flows(a.Sandbox); err != nil || len(f) != 1 {
		t.Fatalf("flows %v, %v", f, err)
	}
	index := indexOf(t, a.Tap)
	testnet.Must(t, h.Close(ctx, "default-box", "cube", "eth0"))
	if r := send(t, h, tap, a.Sandbox); r != bpf.NoSandbox {
		t.Errorf("after the end a packet is counted as %s", r)
	}
	testnet.Must(t, h.Release(ctx, pod))
	if left := h.Left(); len(left) != 0 {
		t.Errorf("a tap that a machine had is left: %v", left)
	}
	if _, err := tap.Write(make([]byte, 64)); err == nil {
		t.Error("the machine's end still works")
	}
	testnet.Must(t, tap.Close())

	next := network.Pod{Namespace: "default", ID: "next"}
	_, err = h.Claim(ctx, next)
	testnet.Must(t, err)
	r := request("default-next")
	r.Policy = nil
	b, err := h.Open(ctx, r)
	testnet.Must(t, err)
	if b.Tap != a.Tap || b.Sandbox != a.Sandbox || indexOf(t, b.Tap) == index {
		t.Errorf("%+v after %+v", b, a)
	}
	if f, err := h.Datapath.Flows(b.Sandbox); err != nil || len(f) != 0 {
		t.Errorf("flows %v, %v", f, err)
	}
	if c, err := h.Datapath.Counters(b.Sandbox); err != nil || len(c) != 0 {
		t.Errorf("counters %v, %v", c, err)
	}
	tap, err = h.OpenTap(ctx, next)
	testnet.Must(t, err)
	defer tap.Close()
	if r := send(t, h, tap, b.Sandbox); r != bpf.Policy {
		t.Errorf("without a policy a packet is counted as %s", r)
	}
	// And of two machines only one.
	if _, err := h.OpenTap(ctx, next); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a second machine: %v", err)
	}
}

func indexOf(t *testing.T, name string) int {
	t.Helper()
	l, err := netlink.LinkByName(name)
	testnet.Must(t, err)
	return l.Attrs().Index
}

// TestRefused: what can't be had leaves nothing behind.
func TestRefused(t *testing.T) {
	h := testnet.New(t)
	ctx := t.Context()
	if _, err := h.Claim(ctx, pod); !errdefs.IsUnavailable(err) {
		t.Errorf("claimed before the network is up: %v", err)
	}
	testnet.Must(t, h.Close(ctx, "default-box", "cube", "eth0"))
	testnet.Must(t, h.Release(ctx, pod))
	h.Up()
	bad := &policy.Policy{Default: policy.Deny, Rules: []policy.Rule{{Action: policy.Direct, To: "1.0.0.0/8"}, {Action: policy.Direct, To: "1.2.3.4/33"}}}
	r := request("default-box")
	r.Policy = bad
	if _, err := h.Open(ctx, r); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), `rule 2 (allow "1.2.3.4/33")`) {
		t.Errorf("a bad policy: %v", err)
	}
	for _, id := range []string{"", "../x", "a/b", strings.Repeat("a", 300)} {
		if _, err := h.Open(ctx, request(id)); !errdefs.IsInvalidArgument(err) {
			t.Errorf("id %q: %v", id, err)
		}
	}
	if _, err := h.OpenTap(ctx, pod); !errdefs.IsNotFound(err) {
		t.Errorf("a tap that isn't claimed: %v", err)
	}
	if err := h.SetPolicy(ctx, "default-box", all); !errdefs.IsNotFound(err) {
		t.Errorf("a policy for nobody: %v", err)
	}
	if left := h.Left(); len(left) != 0 {
		t.Errorf("left: %v", left)
	}

	// Two pods of one name.
	_, err := h.Claim(ctx, network.Pod{Namespace: "a", ID: "b-c"})
	testnet.Must(t, err)
	if _, err := h.Claim(ctx, network.Pod{Namespace: "a-b", ID: "c"}); !errdefs.IsAlreadyExists(err) {
		t.Errorf("another pod of the same name: %v", err)
	}
	testnet.Must(t, h.Release(ctx, network.Pod{Namespace: "a-b", ID: "c"}))
	if a, err := h.Get(ctx, "a-b-c"); err != nil || a.Pod.ID != "b-c" {
		t.Errorf("%+v, %v", a, err)
	}
	_, err = h.Open(ctx, request("a-b-c"))
	testnet.Must(t, err)
	if err := h.SetPolicy(ctx, "a-b-c", bad); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a bad policy: %v", err)
	}
	if a, err := h.Get(ctx, "a-b-c"); err != nil || a.Policy.Default != policy.Direct {
		t.Errorf("%+v, %v", a, err)
	}
	// Another interface isn't this one.
	testnet.Must(t, h.Close(ctx, "a-b-c", "cube", "eth1"))
	testnet.Must(t, h.Close(ctx, "a-b-c", "other", "eth0"))
	if a, err := h.Get(ctx, "a-b-c"); err != nil || !a.Open {
		t.Errorf("%+v, %v", a, err)
	}
}

// TestExhausted: all addresses are used but the first, the last and the gateway's, and then none.
func TestExhausted(t *testing.T) {
	h := testnet.New(t)
	h.Config.Network.Pool = netip.MustParsePrefix("10.201.7.0/24")
	h.Up()
	for i := 1; i < 254; i++ {
		if i != 77 {
			testnet.Must(t, os.WriteFile(h.Path("addresses", fmt.Sprintf("10.201.7.%d", i)), nil, 0o600))
		}
	}
	testnet.Must(t, h.Status(t.Context()))
	a, err := h.Open(t.Context(), request("a"))
	testnet.Must(t, err)
	if want := netip.MustParseAddr("10.201.7.77"); a.Address != want {
		t.Errorf("address %s, not %s", a.Address, want)
	}
	if _, err := h.Open(t.Context(), request("b")); !errdefs.IsResourceExhausted(err) {
		t.Errorf("one more: %v", err)
	}
	if o, err := h.Overview(t.Context()); err != nil || len(o.Findings) != 1 || o.Findings[0].Level != gateway.Hint || !strings.Contains(o.Findings[0].Detail, "addresses of network.pool") {
		t.Errorf("Overview says %+v (%v)", o, err)
	}
	if err := h.Status(t.Context()); !errdefs.IsResourceExhausted(err) {
		t.Errorf("status %v", err)
	}
	// Those that nobody has come back when all is put in order.
	h.Up()
	testnet.Must(t, h.Status(t.Context()))
}
