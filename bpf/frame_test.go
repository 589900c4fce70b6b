package bpf

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// Where things are in a frame without IP options.
const (
	ethLen = 14
	l4     = ethLen + 20
	inner  = l4 + 8
)

// TCP flags.
const (
	fin = 1
	syn = 2
	ack = 16
)

// frame is an Ethernet frame with an IPv4 packet that is right in all that edit doesn't change.
type frame struct {
	from, to net.HardwareAddr
	src, dst netip.Addr
	proto    uint8
	ttl      uint8
	l4       []byte
	// edit changes the finished frame; the IP header's checksum is set after it.
	edit func([]byte) []byte
}

func (f frame) bytes() []byte {
	ttl := f.ttl
	if ttl == 0 {
		ttl = 64
	}
	b := append(append(append([]byte{}, f.to...), f.from...), 0x08, 0x00)
	b = append(b, packet(f.src, f.dst, f.proto, ttl, f.l4)...)
	if f.edit != nil {
		b = f.edit(b)
		if len(b) >= l4 {
			setChecksum(b[ethLen:l4], 10)
		}
	}
	return b
}

func packet(src, dst netip.Addr, proto, ttl uint8, payload []byte) []byte {
	ip := make([]byte, 20, 20+len(payload))
	ip[0], ip[8], ip[9] = 0x45, ttl, proto
	binary.BigEndian.PutUint16(ip[2:], uint16(20+len(payload)))
	binary.BigEndian.PutUint16(ip[4:], 0x1234)
	copy(ip[12:], src.AsSlice())
	copy(ip[16:], dst.AsSlice())
	setChecksum(ip, 10)
	return append(ip, payload...)
}

// tcp, udp and icmp have checksums for the addresses.
func tcp(src, dst netip.AddrPort, flags uint8, payload string) []byte {
	b := make([]byte, 20, 20+len(payload))
	binary.BigEndian.PutUint16(b, src.Port())
	binary.BigEndian.PutUint16(b[2:], dst.Port())
	binary.BigEndian.PutUint32(b[4:], 1000)
	binary.BigEndian.PutUint32(b[8:], 2000)
	b[12], b[13] = 5<<4, flags
	b = append(b, payload...)
	binary.BigEndian.PutUint16(b[16:], l4Checksum(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, b))
	return b
}

func udp(src, dst netip.AddrPort, payload string) []byte {
	b := make([]byte, 8, 8+len(payload))
	binary.BigEndian.PutUint16(b, src.Port())
	binary.BigEndian.PutUint16(b[2:], dst.Port())
	binary.BigEndian.PutUint16(b[4:], uint16(8+len(payload)))
	b = append(b, payload...)
	binary.BigEndian.PutUint16(b[6:], l4Checksum(src.Addr(), dst.Addr(), unix.IPPROTO_UDP, b))
	return b
}

func icmp(kind, code uint8, rest uint32, payload []byte) []byte {
	b := make([]byte, 8, 8+len(payload))
	b[0], b[1] = kind, code
	binary.BigEndian.PutUint32(b[4:], rest)
	b = append(b, payload...)
	setChecksum(b, 2)
	return b
}

func sum(b []byte, at uint32) uint32 {
	for ; len(b) > 1; b = b[2:] {
		at += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		at += uint32(b[0]) << 8
	}
	for at>>16 != 0 {
		at = at&0xffff + at>>16
	}
	return at
}

func setChecksum(b []byte, offset int) {
	binary.BigEndian.PutUint16(b[offset:], 0)
	binary.BigEndian.PutUint16(b[offset:], ^uint16(sum(b, 0)))
}

func pseudo(src, dst netip.Addr, proto uint8, length int) uint32 {
	return sum(dst.AsSlice(), sum(src.AsSlice(), uint32(proto)+uint32(length)))
}

func l4Checksum(src, dst netip.Addr, proto uint8, b []byte) uint16 {
	return ^uint16(sum(b, pseudo(src, dst, proto, len(b))))
}

// parsed is a frame that was let through, with its checksums right.
type parsed struct {
	from, to net.HardwareAddr
	src, dst netip.Addr
	proto    uint8
	l4       []byte
}

func parse(t *testing.T, b []byte) parsed {
	t.Helper()
	if len(b) < l4 || b[12] != 8 || b[13] != 0 {
		t.Fatalf("no IPv4 frame: %x", b)
	}
	ip := b[ethLen:]
	p := parsed{
		to: b[:6], from: b[6:12], proto: ip[9],
		src: netip.AddrFrom4([4]byte(ip[12:16])), dst: netip.AddrFrom4([4]byte(ip[16:20])),
		l4: ip[20:binary.BigEndian.Uint16(ip[2:])],
	}
	if sum(ip[:20], 0) != 0xffff {
		t.Errorf("wrong IP checksum: %x", ip[:20])
	}
	if ip[6]&0x3f != 0 || ip[7] != 0 {
		return p // a fragment has no transport checksum of its own
	}
	switch p.proto {
	case unix.IPPROTO_ICMP:
		if sum(p.l4, 0) != 0xffff {
			t.Errorf("wrong ICMP checksum: %x", p.l4)
		}
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP:
		if sum(p.l4, pseudo(p.src, p.dst, p.proto, len(p.l4))) != 0xffff {
			t.Errorf("wrong checksum of protocol %d: %x", p.proto, p.l4)
		}
	}
	return p
}
