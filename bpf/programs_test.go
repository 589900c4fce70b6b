package bpf

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf/policy"
)

func noop() asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}
}

func at(ip netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(ip, port) }

// fromGuest is a frame as the guest sends it.
func fromGuest(dst netip.Addr, proto uint8, l4 []byte) frame {
	return frame{from: guestMAC, to: gatewayMAC, src: guestIP, dst: dst, proto: proto, l4: l4}
}

func tcpFromGuest(dst netip.Addr, sport, dport uint16, flags uint8) frame {
	return fromGuest(dst, unix.IPPROTO_TCP, tcp(at(guestIP, sport), at(dst, dport), flags, ""))
}

func udpFromGuest(dst netip.Addr, sport, dport uint16, payload string) frame {
	return fromGuest(dst, unix.IPPROTO_UDP, udp(at(guestIP, sport), at(dst, dport), payload))
}

// toHost is a packet for the sandbox as the host's stack sends it to the gateway device.
func toHost(src netip.Addr, proto uint8, l4 []byte) frame {
	return frame{from: gatewayMAC, to: net.HardwareAddr{0, 0, 0, 0, 0, 0}, src: src, dst: hostIP, proto: proto, l4: l4}
}

func put(offset int, b ...byte) func([]byte) []byte {
	return func(f []byte) []byte { copy(f[offset:], b); return f }
}

// TestFromGuest: what is dropped at the tap, and why.
func TestFromGuest(t *testing.T) {
	n := newNetwork(t)
	_, tap := n.tap("tap0")
	id, err := n.add(unlimited(tap), n.rows(allow("1.0.0.0/8", ""), allow("10.0.0.0/8", "")))
	n.must(err)

	good := udpFromGuest(remote, 1000, 2000, "0123456789012345678901234567890123456789")
	edited := func(f frame, edit func([]byte) []byte) []byte { f.edit = edit; return f.bytes() }
	other := netip.MustParseAddr("169.254.68.7")
	syn := tcpFromGuest(remote, 1000, 443, syn)
	quoted := func(src, dst netip.Addr) []byte {
		return packet(src, dst, unix.IPPROTO_UDP, 60, udp(at(src, 7), at(dst, 8), ""))
	}
	for _, tc := range []struct {
		name   string
		frame  []byte
		reason Reason
	}{
		{"VLAN", edited(good, func(b []byte) []byte {
			return append(append(append([]byte{}, b[:12]...), 0x81, 0, 0, 5), b[12:]...)
		}), VLAN},
		{"QinQ", edited(good, put(12, 0x88, 0xa8)), VLAN},
		{"IPv6", edited(good, put(12, 0x86, 0xdd)), IPv6},
		{"MPLS", edited(good, put(12, 0x88, 0x47)), EtherType},
		{"PPPoE", edited(good, put(12, 0x88, 0x64)), EtherType},
		{"LLC", edited(good, put(12, 0, 46)), EtherType},
		{"source MAC", frame{from: net.HardwareAddr{2, 0, 0, 0, 0, 3}, to: gatewayMAC, src: guestIP, dst: remote, proto: good.proto, l4: good.l4}.bytes(), SourceMAC},
		{"broadcast", frame{from: guestMAC, to: net.HardwareAddr{255, 255, 255, 255, 255, 255}, src: guestIP, dst: remote, proto: good.proto, l4: good.l4}.bytes(), TargetMAC},
		{"source address", frame{from: guestMAC, to: gatewayMAC, src: other, dst: remote, proto: good.proto, l4: good.l4}.bytes(), SourceIP},
		{"host address as source", frame{from: guestMAC, to: gatewayMAC, src: hostIP, dst: remote, proto: good.proto, l4: good.l4}.bytes(), SourceIP},
		{"IP version", edited(good, put(ethLen, 0x65)), Malformed},
		{"header length too short", edited(good, put(ethLen, 0x44)), Malformed},
		{"IP options", edited(good, put(ethLen, 0x46)), IPOptions},
		{"total length too long", edited(good, put(ethLen+2, 0x05, 0)), Malformed},
		{"total length too short", edited(good, put(ethLen+2, 0, 19)), Malformed},
		{"more than the packet", edited(good, put(ethLen+2, 0, 40)), Malformed},
		{"first fragment", edited(good, put(ethLen+6, 0x20, 0)), Fragment},
		{"later fragment", edited(good, put(ethLen+6, 0, 1)), Fragment},
		{"TTL 1", edited(good, put(ethLen+8, 1)), TTL},
		{"TTL 0", edited(good, put(ethLen+8, 0)), TTL},
		{"GRE", fromGuest(remote, unix.IPPROTO_GRE, make([]byte, 40)).bytes(), Protocol},
		{"IPIP", fromGuest(remote, unix.IPPROTO_IPIP, make([]byte, 40)).bytes(), Protocol},
		{"IPv6 in IPv4", fromGuest(remote, unix.IPPROTO_IPV6, make([]byte, 40)).bytes(), Protocol},
		{"SCTP", fromGuest(remote, unix.IPPROTO_SCTP, make([]byte, 40)).bytes(), Protocol},
		{"UDP length too short", edited(good, put(l4+4, 0, 7)), Malformed},
		{"UDP length too long", edited(good, put(l4+4, 0, 200)), Malformed},
		{"UDP header cut", fromGuest(remote, unix.IPPROTO_UDP, make([]byte, 7)).bytes(), Malformed},
		{"TCP header cut", fromGuest(remote, unix.IPPROTO_TCP, make([]byte, 19)).bytes(), Malformed},
		{"TCP data offset too small", edited(syn, put(l4+12, 4<<4)), Malformed},
		{"TCP data offset too large", edited(syn, put(l4+12, 15<<4)), Malformed},
		{"TCP without flags", tcpFromGuest(remote, 1000, 443, 0).bytes(), Malformed},
		{"TCP SYN and FIN", tcpFromGuest(remote, 1000, 443, 3).bytes(), Malformed},
		{"TCP SYN and RST", tcpFromGuest(remote, 1000, 443, 6).bytes(), Malformed},
		{"TCP RST of no flow", tcpFromGuest(remote, 1000, 443, 4).bytes(), NoFlow},
		{"ICMP cut", fromGuest(remote, unix.IPPROTO_ICMP, make([]byte, 4)).bytes(), Malformed},
		{"echo reply of no flow", fromGuest(remote, unix.IPPROTO_ICMP, icmp(0, 0, 1, nil)).bytes(), NoFlow},
		{"redirect", fromGuest(remote, unix.IPPROTO_ICMP, icmp(5, 1, 0, quoted(remote, guestIP))).bytes(), ICMPType},
		{"timestamp", fromGuest(remote, unix.IPPROTO_ICMP, icmp(13, 0, 0, make([]byte, 12))).bytes(), ICMPType},
		{"time exceeded", fromGuest(remote, unix.IPPROTO_ICMP, icmp(11, 0, 0, quoted(remote, guestIP))).bytes(), ICMPType},
		{"unreachable about no flow", fromGuest(remote, unix.IPPROTO_ICMP, icmp(3, 3, 0, quoted(remote, guestIP))).bytes(), NoFlow},
		{"unreachable about another's packet", fromGuest(remote, unix.IPPROTO_ICMP, icmp(3, 3, 0, quoted(remote, other))).bytes(), NoFlow},
		{"unreachable about nothing", fromGuest(remote, unix.IPPROTO_ICMP, icmp(3, 3, 0, nil)).bytes(), Malformed},
		{"echo with too much in it", fromGuest(remote, unix.IPPROTO_ICMP, icmp(8, 0, 1, make([]byte, 65))).bytes(), EchoSize},
		{"denied by default", udpFromGuest(netip.MustParseAddr("2.2.2.2"), 1, 2, "").bytes(), Policy},
		{"hard-denied", udpFromGuest(netip.MustParseAddr("10.0.0.1"), 1, 2, "").bytes(), HardDeny},
		{"multicast", udpFromGuest(netip.MustParseAddr("224.0.0.251"), 5353, 5353, "").bytes(), HardDeny},
	} {
		n.run(tc.name, func(t *testing.T) {
			n.expect(n.feed(n.objs.TapIn, id, tap, 0, 0, tc.frame), tcShot, tc.reason)
		})
	}
	n.run("no sandbox", func(t *testing.T) {
		_, other := n.tap("tap1")
		n.expect(n.feed(n.objs.TapIn, 0, other, 0, 0, good.bytes()), tcShot, NoSandbox)
	})
	if flows, err := n.Flows(id); err != nil || len(flows) != 0 {
		t.Errorf("what was dropped opened flows: %v, %v", flows, err)
	}
}

// TestPasses: what passes has the host's address and the mark that it was decided on, and what comes back the guest's.
func TestPasses(t *testing.T) {
	n := newNetwork(t)
	_, tap := n.tap("tap0")
	s := unlimited(tap)
	s.Resolver = true
	id, err := n.add(s, n.rows(allow("1.0.0.0/8", ""), policy.Rule{Action: policy.Proxy, To: "3.0.0.0/8", Ports: []string{"443"}, Protocol: "tcp"}))
	n.must(err)
	proxied := netip.MustParseAddr("3.3.3.3")
	for _, tc := range []struct {
		name  string
		frame frame
		back  []byte
		mark  uint32
	}{
		{"TCP", tcpFromGuest(remote, 1000, 80, syn), tcp(at(remote, 80), at(hostIP, 1000), syn|ack, ""), marks.Direct},
		{"UDP", udpFromGuest(remote, 1000, 80, "odd"), udp(at(remote, 80), at(hostIP, 1000), "reply"), marks.Direct},
		{"echo", fromGuest(remote, unix.IPPROTO_ICMP, icmp(8, 0, 0xabcd0001, []byte("ping"))), icmp(0, 0, 0xabcd0001, []byte("ping")), marks.Direct},
		{"proxied", tcpFromGuest(proxied, 1000, 443, syn), tcp(at(proxied, 443), at(hostIP, 1000), syn|ack, ""), marks.Proxy},
		{"name lookup", udpFromGuest(netip.MustParseAddr("9.9.9.9"), 1000, 53, "?"), udp(at(netip.MustParseAddr("9.9.9.9"), 53), at(hostIP, 1000), "!"), marks.Resolver},
		{"name lookup at the gateway", udpFromGuest(gatewayIP, 1000, 53, "?"), udp(at(gatewayIP, 53), at(hostIP, 1000), "!"), marks.Resolver},
	} {
		n.run(tc.name, func(t *testing.T) {
			// Bits of the mark that aren't the datapath's stay as they are.
			r := n.feed(n.objs.TapIn, id, tap, 0, 0xf00000ff, tc.frame.bytes())
			n.expect(r, tcRedirect, TX)
			if want := 0xf00000ff | tc.mark; r.mark != want {
				t.Errorf("mark %#x, not %#x", r.mark, want)
			}
			p := parse(t, r.frame)
			if p.src != hostIP || p.dst != tc.frame.dst {
				t.Errorf("%v to %v", p.src, p.dst)
			}
			r = n.feed(n.objs.GwOut, id, n.gateway.Attrs().Index, 7, 0, toHost(tc.frame.dst, tc.frame.proto, tc.back).bytes())
			n.expect(r, tcRedirect, RX)
			if r.mark&marks.Mask != marks.Guest {
				t.Errorf("mark %#x to the guest", r.mark)
			}
			p = parse(t, r.frame)
			if p.dst != guestIP || p.src != tc.frame.dst || !bytes.Equal(p.to, guestMAC) || !bytes.Equal(p.from, gatewayMAC) {
				t.Errorf("to the guest: %+v", p)
			}
		})
	}
}

func TestARP(t *testing.T) {
	n := newNetwork(t)
	_, tap := n.tap("tap0")
	id, err := n.add(unlimited(tap), nil)
	n.must(err)
	request := func(op uint8, senderMAC net.HardwareAddr, sender, target netip.Addr) []byte {
		b := append(append(bytes.Repeat([]byte{0xff}, 6), guestMAC...), 8, 6, 0, 1, 8, 0, 6, 4, 0, op)
		b = append(append(b, senderMAC...), sender.AsSlice()...)
		return append(append(b, make([]byte, 6)...), target.AsSlice()...)
	}
	for _, tc := range []struct {
		name  string
		frame []byte
	}{
		{"for another address", request(1, guestMAC, guestIP, remote)},
		{"for its own address", request(1, guestMAC, guestIP, guestIP)},
		{"from another address", request(1, guestMAC, remote, gatewayIP)},
		{"from another MAC", request(1, gatewayMAC, guestIP, gatewayIP)},
		{"a reply", request(2, guestMAC, guestIP, gatewayIP)},
	} {
		n.run(tc.name, func(t *testing.T) {
			n.expect(n.feed(n.objs.TapIn, id, tap, 0, 0, tc.frame), tcShot, ARP)
		})
	}
	n.run("for the gateway", func(t *testing.T) {
		r := n.feed(n.objs.TapIn, id, tap, 0, 0, request(1, guestMAC, guestIP, gatewayIP))
		n.expect(r, tcRedirect, ARPReply)
		want := append(append(append([]byte{}, guestMAC...), gatewayMAC...), 8, 6, 0, 1, 8, 0, 6, 4, 0, 2)
		want = append(append(want, gatewayMAC...), gatewayIP.AsSlice()...)
		want = append(append(want, guestMAC...), guestIP.AsSlice()...)
		if !bytes.Equal(r.frame, want) {
			t.Errorf("reply %x, not %x", r.frame, want)
		}
		if r.mark != marks.Guest {
			t.Errorf("mark %#x", r.mark)
		}
	})
}

// TestReset: a segment of no flow gets a reset that its sender takes for its peer's.
func TestReset(t *testing.T) {
	n := newNetwork(t)
	_, tap := n.tap("tap0")
	id, err := n.add(unlimited(tap), nil)
	n.must(err)
	for _, tc := range []struct {
		name     string
		flags    uint8
		payload  string
		seq, ack uint32
		out      uint8
	}{
		{"acknowledgement", ack, "", 2000, 0, 4},
		{"data", ack | 8, "some data that goes", 2000, 0, 4},
		{"SYN-ACK", syn | ack, "", 2000, 0, 4},
		{"FIN", fin | ack, "", 2000, 0, 4},
	} {
		n.run(tc.name, func(t *testing.T) {
			f := fromGuest(remote, unix.IPPROTO_TCP, tcp(at(guestIP, 1000), at(remote, 443), tc.flags, tc.payload))
			r := n.feed(n.objs.TapIn, id, tap, 0, 0, f.bytes())
			n.expect(r, tcRedirect, Reset)
			p := parse(t, r.frame)
			if p.src != remote || p.dst != guestIP || len(p.l4) != 20 || !bytes.Equal(p.to, guestMAC) || !bytes.Equal(p.from, gatewayMAC) {
				t.Fatalf("reset %+v", p)
			}
			if binary.BigEndian.Uint16(p.l4) != 443 || binary.BigEndian.Uint16(p.l4[2:]) != 1000 {
				t.Errorf("ports of %x", p.l4)
			}
			if got := binary.BigEndian.Uint32(p.l4[4:]); got != tc.seq || p.l4[13] != tc.out {
				t.Errorf("sequence %d, flags %#x", got, p.l4[13])
			}
		})
	}
}
