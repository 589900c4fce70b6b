package trace_test

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/cni/trace"
	"github.com/cubesandbox/cube/internal/testnet"
)

func TestParseTarget(t *testing.T) {
	for text, want := range map[string]trace.Target{
		"1.2.3.4":            {Address: netip.MustParseAddr("1.2.3.4"), Protocol: policy.ICMP},
		"1.2.3.4/icmp":       {Address: netip.MustParseAddr("1.2.3.4"), Protocol: policy.ICMP},
		"1.2.3.4:443":        {Address: netip.MustParseAddr("1.2.3.4"), Port: 443, Protocol: policy.TCP},
		"1.2.3.4:65535/tcp":  {Address: netip.MustParseAddr("1.2.3.4"), Port: 65535, Protocol: policy.TCP},
		"1.2.3.4:53/udp":     {Address: netip.MustParseAddr("1.2.3.4"), Port: 53, Protocol: policy.UDP},
		"":                   {},
		"example.com":        {},
		"2001:db8::1":        {},
		"[2001:db8::1]:443":  {},
		"1.2.3.4:":           {},
		"1.2.3.4:0":          {},
		"1.2.3.4:65536":      {},
		"1.2.3.4:http":       {},
		"1.2.3.4:+80":        {},
		"1.2.3.4:80-90":      {},
		"1.2.3.4:80/":        {},
		"1.2.3.4:80/sctp":    {},
		"1.2.3.4:80/tcp/udp": {},
		"1.2.3.4/tcp":        {},
		"1.2.3.4/24":         {},
		"1.2.3.4:8/icmp":     {},
	} {
		got, err := trace.ParseTarget(text)
		if got != want || (err != nil) != (want == trace.Target{}) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
		if err == nil {
			if again, err := trace.ParseTarget(got.String()); err != nil || again != got {
				t.Errorf("%q is written as %s, which is %v, %v", text, got, again, err)
			}
		} else if !strings.Contains(err.Error(), "use for example") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// host is a host with neighbours on its uplink and a container with a machine's end of a tap.
type host struct {
	*testnet.Host
	t      *testing.T
	uplink netlink.Link
	tap    *os.File
	box    *network.Attachment
}

func newHost(t *testing.T, rules ...policy.Rule) *host {
	h := &host{Host: testnet.New(t), t: t}
	h.Up()
	ctx := t.Context()
	pod := network.Pod{Namespace: "cube", ID: "box"}
	_, err := h.Claim(ctx, pod)
	testnet.Must(t, err)
	h.box, err = h.Open(ctx, network.Request{ID: "cube-box", Network: "net", IfName: "eth0", Policy: &policy.Policy{Default: policy.Direct, Rules: rules}})
	testnet.Must(t, err)
	h.tap, err = h.OpenTap(ctx, pod)
	testnet.Must(t, err)
	t.Cleanup(func() { _ = h.tap.Close() })
	h.uplink, err = netlink.LinkByName("up0")
	testnet.Must(t, err)
	// The first one isn't the gateway.
	h.neighbour("198.51.100.7", "02:00:00:00:00:07", netlink.NUD_PERMANENT)
	h.neighbour("198.51.100.9", "02:00:00:00:00:09", netlink.NUD_PERMANENT)
	return h
}

func (h *host) neighbour(ip, mac string, state int) {
	h.t.Helper()
	n := &netlink.Neigh{LinkIndex: h.uplink.Attrs().Index, IP: net.ParseIP(ip).To4(), State: state}
	if mac != "" {
		var err error
		n.HardwareAddr, err = net.ParseMAC(mac)
		testnet.Must(h.t, err)
	}
	testnet.Must(h.t, netlink.NeighSet(n))
}

func (h *host) trace(to string) *trace.Report {
	h.t.Helper()
	target, err := trace.ParseTarget(to)
	testnet.Must(h.t, err)
	a, err := h.Find(h.t.Context(), "cube", "box")
	testnet.Must(h.t, err)
	r, err := trace.Run(h.t.Context(), h.Config, a, target)
	testnet.Must(h.t, err)
	return r
}

// says checks that the only problem is one that says all of that.
func (h *host) says(r *trace.Report, words ...string) {
	h.t.Helper()
	if len(r.Problems) != 1 {
		h.t.Errorf("problems %q", r.Problems)
		return
	}
	for _, w := range words {
		if !strings.Contains(r.Problems[0], w) {
			h.t.Errorf("problem %q doesn't say %q", r.Problems[0], w)
		}
	}
}

// send has the machine send a frame.
func (h *host) send(frame []byte) {
	h.t.Helper()
	_, err := h.tap.Write(append(make([]byte, testnet.VnetHeader), frame...))
	testnet.Must(h.t, err)
}

// syn is the guest's first segment from port 1000.
func syn(to netip.AddrPort) []byte {
	b := testnet.UDP(to, strings.Repeat("x", 12)) // as long as a TCP header
	b[14+9] = unix.IPPROTO_TCP
	ip, tcp := b[14:34], b[34:54]
	clear(tcp)
	binary.BigEndian.PutUint16(tcp, 1000)
	binary.BigEndian.PutUint16(tcp[2:], to.Port())
	tcp[12], tcp[13] = 5<<4, 2 // data offset, SYN
	tcp[14] = 0xff             // window
	pseudo := append(append([]byte{}, ip[12:20]...), 0, unix.IPPROTO_TCP, 0, byte(len(tcp)))
	clear(ip[10:12])
	binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	binary.BigEndian.PutUint16(tcp[16:], checksum(append(pseudo, tcp...)))
	return b
}

// checksum is that of RFC 1071.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	sum = sum>>16 + sum&0xffff
	return ^uint16(sum + sum>>16)
}

// TestWay: the MAC address is the gateway's, whoever else is on the network, and whatever becomes of it.
func TestWay(t *testing.T) {
	h := newHost(t)
	r := h.trace("1.2.3.4:443")
	if len(r.Problems) != 0 || r.Verdict.Action != "allow" || r.Address != h.box.Address || r.Tap != h.box.Tap {
		t.Errorf("%+v", r)
	}
	if r.Route == nil || r.Route.Device != "up0" || r.Route.MTU != 1500 || r.Route.Gateway == nil || r.Route.Gateway.String() != "198.51.100.1" {
		t.Fatalf("route %+v", r.Route)
	}
	next := func(to, address, mac, state string, gateway bool) {
		t.Helper()
		r = h.trace(to)
		want := trace.Neighbour{Address: netip.MustParseAddr(address), MAC: mac, State: state, NextHop: true, Gateway: gateway}
		if len(r.Neighbours) == 0 || r.Neighbours[0] != want {
			t.Errorf("%s: neighbours %+v, not first %+v", to, r.Neighbours, want)
		}
	}
	next("1.2.3.4:443", "198.51.100.1", "", "UNKNOWN", true)
	if len(r.Neighbours) != 3 || r.Neighbours[1].Address.String() != "198.51.100.7" || r.Neighbours[1].NextHop || r.Neighbours[1].Gateway {
		t.Errorf("neighbours %+v", r.Neighbours)
	}
	h.neighbour("198.51.100.1", "02:00:00:00:00:01", netlink.NUD_STALE)
	next("1.2.3.4:443", "198.51.100.1", "02:00:00:00:00:01", "STALE", true)
	h.neighbour("198.51.100.1", "02:00:00:00:aa:01", netlink.NUD_REACHABLE)
	next("1.2.3.4", "198.51.100.1", "02:00:00:00:aa:01", "REACHABLE", true)
	h.neighbour("198.51.100.1", "", netlink.NUD_FAILED)
	next("1.2.3.4:443", "198.51.100.1", "", "FAILED", true)
	h.says(r, "the gateway 198.51.100.1 doesn't answer on up0", "FAILED")

	// A network that the host is in is denied by all policies; its neighbours' way is told all the same.
	next("198.51.100.7:80", "198.51.100.7", "02:00:00:00:00:07", "PERMANENT", false)
	h.says(r, "hard-deny")
	if r.Route.Gateway != nil {
		t.Errorf("route %+v", r.Route)
	}

	// A route of its own, by another gateway.
	_, dst, err := net.ParseCIDR("1.2.3.0/24")
	testnet.Must(t, err)
	testnet.Must(t, netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.IP{198, 51, 100, 9}}))
	next("1.2.3.4:443", "198.51.100.9", "02:00:00:00:00:09", "PERMANENT", true)
	testnet.Must(t, netlink.RouteDel(&netlink.Route{Dst: dst, Gw: net.IP{198, 51, 100, 9}}))

	testnet.Must(t, netlink.RouteAdd(&netlink.Route{Dst: dst, Type: unix.RTN_PROHIBIT}))
	h.says(h.trace("1.2.3.4:443"), "forwards nothing to 1.2.3.4")
	testnet.Must(t, netlink.RouteDel(&netlink.Route{Dst: dst, Type: unix.RTN_PROHIBIT}))

	testnet.Must(t, netlink.RouteDel(&netlink.Route{Gw: net.IP{198, 51, 100, 1}}))
	r = h.trace("1.2.3.4:443")
	h.says(r, "no route to 1.2.3.4", "no default route", "ip route add default")
	if r.Route != nil || r.Neighbours != nil {
		t.Errorf("there is no way, but %+v %+v", r.Route, r.Neighbours)
	}
}

func TestVerdicts(t *testing.T) {
	h := newHost(t,
		policy.Rule{Action: policy.Direct, To: "1.2.3.4", Ports: []string{"443"}, Protocol: "tcp"},
		policy.Rule{Action: policy.Deny, To: "1.2.0.0/16"})
	for to, want := range map[string]struct{ says, problem string }{
		"1.2.3.4:443":     {says: `allow, by rule 1 (allow "1.2.3.4" ports 443 tcp)`},
		"1.2.3.4:80":      {says: `deny, by rule 2 (deny "1.2.0.0/16")`, problem: "by rule 2"},
		"1.2.3.4":         {says: `deny, by rule 2 (deny "1.2.0.0/16")`, problem: "by rule 2"},
		"1.3.0.0:443/udp": {says: "allow, by default"},
		"10.0.0.1:443":    {says: "hard-deny", problem: "no policy opens"},
		"10.0.0.1:53/udp": {says: "resolver"},
	} {
		r := h.trace(to)
		if got := r.Verdict.String(); !strings.HasPrefix(got, want.says) {
			t.Errorf("%s: %s", to, got)
		}
		if problems := strings.Join(r.Problems, "; "); !strings.Contains(problems, want.problem) || (problems == "") != (want.problem == "") {
			t.Errorf("%s: problems %q", to, r.Problems)
		}
		if (r.Route == nil) != (want.says == "resolver") {
			t.Errorf("%s: route %+v", to, r.Route)
		}
	}
	testnet.Must(t, h.SetPolicy(t.Context(), "cube-box", nil))
	h.says(h.trace("1.3.0.0:443"), "deny, by default")
}

// TestConnection: what the flow looks like from outside.
func TestConnection(t *testing.T) {
	h := newHost(t)
	h.neighbour("198.51.100.1", "02:00:00:00:00:01", netlink.NUD_PERMANENT)
	h.send(syn(netip.MustParseAddrPort("1.2.3.4:443")))
	h.send(testnet.UDP(netip.MustParseAddrPort("1.2.3.4:443"), "hello"))
	h.send(syn(netip.MustParseAddrPort("1.2.3.4:444")))
	for _, tc := range []struct {
		to    string
		port  uint16
		state string
	}{{"1.2.3.4:443", 1000, "SYN_SENT"}, {"1.2.3.4:443/udp", 4096, ""}} {
		r := h.trace(tc.to)
		if len(r.Flows) != 1 || len(r.Problems) != 0 {
			t.Errorf("%s: flows %+v, problems %q", tc.to, r.Flows, r.Problems)
			continue
		}
		f := r.Flows[0]
		if f.GuestPort != tc.port || f.Remote != "1.2.3.4:443" || f.State != bpf.FlowOpening || f.TXPackets != 1 || f.Idle > time.Minute.Seconds() {
			t.Errorf("%s: flow %+v", tc.to, f)
		}
		if f.Connection == nil || f.Connection.State != tc.state || f.Connection.Expires == 0 {
			t.Errorf("%s: connection %+v", tc.to, f.Connection)
			continue
		}
		as, err := netip.ParseAddrPort(f.Connection.As)
		if err != nil || as.Addr().String() != "198.51.100.2" {
			t.Errorf("%s: leaves as %s", tc.to, f.Connection.As)
		}
	}
}

// TestInTheWay: what stops packets before and after the policy.
func TestInTheWay(t *testing.T) {
	h := newHost(t)
	h.neighbour("198.51.100.1", "02:00:00:00:00:01", netlink.NUD_PERMANENT)
	testnet.Must(t, os.WriteFile("/proc/sys/net/ipv4/conf/up0/forwarding", []byte("0"), 0))
	h.says(h.trace("1.2.3.4:443"), "net.ipv4.conf.up0.forwarding", "sysctl -w")
	testnet.Must(t, os.WriteFile("/proc/sys/net/ipv4/conf/up0/forwarding", []byte("1"), 0))

	testnet.Must(t, h.tap.Close())
	h.says(h.trace("1.2.3.4:443"), "no machine has tap "+h.box.Tap)
	tap, err := netlink.LinkByName(h.box.Tap)
	testnet.Must(t, err)
	testnet.Must(t, netlink.LinkSetDown(tap))
	h.says(h.trace("1.2.3.4:443"), h.box.Tap+" is down")
}
