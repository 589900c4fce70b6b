package bypass

import (
	"encoding/binary"
	"iter"
	"maps"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
)

// vector is frames from a sandbox, and what has to become of them.
type vector struct {
	name   string
	frames [][]byte
	header vnet
	want   result
	// careless is what a policy that allows everything lets through; nil: no more than the strict one.
	careless *result
	// bare is what is seen instead when somebody has flushed the host's rules; nil: the same. why says why that is so.
	bare []string
	why  string
}

// result is how the frames are counted, and where they are seen.
type result struct {
	counted string
	seen    []string
}

func dropped(r bpf.Reason) result { return result{counted: r.String()} }

func passed(seen ...string) result { return result{bpf.TX.String(), seen} }

// refused is what the kernel doesn't take from a tap's descriptor.
var refused = result{counted: "refused"}

// nowhere is a bare result of its own, as nil is none.
var nowhere = []string{}

const hostsOwn = "the host's own addresses come before any routing rule; only the guard is left"

func one(f []byte) [][]byte { return [][]byte{f} }

// vectors are all of them; the numbers in comments are rows of the design's threat table.
func (w *world) vectors() []vector {
	return slices.Concat(w.controls(), ethernet(), headers(), w.spoofed(), w.services(), w.names(), states(), lies())
}

// sorted is a map in the order of its keys.
func sorted[V any](m map[string]V) iter.Seq2[string, V] {
	return func(yield func(string, V) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}

// controls are what has to pass, and what policies alone decide on.
func (w *world) controls() []vector {
	passes := func(what string, to string) *result { r := passed("wire: " + what + " uplink > " + to); return &r }
	return []vector{
		{name: "control: UDP to an allowed address", frames: one(guestUDP(ok, 9999)), want: passed("wire: udp uplink > ok:9999")},
		{name: "control: TCP to an allowed address", frames: one(guestTCP(ok, 80, syn)), want: passed("wire: tcp syn uplink > ok:80")},
		{name: "control: echo to an allowed address", frames: one(guestEcho(ok, 56)), want: passed("wire: icmp 8/0 uplink > ok")},
		{name: "UDP to a denied address", frames: one(guestUDP(bad, 9999)), want: dropped(bpf.Policy), careless: passes("udp", "bad:9999")},
		{name: "UDP to another port of an allowed address", frames: one(guestUDP(ok, 9998)), want: dropped(bpf.Policy), careless: passes("udp", "ok:9998")},
		{name: "QUIC where TCP is allowed", frames: one(guestUDP(ok, 80)), want: dropped(bpf.Policy), careless: passes("udp", "ok:80")},
		{name: "TCP to a denied address", frames: one(guestTCP(bad, 443, syn)), want: dropped(bpf.Policy), careless: passes("tcp syn", "bad:443")},
		{name: "data in a SYN to a denied address", frames: one(fromGuest(tcp(at(guestIP, 4100), at(bad, 9999), syn, 1, 0, "let me through"))), want: dropped(bpf.Policy), careless: passes("tcp syn", "bad:9999")},
		{name: "echo to a denied address", frames: one(guestEcho(bad, 56)), want: dropped(bpf.Policy), careless: passes("icmp 8/0", "bad")},
		{name: "echo with a tunnel's worth in it", frames: one(guestEcho(ok, 129)), want: dropped(bpf.EchoSize)},
	}
}

// ethernet has what isn't IPv4 (19, 23), ARP (27) and other targets than the gateway (28).
func ethernet() []vector {
	v6 := func(next byte, dst string, payload ...byte) []byte {
		b := []byte{0x60, 0, 0, 0, 0, byte(len(payload)), next, 255}
		b = append(b, netip.MustParseAddr("fe80::1").AsSlice()...)
		b = append(b, netip.MustParseAddr(dst).AsSlice()...)
		return ether(gateway.MAC, network.GuestMAC, unix.ETH_P_IPV6, append(b, payload...))
	}
	typed := func(kind uint16, before ...byte) []byte {
		return ether(gateway.MAC, network.GuestMAC, kind, append(before, guestUDP(ok, 9999)[ethLen:]...))
	}
	snap := append([]byte{0xaa, 0xaa, 3, 0, 0, 0, 8, 0}, guestUDP(ok, 9999)[ethLen:]...)
	other := net.HardwareAddr{2, 0xbb, 0, 0, 0, 1}
	to := func(mac net.HardwareAddr) []byte { return edited(guestUDP(ok, 9999), 0, mac...) }
	gw := network.GuestGateway
	anyone := net.HardwareAddr{0, 0, 0, 0, 0, 0}
	return []vector{
		{name: "IPv6 UDP", frames: one(v6(17, "2001:db8::1", 0x10, 0, 0, 9, 0, 8, 0, 0)), want: dropped(bpf.IPv6)},
		{name: "IPv6 echo to all nodes", frames: one(v6(58, "ff02::1", 128, 0, 0, 0, 0, 0, 0, 0)), want: dropped(bpf.IPv6)},
		{name: "IPv6 router advertisement", frames: one(v6(58, "ff02::1", 134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0)), want: dropped(bpf.IPv6)},
		{name: "IPv6 neighbour solicitation", frames: one(v6(58, "ff02::1:ff00:1", append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, make([]byte, 16)...)...)), want: dropped(bpf.IPv6)},
		{name: "IPv6 fragment", frames: one(v6(44, "2001:db8::1", 17, 0, 0, 1, 0, 0, 0, 1)), want: dropped(bpf.IPv6)},
		{name: "IPv6 metadata service", frames: one(v6(6, "fd00:ec2::254", make([]byte, 20)...)), want: dropped(bpf.IPv6)},
		{name: "VLAN tag", frames: one(inserted(guestUDP(ok, 9999), 12, 0x81, 0, 0, 7)), want: dropped(bpf.VLAN)},
		{name: "VLAN priority tag", frames: one(inserted(guestUDP(ok, 9999), 12, 0x81, 0, 0xe0, 0)), want: dropped(bpf.VLAN)},
		{name: "two VLAN tags", frames: one(inserted(guestUDP(ok, 9999), 12, 0x88, 0xa8, 0, 7, 0x81, 0, 0, 8)), want: dropped(bpf.VLAN)},
		{name: "two VLAN tags of a kind", frames: one(inserted(guestUDP(ok, 9999), 12, 0x81, 0, 0, 7, 0x81, 0, 0, 8)), want: dropped(bpf.VLAN)},
		{name: "MPLS", frames: one(typed(unix.ETH_P_MPLS_UC, 0, 0, 1, 255)), want: dropped(bpf.EtherType)},
		{name: "PPPoE", frames: one(typed(unix.ETH_P_PPP_SES, 0x11, 0, 0, 1, 0, 0x20, 0, 0x21)), want: dropped(bpf.EtherType)},
		{name: "LLC and SNAP", frames: one(ether(gateway.MAC, network.GuestMAC, uint16(len(snap)), snap)), want: dropped(bpf.EtherType)},
		{name: "spanning tree", frames: one(ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0}, network.GuestMAC, 38, append([]byte{0x42, 0x42, 3}, make([]byte, 35)...))), want: dropped(bpf.EtherType)},
		{name: "LLDP", frames: one(ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0xe}, network.GuestMAC, unix.ETH_P_LLDP, make([]byte, 46))), want: dropped(bpf.EtherType)},
		{name: "only a header", frames: one(guestUDP(ok, 9999)[:ethLen]), want: dropped(bpf.Malformed)},
		{name: "less than a header", frames: one(guestUDP(ok, 9999)[:ethLen-1]), want: refused},
		{name: "IPv4 by broadcast", frames: one(to(broadcast)), want: dropped(bpf.TargetMAC)},
		{name: "IPv4 by multicast", frames: one(to(net.HardwareAddr{1, 0, 0x5e, 0, 0, 1})), want: dropped(bpf.TargetMAC)},
		{name: "IPv4 to another station", frames: one(to(other)), want: dropped(bpf.TargetMAC)},
		{name: "IPv4 to the uplink's router", frames: one(to(routerMAC)), want: dropped(bpf.TargetMAC)},

		{name: "control: ARP for the gateway", frames: one(arp(broadcast, 1, network.GuestMAC, guestIP, anyone, gw)), want: result{bpf.ARPReply.String(), []string{"a: arp 2 guest-gateway > guest"}}},
		{name: "ARP for the host", frames: one(arp(broadcast, 1, network.GuestMAC, guestIP, anyone, uplink)), want: dropped(bpf.ARP)},
		{name: "ARP for the router", frames: one(arp(broadcast, 1, network.GuestMAC, guestIP, anyone, router)), want: dropped(bpf.ARP)},
		{name: "ARP for its own address", frames: one(arp(broadcast, 1, network.GuestMAC, guestIP, anyone, guestIP)), want: dropped(bpf.ARP)},
		{name: "gratuitous ARP as the gateway", frames: one(arp(broadcast, 2, network.GuestMAC, gw, broadcast, gw)), want: dropped(bpf.ARP)},
		{name: "ARP reply to nobody's request", frames: one(arp(gateway.MAC, 2, network.GuestMAC, guestIP, gateway.MAC, gw)), want: dropped(bpf.ARP)},
		{name: "ARP for the gateway as another", frames: one(arp(broadcast, 1, network.GuestMAC, uplink, anyone, gw)), want: dropped(bpf.ARP)},
		{name: "ARP with another's MAC address in it", frames: one(arp(broadcast, 1, other, guestIP, anyone, gw)), want: dropped(bpf.ARP)},
		{name: "ARP from another station", frames: one(edited(arp(broadcast, 1, network.GuestMAC, guestIP, anyone, gw), 6, other...)), want: dropped(bpf.SourceMAC)},
		{name: "ARP, cut", frames: one(arp(broadcast, 1, network.GuestMAC, guestIP, anyone, gw)[:ethLen+20]), want: dropped(bpf.Malformed)},
		{name: "ARP for another hardware", frames: one(edited(arp(broadcast, 1, network.GuestMAC, guestIP, anyone, gw), ethLen, 0, 6)), want: dropped(bpf.ARP)},
		{name: "reverse ARP", frames: one(edited(arp(broadcast, 3, network.GuestMAC, guestIP, anyone, gw), 12, 0x80, 0x35)), want: dropped(bpf.EtherType)},
	}
}

// headers has other protocols (22) and IPv4 headers that lie (24, 25, 43).
func headers() []vector {
	good := func() []byte { return guestUDP(ok, 9999) }
	options := func(dst netip.Addr, o ...byte) []byte {
		f := inserted(guestUDP(dst, 9999), l4, o...)
		f[ethLen] = 0x45 + byte(len(o)/4)
		binary.BigEndian.PutUint16(f[ethLen+2:], uint16(len(f)-ethLen))
		setChecksum(f[ethLen:l4+len(o)], 10)
		return f
	}
	inner := ipv4(guestIP, bad, unix.IPPROTO_UDP, make([]byte, 8))
	first := edited(guestIPv4(ok, unix.IPPROTO_UDP, make([]byte, 24)), ethLen+6, 0x20, 0)
	tiny := edited(guestIPv4(ok, unix.IPPROTO_TCP, guestTCP(ok, 80, syn)[l4:l4+8]), ethLen+6, 0x20, 0)
	rest := edited(guestIPv4(bad, unix.IPPROTO_TCP, guestTCP(ok, 80, syn)[l4+8:]), ethLen+6, 0, 1)
	overlap := edited(guestIPv4(ok, unix.IPPROTO_UDP, make([]byte, 24)), ethLen+6, 0, 1)
	var vectors []vector
	for name, proto := range sorted(map[string]uint8{"GRE": 47, "IP in IP": 4, "IPv6 in IP": 41, "ESP": 50, "AH": 51, "SCTP": 132, "UDP-Lite": 136, "DCCP": 33, "IGMP": 2, "OSPF": 89, "VRRP": 112, "hop-by-hop": 0, "raw": 255}) {
		vectors = append(vectors, vector{name: name, frames: one(guestIPv4(ok, proto, inner)), want: dropped(bpf.Protocol)})
	}
	return append(vectors, []vector{
		{name: "loose source route", frames: one(options(ok, 131, 7, 4, 93, 184, 216, 34, 0)), want: dropped(bpf.IPOptions)},
		{name: "strict source route", frames: one(options(ok, 137, 7, 4, 93, 184, 216, 34, 0)), want: dropped(bpf.IPOptions)},
		{name: "record route", frames: one(options(ok, 7, 7, 4, 0, 0, 0, 0, 0)), want: dropped(bpf.IPOptions)},
		{name: "no-ops before a denied address's ports", frames: one(options(bad, 1, 1, 1, 1)), want: dropped(bpf.IPOptions)},
		{name: "router alert", frames: one(options(ok, 148, 4, 0, 0)), want: dropped(bpf.IPOptions)},
		{name: "header longer than the packet", frames: one(edited(good(), ethLen, 0x4f)), want: dropped(bpf.IPOptions)},
		{name: "header shorter than a header", frames: one(edited(good(), ethLen, 0x44)), want: dropped(bpf.Malformed)},
		{name: "version 6 as IPv4", frames: one(edited(good(), ethLen, 0x65)), want: dropped(bpf.Malformed)},
		{name: "version 0", frames: one(edited(good(), ethLen, 0x05)), want: dropped(bpf.Malformed)},
		{name: "header cut", frames: one(good()[:ethLen+12]), want: dropped(bpf.Malformed)},
		{name: "length beyond the frame", frames: one(edited(good(), ethLen+2, 3, 132)), want: dropped(bpf.Malformed)},
		{name: "length within the header", frames: one(edited(good(), ethLen+2, 0, 19)), want: dropped(bpf.Malformed)},
		{name: "data behind the packet", frames: one(append(good(), make([]byte, 60)...)), want: dropped(bpf.Malformed)},
		{name: "first fragment", frames: one(first), want: dropped(bpf.Fragment)},
		{name: "later fragment", frames: one(edited(guestIPv4(ok, unix.IPPROTO_UDP, make([]byte, 24)), ethLen+6, 0, 4)), want: dropped(bpf.Fragment)},
		{name: "later fragment to a denied address", frames: one(edited(guestIPv4(bad, unix.IPPROTO_UDP, make([]byte, 24)), ethLen+6, 0, 4)), want: dropped(bpf.Fragment)},
		{name: "tiny first fragment, the rest elsewhere", frames: [][]byte{tiny, rest}, want: result{counted: "2 fragment"}},
		{name: "overlapping fragments", frames: [][]byte{first, overlap}, want: result{counted: "2 fragment"}},
		{name: "both fragment flags", frames: one(edited(good(), ethLen+6, 0x60, 0)), want: dropped(bpf.Fragment)},
		{name: "TTL 1", frames: one(edited(good(), ethLen+8, 1)), want: dropped(bpf.TTL)},
		{name: "TTL 0", frames: one(edited(good(), ethLen+8, 0)), want: dropped(bpf.TTL)},
		{name: "UDP longer than the packet", frames: one(edited(good(), l4+4, 0, 200)), want: dropped(bpf.Malformed)},
		{name: "UDP shorter than a header", frames: one(edited(good(), l4+4, 0, 7)), want: dropped(bpf.Malformed)},
		{name: "UDP header cut", frames: one(guestIPv4(ok, unix.IPPROTO_UDP, []byte{0x0f, 0xa0, 0x27, 0x0f})), want: dropped(bpf.Malformed)},
		{name: "TCP header cut", frames: one(guestIPv4(ok, unix.IPPROTO_TCP, guestTCP(ok, 80, syn)[l4:l4+19])), want: dropped(bpf.Malformed)},
		{name: "TCP header longer than the packet", frames: one(edited(guestTCP(ok, 80, syn), l4+12, 15<<4)), want: dropped(bpf.Malformed)},
		{name: "ICMP header cut", frames: one(guestIPv4(ok, unix.IPPROTO_ICMP, []byte{8, 0, 0, 0})), want: dropped(bpf.Malformed)},
		{name: "IP checksum wrong", frames: one(badIPChecksum(good())), want: passed()},
		{name: "TCP without flags", frames: one(guestTCP(ok, 80, 0)), want: dropped(bpf.Malformed)},
		{name: "TCP with all flags", frames: one(guestTCP(ok, 80, 0x3f)), want: dropped(bpf.Malformed)},
		{name: "TCP SYN and FIN", frames: one(guestTCP(ok, 80, syn|fin)), want: dropped(bpf.Malformed)},
		{name: "TCP SYN and RST", frames: one(guestTCP(ok, 80, syn|rst)), want: dropped(bpf.Malformed)},
	}...)
}

func badIPChecksum(f []byte) []byte {
	f[ethLen+10] ^= 0x55
	return f
}

// spoofed are other sources than the sandbox's own (26), and datagrams to everybody (28).
func (w *world) spoofed() []vector {
	as := func(src netip.Addr) []byte { return fromGuest(udp(at(src, 4000), at(ok, 9999), "let me through")) }
	toAll := func(mac net.HardwareAddr, src, dst netip.Addr, port uint16) []byte {
		return ether(mac, network.GuestMAC, unix.ETH_P_IP, udp(at(src, port), at(dst, port), "is anybody there?"))
	}
	limited := netip.MustParseAddr("255.255.255.255")
	var vectors []vector
	for _, src := range []netip.Addr{
		w.a.at.Address, w.b.at.Address, w.cfg.Network.Gateway(), network.GuestGateway, uplink, router, ok, netip.MustParseAddr("127.0.0.1"),
		netip.IPv4Unspecified(), netip.MustParseAddr("224.0.0.1"), limited,
	} {
		vectors = append(vectors, vector{name: "source address of " + w.name(src), frames: one(as(src)), want: dropped(bpf.SourceIP)})
	}
	vectors = append(vectors,
		vector{name: "source MAC address of another", frames: one(edited(guestUDP(ok, 9999), 6, 2, 0xaa, 0, 0, 0, 1)), want: dropped(bpf.SourceMAC)},
		vector{name: "source MAC address of the gateway", frames: one(edited(guestUDP(ok, 9999), 6, gateway.MAC...)), want: dropped(bpf.SourceMAC)},
		vector{name: "source MAC address of all", frames: one(edited(guestUDP(ok, 9999), 6, broadcast...)), want: dropped(bpf.SourceMAC)},
		vector{name: "DHCP", frames: one(toAll(broadcast, netip.IPv4Unspecified(), limited, 67)), want: dropped(bpf.TargetMAC)},
	)
	for name, group := range sorted(map[string]netip.AddrPort{
		"mDNS": netip.MustParseAddrPort("224.0.0.251:5353"), "LLMNR": netip.MustParseAddrPort("224.0.0.252:5355"),
		"SSDP": netip.MustParseAddrPort("239.255.255.250:1900"), "limited broadcast": netip.AddrPortFrom(limited, 9999),
	}) {
		low := group.Addr().As4()
		vectors = append(vectors,
			vector{name: name, frames: one(toAll(net.HardwareAddr{1, 0, 0x5e, low[1] & 0x7f, low[2], low[3]}, guestIP, group.Addr(), group.Port())), want: dropped(bpf.TargetMAC)},
			vector{name: name + " by the gateway", frames: one(toAll(gateway.MAC, guestIP, group.Addr(), group.Port())), want: dropped(bpf.HardDeny)},
		)
	}
	return vectors
}

// services are addresses that no policy opens (29, 30, 31), by each protocol.
func (w *world) services() (vectors []vector) {
	pool := w.cfg.Network.Pool
	for name, dst := range sorted(map[string]netip.Addr{
		"metadata service": netip.MustParseAddr("169.254.169.254"), "metadata service of Alibaba's": netip.MustParseAddr("100.100.100.200"),
		"metadata service of Azure's": netip.MustParseAddr("168.63.129.16"), "metadata service of Oracle's": netip.MustParseAddr("192.0.0.192"),
		"gateway as guests know it": network.GuestGateway, "gateway as the host knows it": w.cfg.Network.Gateway(),
		"host by its uplink": uplink, "host by its public address": public, "host by its bridge": bridge,
		"loopback": netip.MustParseAddr("127.0.0.1"), "loopback elsewhere": netip.MustParseAddr("127.8.8.8"), "no address": netip.IPv4Unspecified(),
		"router": router, "station beside the host": next, "station of the private network": netip.MustParseAddr("198.51.100.9"),
		"directed broadcast": netip.MustParseAddr("198.51.100.255"), "directed broadcast of the public network": netip.MustParseAddr("45.33.32.255"),
		"container": box, "containers' broadcast": netip.MustParseAddr("172.17.255.255"), "private address": netip.MustParseAddr("192.168.1.1"),
		"other sandbox": w.b.at.Address, "itself, as the host knows it": w.a.at.Address, "pool's broadcast": lastOf(pool), "pool's first": pool.Addr(),
		"guest's own network": netip.MustParseAddr("169.254.68.7"), "itself": guestIP,
	}) {
		vectors = append(vectors,
			vector{name: name + " by UDP", frames: one(guestUDP(dst, 9999)), want: dropped(bpf.HardDeny)},
			vector{name: name + " by TCP", frames: one(guestTCP(dst, 22, syn)), want: dropped(bpf.HardDeny)},
			vector{name: name + " by echo", frames: one(guestEcho(dst, 8)), want: dropped(bpf.HardDeny)},
		)
	}
	return vectors
}

func lastOf(p netip.Prefix) netip.Addr {
	a := p.Addr().As4()
	binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(a[:])|(1<<(32-p.Bits())-1))
	return netip.AddrFrom4(a)
}

// names are all at port 53, which is the host's forwarder whoever is asked: here one by UDP that says nothing.
func (w *world) names() (vectors []vector) {
	for name, dst := range sorted(map[string]netip.Addr{
		"a public server": bad, "an allowed address": ok, "the guest's gateway": network.GuestGateway, "the metadata service": netip.MustParseAddr("169.254.169.254"),
		"the host": uplink, "the other sandbox": w.b.at.Address, "the container": box, "the station beside the host": next,
	}) {
		byUDP := vector{name: "names of " + name + " by UDP", frames: one(guestUDP(dst, 53)), want: passed("host: udp a > gateway:10053"), bare: nowhere, why: "a routing rule drops it"}
		byTCP := vector{
			name: "names of " + name + " by TCP", frames: one(guestTCP(dst, 53, syn)),
			want: passed("host: tcp syn a > gateway:10053", "a: tcp rstack "+w.name(dst)+":53 > guest"), bare: nowhere, why: byUDP.why,
		}
		if dst == uplink {
			byUDP.bare, byTCP.bare = []string{"host: udp a > uplink:53"}, []string{"host: tcp syn a > uplink:53", "a: tcp rstack uplink:53 > guest"}
			byUDP.why, byTCP.why = hostsOwn, hostsOwn
		}
		vectors = append(vectors, byUDP, byTCP)
	}
	return vectors
}

// states are packets that no connection has now (33, 34, 44), and ICMP that isn't asked for (20, 21).
func states() []vector {
	answer := func(dst string) result {
		return result{bpf.Reset.String(), []string{"a: tcp rst " + dst + " > guest"}}
	}
	badSum := guestUDP(ok, 9999)
	badSum[l4+6] ^= 0x55
	noSum := edited(guestUDP(ok, 9999), l4+6, 0, 0)
	quoted := func(src, dst netip.AddrPort) []byte { return udp(src, dst, "12345678") }
	error3 := func(dst netip.Addr, quote []byte) []byte { return fromGuest(icmp(guestIP, dst, 3, 3, 0, quote)) }
	return []vector{
		{name: "UDP with a wrong checksum", frames: one(badSum), want: passed(), bare: []string{"wire: udp a > ok:9999"}, why: "only conntrack makes the sum"},
		{name: "UDP without a checksum", frames: one(noSum), want: passed("wire: udp uplink > ok:9999")},
		{name: "ACK of no connection", frames: one(fromGuest(tcp(at(guestIP, 4001), at(ok, 80), ack, 1, 1, ""))), want: answer("ok:80")},
		{name: "ACK of no connection, denied", frames: one(guestTCP(bad, 9999, ack)), want: answer("bad:9999")},
		{name: "data of no connection, denied", frames: one(fromGuest(tcp(at(guestIP, 4001), at(bad, 80), ack, 1, 1, "let me through"))), want: answer("bad:80")},
		{name: "SYN and ACK of no connection", frames: one(fromGuest(tcp(at(guestIP, 4001), at(ok, 80), syn|ack, 1, 1, ""))), want: answer("ok:80")},
		{name: "SYN and ACK from an exposed port, denied", frames: one(fromGuest(tcp(at(guestIP, 8080), at(bad, 9999), syn|ack, 1, 1, ""))), want: answer("bad:9999")},
		{name: "SYN and ACK to the host", frames: one(guestTCP(uplink, 22, syn|ack)), want: answer("uplink:22")},
		{name: "RST of no connection", frames: one(guestTCP(bad, 80, rst)), want: dropped(bpf.NoFlow)},
		{name: "FIN of no connection", frames: one(guestTCP(bad, 80, fin|ack)), want: answer("bad:80")},
		{name: "redirect", frames: one(fromGuest(icmp(guestIP, ok, 5, 1, 0, quoted(at(ok, 9999), at(guestIP, 4000))))), want: dropped(bpf.ICMPType)},
		{name: "timestamp", frames: one(fromGuest(icmp(guestIP, ok, 13, 0, 0, make([]byte, 12)))), want: dropped(bpf.ICMPType)},
		{name: "address mask", frames: one(fromGuest(icmp(guestIP, ok, 17, 0, 0, make([]byte, 4)))), want: dropped(bpf.ICMPType)},
		{name: "router advertisement", frames: one(fromGuest(icmp(guestIP, ok, 9, 0, 0, make([]byte, 8)))), want: dropped(bpf.ICMPType)},
		{name: "source quench", frames: one(fromGuest(icmp(guestIP, ok, 4, 0, 0, quoted(at(ok, 9999), at(guestIP, 4000))))), want: dropped(bpf.ICMPType)},
		{name: "echo with a code", frames: one(fromGuest(icmp(guestIP, ok, 8, 1, 1, nil))), want: dropped(bpf.ICMPType)},
		{name: "echo reply of no echo", frames: one(fromGuest(icmp(guestIP, ok, 0, 0, 77<<16, []byte("let me through")))), want: dropped(bpf.NoFlow)},
		{name: "unreachable about no flow", frames: one(error3(bad, quoted(at(bad, 9999), at(guestIP, 4002)))), want: dropped(bpf.NoFlow)},
		{name: "unreachable to another than it is about", frames: one(error3(bad, quoted(at(ok, 9999), at(guestIP, 4000)))), want: dropped(bpf.NoFlow)},
		{name: "unreachable about another's packet", frames: one(error3(ok, quoted(at(ok, 9999), at(uplink, 4000)))), want: dropped(bpf.NoFlow)},
		{name: "unreachable about nothing", frames: one(error3(ok, nil)), want: dropped(bpf.Malformed)},
		{name: "unreachable about a fragment", frames: one(error3(ok, edited(fromGuest(quoted(at(ok, 9999), at(guestIP, 4000))), ethLen+6, 0, 1)[ethLen:])), want: dropped(bpf.Malformed)},
		{name: "time exceeded", frames: one(fromGuest(icmp(guestIP, ok, 11, 0, 0, quoted(at(ok, 9999), at(guestIP, 4000))))), want: dropped(bpf.ICMPType)},
	}
}
