package bypass

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestFromOutside: who has a route to the sandboxes by this host reaches none, not even as who a sandbox talks to. With the
// host's rules flushed they get no further than to answer.
func TestFromOutside(t *testing.T) {
	w := newWorld(t, strict)
	from := map[string]func(packet []byte){
		"router": w.sender(w.outside, "w0", uplinkMAC, routerMAC), "container": w.sender(w.beside, "eth0", w.mac("docker0"), boxMAC),
	}
	for _, bare := range []bool{false, true} {
		if bare {
			w.unguard()
		}
		// What a's flows are is known to them.
		must(t, w.send(w.a, vnet{}, guestUDP(ok, 9999)))
		must(t, w.send(w.a, vnet{}, guestTCP(ok, 80, syn)))
		must(t, w.send(w.a, vnet{}, guestEcho(ok, 8)))
		w.seen()
		for _, v := range w.inbound() {
			for name, send := range sorted(from) {
				send(v.packet)
				want := []string(nil)
				if bare && v.bare != nil {
					want = v.bare
					t.Logf("without the guard: %s, from the %s: %q, as %s", v.name, name, want, v.why)
				}
				if got := w.seen(); !slices.Equal(got, want) {
					t.Errorf("%s, from the %s: seen %q, want %q", v.name, name, got, want)
				}
			}
		}
	}
}

// inbound are packets for sandboxes and the gateway's address.
type inbound struct {
	name   string
	packet []byte
	bare   []string // what is seen without the guard
	why    string
}

func (w *world) inbound() (all []inbound) {
	a, b, gw := w.a.at.Address, w.b.at.Address, w.cfg.Network.Gateway()
	quoted := udp(at(a, 4000), at(ok, 9999), "12345678")
	for _, src := range []netip.Addr{router, next, box, bad, b, gw} {
		all = append(all, []inbound{
			{name: "UDP of " + w.name(src), packet: udp(at(src, 9999), at(a, 4000), "let me in")},
			{name: "names of " + w.name(src), packet: udp(at(src, 53), at(a, 4000), "let me in")},
			{name: "TCP of " + w.name(src), packet: tcp(at(src, 80), at(a, 22), syn, 1, 0, "")},
			{name: "TCP answer of " + w.name(src), packet: tcp(at(src, 80), at(a, 4000), syn|ack, 1, 1001, "")},
			{name: "TCP data of " + w.name(src), packet: tcp(at(src, 80), at(a, 4000), ack, 1, 1001, "let me in")},
			{name: "TCP reset of " + w.name(src), packet: tcp(at(src, 80), at(a, 4000), rst, 1, 0, "")},
			{name: "echo of " + w.name(src), packet: icmp(src, a, 8, 0, 1, nil)},
			{name: "echo reply of " + w.name(src), packet: icmp(src, a, 0, 0, 4000<<16|1, nil)},
			{name: "redirect of " + w.name(src), packet: icmp(src, a, 5, 1, 0, quoted)},
			{name: "timestamp of " + w.name(src), packet: icmp(src, a, 13, 0, 0, make([]byte, 12))},
			{name: "GRE of " + w.name(src), packet: ipv4(src, a, unix.IPPROTO_GRE, make([]byte, 40))},
			{name: "later fragment of " + w.name(src), packet: edited(fromGuest(udp(at(src, 9999), at(a, 4000), "let me in")), ethLen+6, 0, 1)[ethLen:]},
		}...)
	}
	const natless = "answers have the sandbox's own address where nobody masquerades, and come from who was asked"
	return append(all, []inbound{
		{name: "UDP as who is talked to", packet: udp(at(ok, 9999), at(a, 4000), "let me in"), bare: []string{"a: udp ok:9999 > guest"}, why: natless},
		{name: "UDP as who is talked to, from another port", packet: udp(at(ok, 9998), at(a, 4000), "let me in")},
		{name: "UDP as who is talked to, to another port", packet: udp(at(ok, 9999), at(a, 4001), "let me in")},
		{name: "UDP as who is talked to, to the other", packet: udp(at(ok, 9999), at(b, 4000), "let me in")},
		{name: "TCP as who is talked to", packet: tcp(at(ok, 80), at(a, 4000), syn, 1, 0, "")},
		{name: "echo as who is talked to", packet: icmp(ok, a, 8, 0, 4000<<16|1, nil)},
		{name: "unreachable", packet: icmp(router, a, 3, 3, 0, quoted), bare: []string{"a: icmp 3/3 router > guest"}, why: "any router on the way may say so"},
		{name: "unreachable about nothing", packet: icmp(router, a, 3, 3, 0, udp(at(a, 4001), at(ok, 9999), "12345678"))},
		{name: "unreachable about the other", packet: icmp(router, a, 3, 3, 0, udp(at(b, 4000), at(ok, 9999), "12345678"))},
		{name: "the gateway", packet: tcp(at(router, 9999), at(gw, 9999), rst, 1, 0, ""), bare: []string{"host: tcp rst router > gateway:9999"}, why: "it is the host's"},
		{name: "the resolver", packet: udp(at(router, 9999), at(gw, w.cfg.Network.DNSPort), "let me in"), bare: []string{"host: udp router > gateway:10053"}, why: "it is the host's"},
	}...)
}

func (w *world) mac(dev string) []byte {
	l, err := netlink.LinkByName(dev)
	must(w.t, err)
	return l.Attrs().HardwareAddr
}

// TestHost: the host itself gets to a sandbox, which may answer and nothing more.
func TestHost(t *testing.T) {
	w := newWorld(t, strict)
	c, err := net.DialUDP("udp4", &net.UDPAddr{Port: 7000}, net.UDPAddrFromAddrPort(at(w.a.at.Address, 8000)))
	must(t, err)
	defer c.Close()
	_, err = c.Write([]byte("hello"))
	must(t, err)
	if got := w.seen(); !slices.Equal(got, []string{"a: udp gateway:7000 > guest"}) {
		t.Fatalf("seen %q", got)
	}
	gw := w.cfg.Network.Gateway()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	must(t, err)
	defer unix.Close(fd)
	must(t, unix.Bind(fd, &unix.SockaddrInet4{Port: 7000}))
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: w.a.at.Address.As4(), Port: 8000}); err != unix.EINPROGRESS {
		t.Fatal(err)
	}
	if got := w.seen(); !slices.Equal(got, []string{"a: tcp syn gateway:7000 > guest"}) {
		t.Fatalf("seen %q", got)
	}
	for _, tc := range []struct {
		name   string
		packet []byte
		want   []string
	}{
		{"answer", udp(at(guestIP, 8000), at(gw, 7000), "hello"), []string{"host: udp a > gateway:7000"}},
		{"to another port", udp(at(guestIP, 8000), at(gw, 7001), "hello"), nil},
		{"from another port", udp(at(guestIP, 8001), at(gw, 7000), "hello"), nil},
		{"to another address of the host's", udp(at(guestIP, 8000), at(uplink, 7000), "hello"), nil},
		{"a connection of its own, with the ports of one", tcp(at(guestIP, 8000), at(gw, 7000), syn, 1, 0, ""), nil},
	} {
		must(t, w.send(w.a, vnet{}, fromGuest(tc.packet)))
		if got := w.seen(); !slices.Equal(got, tc.want) {
			t.Errorf("%s: seen %q, want %q", tc.name, got, tc.want)
		}
	}
}
