package bpf

import (
	"net/netip"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf/policy"
)

// TestDecide: what is said of a packet is what becomes of it.
func TestDecide(t *testing.T) {
	n := newNetwork(t)
	_, tap := n.tap("tap0")
	s := unlimited(tap)
	s.Resolver = true
	if _, err := n.Decide(s.ID, remote, policy.TCP, 1); !errdefs.IsNotFound(err) {
		t.Errorf("of no sandbox: %v", err)
	}
	id, err := n.add(s, nil)
	n.must(err)
	decide := func(to string, p policy.Protocol, port uint16) Decision {
		d, err := n.Decide(id, netip.MustParseAddr(to), p, port)
		n.must(err)
		return d
	}
	if d := decide("1.2.3.4", policy.UDP, 53); d != (Decision{}) {
		t.Errorf("without a policy: %+v", d)
	}
	n.must(n.SetPolicy(id, n.rows(
		allow("1.0.0.0/8", "tcp", "80", "8000-8010"),
		policy.Rule{Action: policy.Proxy, To: "3.0.0.0/8", Ports: []string{"443"}, Protocol: "tcp"},
		policy.Rule{Action: policy.Deny, To: "1.2.0.0/16"},
		allow("1.2.3.0/24", "icmp"))))
	for _, tc := range []struct {
		to   string
		p    policy.Protocol
		port uint16
		want Decision
		mark uint32 // 0: dropped
	}{
		{"1.2.3.4", policy.TCP, 80, Decision{Action: policy.Direct, Rule: 1}, marks.Direct},
		{"1.2.3.4", policy.TCP, 8010, Decision{Action: policy.Direct, Rule: 1}, marks.Direct},
		{"1.2.3.4", policy.TCP, 8011, Decision{Action: policy.Deny, Rule: 3}, 0},
		{"1.2.3.4", policy.UDP, 80, Decision{Action: policy.Deny, Rule: 3}, 0},
		{"1.2.3.4", policy.ICMP, 0, Decision{Action: policy.Direct, Rule: 4}, marks.Direct},
		{"3.1.1.1", policy.TCP, 443, Decision{Action: policy.Proxy, Rule: 2}, marks.Proxy},
		{"3.1.1.1", policy.TCP, 444, Decision{}, 0},
		{"10.0.0.1", policy.TCP, 80, Decision{Action: policy.HardDeny}, 0},
		{"10.0.0.1", policy.UDP, 53, Decision{Resolver: true}, marks.Resolver},
		{"0.0.0.0", policy.TCP, 1, Decision{Action: policy.HardDeny}, 0},
	} {
		to := netip.MustParseAddr(tc.to)
		if d := decide(tc.to, tc.p, tc.port); d != tc.want {
			t.Errorf("%s %s %d: %+v, not %+v", tc.to, tc.p, tc.port, d, tc.want)
		}
		f := tcpFromGuest(to, 1000, tc.port, syn)
		switch tc.p {
		case policy.UDP:
			f = udpFromGuest(to, 1000, tc.port, "x")
		case policy.ICMP:
			f = fromGuest(to, unix.IPPROTO_ICMP, icmp(8, 0, 1, nil))
		}
		if r := n.feed(n.objs.TapIn, id, tap, 0, 0, f.bytes()); (r.verdict == tcRedirect) != (tc.mark != 0) || tc.mark != 0 && r.mark != tc.mark {
			t.Errorf("%s %s %d: the programs' verdict is %d, with mark %#x", tc.to, tc.p, tc.port, r.verdict, r.mark)
		}
	}
}

func TestHookKind(t *testing.T) {
	eachHook(t, func(t *testing.T, n *network) {
		kind := func() string {
			k, err := n.HookKind()
			n.must(err)
			return k
		}
		if k := kind(); k != "" {
			t.Errorf("%q before it is attached", k)
		}
		n.must(n.AttachGateway())
		if want := map[bool]string{false: "tcx", true: "clsact"}[n.cfg.Clsact]; kind() != want {
			t.Errorf("%q, not %q", kind(), want)
		}
	})
}
