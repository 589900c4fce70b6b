package bypass

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
)

// Where things are in a frame without IP options.
const (
	ethLen = 14
	l4     = ethLen + 20
)

const (
	fin = 1
	syn = 2
	rst = 4
	ack = 16
)

var broadcast = net.HardwareAddr{255, 255, 255, 255, 255, 255}

func ether(to, from net.HardwareAddr, kind uint16, payload []byte) []byte {
	b := append(append([]byte{}, to...), from...)
	return append(binary.BigEndian.AppendUint16(b, kind), payload...)
}

// fromGuest is a frame as a guest with the right addresses sends it.
func fromGuest(packet []byte) []byte {
	return ether(gateway.MAC, network.GuestMAC, unix.ETH_P_IP, packet)
}

func ipv4(src, dst netip.Addr, proto uint8, payload []byte) []byte {
	b := make([]byte, 20, 20+len(payload))
	b[0], b[8], b[9] = 0x45, 64, proto
	binary.BigEndian.PutUint16(b[2:], uint16(20+len(payload)))
	binary.BigEndian.PutUint16(b[4:], 0x1234)
	copy(b[12:], src.AsSlice())
	copy(b[16:], dst.AsSlice())
	setChecksum(b, 10)
	return append(b, payload...)
}

// The transport headers have checksums for the addresses.

func udp(src, dst netip.AddrPort, payload string) []byte {
	b := ports(src, dst, 8)
	binary.BigEndian.PutUint16(b[4:], uint16(8+len(payload)))
	b = append(b, payload...)
	binary.BigEndian.PutUint16(b[6:], ^checksum(b, pseudo(src.Addr(), dst.Addr(), unix.IPPROTO_UDP, len(b))))
	return ipv4(src.Addr(), dst.Addr(), unix.IPPROTO_UDP, b)
}

func tcp(src, dst netip.AddrPort, flags uint8, seq, acked uint32, payload string) []byte {
	b := ports(src, dst, 20)
	binary.BigEndian.PutUint32(b[4:], seq)
	binary.BigEndian.PutUint32(b[8:], acked)
	b[12], b[13] = 5<<4, flags
	binary.BigEndian.PutUint16(b[14:], 65535)
	b = append(b, payload...)
	binary.BigEndian.PutUint16(b[16:], ^checksum(b, pseudo(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, len(b))))
	return ipv4(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, b)
}

func icmp(src, dst netip.Addr, kind, code uint8, rest uint32, payload []byte) []byte {
	b := []byte{kind, code, 0, 0, 0, 0, 0, 0}
	binary.BigEndian.PutUint32(b[4:], rest)
	b = append(b, payload...)
	setChecksum(b, 2)
	return ipv4(src, dst, unix.IPPROTO_ICMP, b)
}

func ports(src, dst netip.AddrPort, length int) []byte {
	b := make([]byte, length)
	binary.BigEndian.PutUint16(b, src.Port())
	binary.BigEndian.PutUint16(b[2:], dst.Port())
	return b
}

func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

// What the guest of a sandbox sends, from its port 4000.

var guestIP = network.GuestPrefix.Addr()

func guestUDP(dst netip.Addr, port uint16) []byte {
	return fromGuest(udp(at(guestIP, 4000), at(dst, port), "let me through"))
}

func guestTCP(dst netip.Addr, port uint16, flags uint8) []byte {
	return fromGuest(tcp(at(guestIP, 4000), at(dst, port), flags, 1000, 2000, ""))
}

func guestEcho(dst netip.Addr, payload int) []byte {
	return fromGuest(icmp(guestIP, dst, 8, 0, 4000<<16|1, make([]byte, payload)))
}

func guestIPv4(dst netip.Addr, proto uint8, payload []byte) []byte {
	return fromGuest(ipv4(guestIP, dst, proto, payload))
}

// arp is from the guest.
func arp(to net.HardwareAddr, operation uint16, senderMAC net.HardwareAddr, sender netip.Addr, targetMAC net.HardwareAddr, target netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4}
	b = binary.BigEndian.AppendUint16(b, operation)
	b = append(append(b, senderMAC...), sender.AsSlice()...)
	b = append(append(b, targetMAC...), target.AsSlice()...)
	return ether(to, network.GuestMAC, unix.ETH_P_ARP, b)
}

// edited changes bytes of a frame; the IP header's checksum is set after it.
func edited(f []byte, offset int, bytes ...byte) []byte {
	copy(f[offset:], bytes)
	if len(f) >= l4 && f[12] == 8 && f[13] == 0 {
		setChecksum(f[ethLen:l4], 10)
	}
	return f
}

// inserted puts bytes into a frame.
func inserted(f []byte, offset int, bytes ...byte) []byte {
	return append(append(append([]byte{}, f[:offset]...), bytes...), f[offset:]...)
}

// vnet is the header of include/uapi/linux/virtio_net.h that is before each frame at a tap's descriptor.
type vnet struct {
	flags, gso                                   uint8
	headerLength, gsoSize, csumStart, csumOffset uint16
}

const (
	needsCsum = 1 // flags
	gsoTCP4   = 1
	gsoUDP    = 3
	gsoTCP6   = 4
	gsoUDPL4  = 5
	gsoECN    = 0x80
)

const vnetLen = 10

func (v vnet) bytes() []byte {
	b := []byte{v.flags, v.gso}
	for _, f := range []uint16{v.headerLength, v.gsoSize, v.csumStart, v.csumOffset} {
		b = binary.NativeEndian.AppendUint16(b, f)
	}
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

func checksum(b []byte, at uint32) uint16 { return uint16(sum(b, at)) }

func setChecksum(b []byte, offset int) {
	binary.BigEndian.PutUint16(b[offset:], 0)
	binary.BigEndian.PutUint16(b[offset:], ^checksum(b, 0))
}

func pseudo(src, dst netip.Addr, proto uint8, length int) uint32 {
	return sum(dst.AsSlice(), sum(src.AsSlice(), uint32(proto)+uint32(length)))
}
