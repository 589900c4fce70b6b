package gateway

import (
	"encoding/binary"
	"net"

	"golang.org/x/sys/unix"
)

func header(source, target net.IP, protocol byte, length int) []byte {
	b := make([]byte, 20)
	b[0], b[8], b[9] = 0x45, 64, protocol
	binary.BigEndian.PutUint16(b[2:], uint16(20+length))
	copy(b[ipSource:], source.To4())
	copy(b[ipTarget:], target.To4())
	return b // the kernel sums it
}

// datagram is UDP to a port; a checksum of 0 is none.
func datagram(source, target net.IP, port, sum uint16) []byte {
	b := binary.BigEndian.AppendUint16(header(source, target, unix.IPPROTO_UDP, 8), 4000)
	b = binary.BigEndian.AppendUint16(b, port)
	b = binary.BigEndian.AppendUint16(b, 8)
	return binary.BigEndian.AppendUint16(b, sum)
}

// segment is TCP from and to some port.
func segment(source, target net.IP, flags byte) []byte {
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp, 4000)
	binary.BigEndian.PutUint16(tcp[2:], 80)
	tcp[12], tcp[13] = 5<<4, flags
	sum := uint32(unix.IPPROTO_TCP) + uint32(len(tcp))
	for _, part := range [][]byte{source.To4(), target.To4(), tcp} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
	return append(header(source, target, unix.IPPROTO_TCP, len(tcp)), tcp...)
}
