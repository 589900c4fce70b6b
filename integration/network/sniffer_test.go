package network

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/testhost"
)

// seen is what a sniffer has seen of one direction.
type seen struct {
	frames, partial int            // partial: with a checksum that is still to be made
	longest         int            // frame
	segment         int            // the largest size of the segments that a frame is to be cut into
	others          int            // that are not IPv4
	hops            map[string]int // to which MAC addresses
	sources         map[netip.Addr]int
}

func (s seen) String() string {
	return fmt.Sprintf("%d frames, of at most %d bytes, %d without a checksum", s.frames, s.longest, s.partial)
}

// sniffer looks at a device's frames as the device has them, before anything cuts them.
type sniffer struct {
	f    *os.File
	mine net.HardwareAddr

	mu       sync.Mutex
	from, to seen // the one who has the MAC address mine
}

// sniff looks at a device until the test ends.
func sniff(t *testing.T, in *testhost.Namespace, device int, mine net.HardwareAddr) *sniffer {
	t.Helper()
	s := &sniffer{mine: mine}
	s.take()
	must(t, in.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(htons(unix.ETH_P_ALL)))
		if err != nil {
			return err
		}
		s.f = os.NewFile(uintptr(fd), "packets")
		t.Cleanup(func() { s.f.Close() })
		if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: device})
	}))
	go s.run()
	return s
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

func (s *sniffer) run() {
	// struct virtio_net_hdr: flags and gso_type u8, hdr_len, gso_size, csum_start and csum_offset u16; in the host's order.
	const header, needsSum = 10, 1
	const ethernet, ipv4 = 14, 20
	b := make([]byte, 128<<10)
	for {
		n, err := s.f.Read(b)
		if err != nil {
			return
		}
		if n < header+ethernet {
			continue
		}
		frame := b[header:n]
		s.mu.Lock()
		d := &s.to
		if string(frame[6:12]) == string(s.mine) {
			d = &s.from
		}
		d.frames++
		d.longest = max(d.longest, len(frame))
		d.segment = max(d.segment, int(binary.NativeEndian.Uint16(b[4:])))
		if b[0]&needsSum != 0 {
			d.partial++
		}
		if binary.BigEndian.Uint16(frame[12:]) == unix.ETH_P_IP && len(frame) >= ethernet+ipv4 {
			d.hops[net.HardwareAddr(frame[:6]).String()]++
			d.sources[netip.AddrFrom4([4]byte(frame[26:30]))]++
		} else {
			d.others++
		}
		s.mu.Unlock()
	}
}

// take returns what was seen since the last time.
func (s *sniffer) take() (from, to seen) {
	s.mu.Lock()
	defer s.mu.Unlock()
	from, to = s.from, s.to
	s.from = seen{hops: map[string]int{}, sources: map[netip.Addr]int{}}
	s.to = seen{hops: map[string]int{}, sources: map[netip.Addr]int{}}
	return from, to
}
