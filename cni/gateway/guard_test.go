package gateway

import (
	"encoding/binary"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// What a packet's mark opens, and what stays closed whatever it is.
func TestGuards(t *testing.T) {
	h := newHost(t)
	n := &h.cfg.Network
	m := n.Marks()
	g := h.up()
	guest, neighbour := h.guest(g, "10.200.0.11"), h.guest(g, "10.200.0.12")
	stranger := newNamespace(t) // behind the host, and the host's to forward for
	veth(t, h.ns, "str0", net.HardwareAddr{2, 0, 0, 0, 4, 1}, "192.0.2.1/24", stranger, "eth0", net.HardwareAddr{2, 0, 0, 0, 4, 2}, "192.0.2.2/24")
	for _, ns := range []netns.NsHandle{stranger, h.internet} {
		in(t, ns, func() {
			gw := "192.0.2.1"
			if ns == h.internet {
				gw = uplinkIP
			}
			must(t, netlink.RouteAdd(&netlink.Route{Dst: network("10.0.0.0/8"), Gw: net.ParseIP(gw)}))
		})
	}
	gateway := n.Gateway().String()
	listen(t, h.internet, ":80", "internet")
	listen(t, h.internet, ":443", "internet")
	listen(t, h.internet, ":8443", "internet")
	listenUDP(t, h.internet, internet+":5000", "internet")
	listenUDP(t, h.internet, internet+":5353", "internet")
	listen(t, h.ns, ":22", "host")
	listen(t, h.ns, ":8443", "host")
	listen(t, h.ns, fmt.Sprintf("%s:%d", gateway, n.DNSPort), "resolver")
	listenUDP(t, h.ns, fmt.Sprintf("%s:%d", gateway, n.DNSPort), "resolver")
	listen(t, h.ns, fmt.Sprintf("127.0.0.1:%d", n.ProxyPort), "proxy", unix.IP_TRANSPARENT)
	listen(t, guest, ":8080", "guest")
	listen(t, neighbour, ":8080", "neighbour")

	all := []mark{
		{unix.IPPROTO_UDP, 53, m.Resolver},
		{unix.IPPROTO_TCP, 53, m.Resolver},
		{unix.IPPROTO_TCP, 443, m.Proxy},
	}
	for _, tc := range []struct {
		name     string
		from     netns.NsHandle
		rest     uint32
		marks    []mark
		protocol string
		to       string
		answer   string // "" is none
	}{
		{"tcp to the internet", guest, m.Direct, all, "tcp4", internet + ":80", "internet " + uplinkIP},
		{"udp to the internet", guest, m.Direct, all, "udp4", internet + ":5000", "internet " + uplinkIP},
		{"other bits of marks", guest, m.Direct | 0x10, all, "tcp4", internet + ":80", "internet " + uplinkIP},
		{"not marked", guest, 0, nil, "tcp4", internet + ":80", ""},
		{"marked as what goes to guests", guest, m.Guest, nil, "tcp4", internet + ":80", ""},
		{"names by udp, of any server", guest, m.Direct, all, "udp4", "8.8.8.8:53", "resolver 10.200.0.11 at " + gateway},
		{"names by tcp, of any server", guest, m.Direct, all, "tcp4", "8.8.4.4:53", "resolver 10.200.0.11 at " + gateway},
		{"names of the gateway", guest, m.Direct, all, "udp4", gateway + ":53", "resolver 10.200.0.11"},
		{"not names but for the resolver", guest, m.Resolver, nil, "udp4", internet + ":5353", ""},
		{"the resolver's port, not for it", guest, m.Direct, nil, "tcp4", fmt.Sprintf("%s:%d", gateway, n.DNSPort), ""},
		{"for the proxy", guest, m.Direct, all, "tcp4", internet + ":443", "proxy 10.200.0.11 at " + internet + ":443"},
		{"for the proxy, to the host", guest, m.Proxy, nil, "tcp4", uplinkIP + ":22", "proxy 10.200.0.11 at " + uplinkIP + ":22"},
		{"for the proxy, by udp", guest, m.Proxy, nil, "udp4", internet + ":5000", ""},
		{"host's service by its address", guest, m.Direct, nil, "tcp4", uplinkIP + ":22", ""},
		{"host's service by the gateway's", guest, m.Direct, nil, "tcp4", gateway + ":22", ""},
		{"other guest", guest, m.Direct, nil, "tcp4", "10.200.0.12:8080", ""},
		{"the host to a guest", h.ns, m.Direct, nil, "tcp4", "10.200.0.11:8080", "guest " + gateway},
		{"the host to its resolver", h.ns, m.Direct, nil, "tcp4", fmt.Sprintf("%s:%d", gateway, n.DNSPort), "resolver " + gateway},
		{"internet to a guest", h.internet, m.Direct, nil, "tcp4", "10.200.0.11:8080", ""},
		{"internet to the resolver", h.internet, m.Direct, nil, "tcp4", fmt.Sprintf("%s:%d", gateway, n.DNSPort), ""},
		{"who the host forwards for to a guest", stranger, m.Direct, nil, "tcp4", "10.200.0.11:8080", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h.inside(t, func() {
				h.marks(tc.rest, tc.marks...)
				timeout := wait
				if tc.answer == "" {
					timeout = nothing
				}
				if got := say(t, tc.from, tc.protocol, tc.to, timeout); !strings.HasPrefix(got, tc.answer) || tc.answer == "" && got != "" {
					t.Errorf("got %q, want %q", got, tc.answer)
				}
			})
		})
	}
	if f := h.found(Broken); len(f) > 0 {
		t.Errorf("found %+v after traffic", f)
	}
}

// Without a proxy, what is for it goes nowhere: not straight out, and not to what else listens on the host.
func TestNoProxy(t *testing.T) {
	h := newHost(t)
	guest := h.guest(h.up(), "10.200.0.11")
	h.marks(h.cfg.Network.Marks().Proxy)
	listen(t, h.internet, ":443", "internet")
	listen(t, h.ns, ":443", "host")
	for _, to := range []string{internet, uplinkIP, h.cfg.Network.Gateway().String()} {
		if got := say(t, guest, "tcp4", to+":443", nothing); got != "" {
			t.Errorf("%s: %q", to, got)
		}
	}
	h.marks(h.cfg.Network.Marks().Direct)
	if got := say(t, guest, "tcp4", internet+":443", wait); !strings.HasPrefix(got, "internet") {
		t.Errorf("not for the proxy: %q", got)
	}
}

// Nothing that others send gets to a sandbox or to the gateway's address, whether or not it would be answered.
func TestNothingComesIn(t *testing.T) {
	h := newHost(t)
	guest := h.guest(h.up(), "10.200.0.11")
	h.marks(h.cfg.Network.Marks().Direct)
	in(t, h.internet, func() {
		must(t, netlink.RouteAdd(&netlink.Route{Dst: network("10.200.0.0/16"), Gw: net.ParseIP(uplinkIP)}))
	})
	for _, at := range []struct {
		ns   netns.NsHandle
		addr string
	}{{guest, "10.200.0.11:9"}, {h.ns, h.cfg.Network.Gateway().String() + ":9"}} {
		var c net.PacketConn
		in(t, at.ns, func() {
			var err error
			c, err = net.ListenPacket("udp4", at.addr)
			must(t, err)
		})
		defer c.Close()
		for _, from := range []netns.NsHandle{h.internet, h.ns} {
			in(t, from, func() {
				s, err := net.Dial("udp4", at.addr)
				must(t, err)
				defer s.Close()
				_, err = fmt.Fprint(s, from == h.ns)
				must(t, err)
			})
		}
		must(t, c.SetDeadline(time.Now().Add(wait)))
		b := make([]byte, 100)
		n, _, err := c.ReadFrom(b)
		must(t, err)
		if string(b[:n]) != "true" {
			t.Errorf("%s gets what the internet sends", at.addr)
		}
	}
}

// A packet that conntrack calls invalid isn't masqueraded; no address of the pool gets out by that.
func TestInvalid(t *testing.T) {
	t.Run("all", func(t *testing.T) { testInvalid(t, func(*host) {}) })
	// The rules without the kernel's own check.
	t.Run("without rp_filter", func(t *testing.T) {
		testInvalid(t, func(h *host) { must(t, setSysctl("ipv4/conf/"+h.cfg.Network.Device+"/rp_filter", "0")) })
	})
}

func testInvalid(t *testing.T, weaken func(*host)) {
	h := newHost(t)
	guest := h.guest(h.up(), "10.200.0.11")
	weaken(h)
	h.marks(h.cfg.Network.Marks().Direct)
	var capture int
	in(t, h.internet, func() {
		var err error
		capture, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(binary.NativeEndian.Uint16([]byte{unix.ETH_P_IP >> 8, unix.ETH_P_IP & 0xff})))
		must(t, err)
	})
	defer unix.Close(capture)
	must(t, unix.SetsockoptTimeval(capture, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(wait / time.Second)}))
	in(t, guest, func() {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		must(t, err)
		defer unix.Close(fd)
		source, target := net.ParseIP("10.200.0.11"), net.ParseIP(internet)
		for _, p := range [][]byte{
			datagram(source, target, 1, 0xbad),                    // with a wrong checksum
			segment(source, target, 0x12),                         // SYN-ACK of nothing
			datagram(net.ParseIP("10.99.0.1"), target, 2, 0),      // not of the pool
			datagram(net.ParseIP("198.51.100.7"), target, 3, 0),   // of the uplink's network
			datagram(net.ParseIP("10.200.255.254"), target, 4, 0), // the gateway's own
			datagram(source, target, 9, 0),                        // which is right
		} {
			must(t, unix.Sendto(fd, p, 0, &unix.SockaddrInet4{Addr: [4]byte(target.To4())}))
		}
	})
	for b := make([]byte, 2048); ; {
		k, _, err := unix.Recvfrom(capture, b, 0)
		must(t, err)
		p := b[:k]
		if len(p) < 28 || !net.IP(p[ipTarget:][:4]).Equal(net.ParseIP(internet)) {
			continue
		}
		if source := net.IP(p[ipSource:][:4]); !source.Equal(net.ParseIP(uplinkIP)) {
			t.Errorf("a packet from %s got out", source)
		}
		port := binary.BigEndian.Uint16(p[22:])
		if p[9] == unix.IPPROTO_UDP && port == 9 {
			return
		}
		t.Errorf("a packet of protocol %d to port %d got out", p[9], port)
	}
}

// A sandbox has its connections and no more, and others have theirs.
func TestConnections(t *testing.T) {
	h := newHost(t)
	h.cfg.Network.MaxFlows = 16
	g := h.up()
	first, second := h.guest(g, "10.200.0.11"), h.guest(g, "10.200.0.12")
	h.marks(h.cfg.Network.Marks().Direct)
	listenUDP(t, h.internet, internet+":5000", "internet")
	for i := range 16 {
		if got := say(t, first, "udp4", internet+":5000", wait); got == "" {
			t.Fatalf("connection %d fails", i)
		}
	}
	if got := say(t, first, "udp4", internet+":5000", nothing); got != "" {
		t.Errorf("one connection too many: %q", got)
	}
	if got := say(t, second, "udp4", internet+":5000", wait); got == "" {
		t.Error("another sandbox has none")
	}
}

// What the host forwards for others goes on as it did, and so do connections of sandboxes when rules are replaced.
func TestOthersGoOn(t *testing.T) {
	h := newHost(t)
	stranger := newNamespace(t)
	veth(t, h.ns, "str0", net.HardwareAddr{2, 0, 0, 0, 4, 1}, "192.0.2.1/24", stranger, "eth0", net.HardwareAddr{2, 0, 0, 0, 4, 2}, "192.0.2.2/24")
	in(t, stranger, func() { must(t, netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("192.0.2.1")})) })
	in(t, h.internet, func() { must(t, netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(uplinkIP)})) })
	echo := echoServer(t, h.internet, internet+":7")
	theirs := echo(stranger)
	theirs("before")
	g := h.up()
	theirs("up")
	guest := h.guest(g, "10.200.0.11")
	h.marks(h.cfg.Network.Marks().Direct)
	ours := echo(guest)
	ours("first")
	h.cfg.Network.DNSPort = 5300 // so that the rules differ
	h.up()
	ours("after new rules")
	theirs("after new rules")
	h.down()
	theirs("down")
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
	must(t, err)
	for _, f := range flows {
		if ofPool(h.cfg.Network).MatchConntrackFlow(f) {
			t.Errorf("a connection is left: %s", f)
		}
	}
	if got := echo(stranger); got == nil {
		t.Error("no new connection")
	}
}

// On a host that forwards nothing, Cube's is all that is forwarded.
func TestOnlyOurs(t *testing.T) {
	h := newHost(t)
	must(t, setSysctl(ipForward, "0"))
	stranger := newNamespace(t)
	veth(t, h.ns, "str0", net.HardwareAddr{2, 0, 0, 0, 4, 1}, "192.0.2.1/24", stranger, "eth0", net.HardwareAddr{2, 0, 0, 0, 4, 2}, "192.0.2.2/24")
	in(t, stranger, func() { must(t, netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("192.0.2.1")})) })
	in(t, h.internet, func() { must(t, netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(uplinkIP)})) })
	listen(t, h.internet, ":80", "internet")
	guest := h.guest(h.up(), "10.200.0.11")
	h.marks(h.cfg.Network.Marks().Direct)
	if got := say(t, guest, "tcp4", internet+":80", wait); got == "" {
		t.Error("a sandbox has no internet")
	}
	if got := say(t, stranger, "tcp4", internet+":80", nothing); got != "" {
		t.Errorf("a stranger is forwarded for: %q", got)
	}
	others(t, nftables.TableFamilyIPv4, "filter", nftables.ChainPolicyAccept, "DOCKER-USER")
	if f := h.found(Hint); len(f) != 1 || !strings.Contains(f[0].Remedy, "cube down --purge") {
		t.Errorf("found %+v", f)
	}
}
