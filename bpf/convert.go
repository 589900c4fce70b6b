package bpf

import (
	"encoding/binary"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// ip4 returns an IPv4 address as the programs have it: its bytes in network order, wherever they run.
func ip4(a netip.Addr) uint32 {
	b := a.As4()
	return binary.NativeEndian.Uint32(b[:])
}

func addrOf(ip uint32) netip.Addr {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], ip)
	return netip.AddrFrom4(b)
}

// port turns a port from network order.
func port(p uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], p)
	return binary.BigEndian.Uint16(b[:])
}

// monotonic is the programs' clock.
func monotonic() time.Duration {
	var ts unix.Timespec
	// It can't fail: the clock exists and the pointer is good.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}
