package network

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm"
)

// The two ends of a machine's network.
var (
	gateway    = netip.MustParseAddr("169.254.68.5")
	gatewayMAC = net.HardwareAddr{0x02, 0, 0, 0, 0, 0x01}
	guestIP    = netip.MustParsePrefix("169.254.68.6/30")
)

// host is a network namespace in the place of the host's, with a tap that leads to the machine. It ends with the test.
type host struct {
	ns  *os.File
	tap *os.File
	dev int // the tap's index
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{}
	must(t, onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		h.ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	}))
	t.Cleanup(func() { h.ns.Close() })
	h.in(t, func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		h.tap = os.NewFile(uintptr(fd), "tap")
		t.Cleanup(func() { h.tap.Close() })
		ifr, err := unix.NewIfreq("sandbox0")
		if err != nil {
			return err
		}
		ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
			return err
		}
		link, err := netlink.LinkByName("sandbox0")
		if err != nil {
			return err
		}
		h.dev = link.Attrs().Index
		addr := &net.IPNet{IP: gateway.AsSlice(), Mask: net.CIDRMask(guestIP.Bits(), 32)}
		for _, step := range []func() error{
			func() error {
				return os.WriteFile("/proc/sys/net/ipv6/conf/sandbox0/disable_ipv6", []byte("1"), 0)
			},
			func() error { return netlink.LinkSetHardwareAddr(link, gatewayMAC) },
			func() error { return netlink.AddrAdd(link, &netlink.Addr{IPNet: addr}) },
			func() error { return netlink.LinkSetUp(link) },
			func() error { // the datapath doesn't ask guests for their address either
				return netlink.NeighSet(&netlink.Neigh{LinkIndex: h.dev, State: netlink.NUD_PERMANENT, IP: guestIP.Addr().AsSlice(), HardwareAddr: vmm.MAC})
			},
		} {
			if err := step(); err != nil {
				return err
			}
		}
		return nil
	})
	return h
}

// onThread calls do on a thread that ends with it.
func onThread(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocks: the thread is spoilt
		done <- do()
	}()
	return <-done
}

// in calls do in the namespace. Sockets that it makes stay there.
func (h *host) in(t *testing.T, do func() error) {
	t.Helper()
	must(t, onThread(func() error {
		if err := unix.Setns(int(h.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return do()
	}))
}

// listener is where the guest's connections come in. All waits end with the deadline.
type listener struct {
	net.Listener
	deadline time.Time
}

func (h *host) listen(t *testing.T, limit time.Duration) *listener {
	t.Helper()
	l := &listener{deadline: time.Now().Add(limit)}
	h.in(t, func() (err error) {
		l.Listener, err = net.Listen("tcp4", net.JoinHostPort(gateway.String(), "0"))
		return err
	})
	t.Cleanup(func() { l.Close() })
	must(t, l.Listener.(*net.TCPListener).SetDeadline(l.deadline))
	return l
}

// accept returns the next connection.
func (l *listener) accept(t *testing.T) net.Conn {
	t.Helper()
	c, err := l.Accept()
	must(t, err)
	t.Cleanup(func() { c.Close() })
	must(t, c.SetDeadline(l.deadline))
	return c
}

// receive is what comes over the next connection.
func (l *listener) receive(t *testing.T) []byte {
	t.Helper()
	c := l.accept(t)
	b, err := io.ReadAll(c)
	must(t, err)
	must(t, c.Close())
	return b
}

// send sends data over the next connection.
func (l *listener) send(t *testing.T, data []byte) {
	t.Helper()
	c := l.accept(t)
	_, err := c.Write(data)
	must(t, err)
	must(t, c.Close())
}

// serveDNS answers that each name is at the gateway.
func (h *host) serveDNS(t *testing.T) {
	t.Helper()
	var conn net.PacketConn
	h.in(t, func() (err error) {
		conn, err = net.ListenPacket("udp4", net.JoinHostPort(gateway.String(), "53"))
		return err
	})
	t.Cleanup(func() { conn.Close() })
	go func() {
		b := make([]byte, 512)
		for {
			n, from, err := conn.ReadFrom(b)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if err := m.Unpack(b[:n]); err != nil || len(m.Questions) != 1 {
				t.Errorf("the guest asks %v: %v", m.Questions, err)
				continue
			}
			m.Header.Response, m.Header.RecursionAvailable = true, true
			if q := m.Questions[0]; q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 60},
					Body:   &dnsmessage.AResource{A: gateway.As4()},
				}}
			}
			answer, err := m.Pack()
			if err != nil {
				t.Error(err)
			}
			_, _ = conn.WriteTo(answer, from)
		}
	}()
}

// seen is what a sniffer has seen of one direction.
type seen struct {
	frames, partial int // partial: with a checksum that is still to be made
	longest         int // frame
	segment         int // the largest size of the segments that a frame is to be cut into
	others          int // that are not IPv4
}

// sniffer looks at the tap's frames as the tap has them, before anything cuts them.
type sniffer struct {
	f *os.File

	mu       sync.Mutex
	from, to seen // the guest
}

func (h *host) sniff(t *testing.T) *sniffer {
	t.Helper()
	s := &sniffer{}
	all := int(htons(unix.ETH_P_ALL))
	h.in(t, func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, all)
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
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: h.dev})
	})
	go s.run()
	return s
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

func (s *sniffer) run() {
	// struct virtio_net_hdr: flags and gso_type u8, hdr_len, gso_size, csum_start and csum_offset u16; in the host's order.
	const header, needsSum = 10, 1
	b := make([]byte, 128<<10)
	for {
		n, err := s.f.Read(b)
		if err != nil {
			return
		}
		if n < header+14 {
			continue
		}
		frame := b[header:n]
		s.mu.Lock()
		d := &s.to
		if string(frame[6:12]) == string(vmm.MAC) {
			d = &s.from
		}
		d.frames++
		d.longest = max(d.longest, len(frame))
		d.segment = max(d.segment, int(binary.NativeEndian.Uint16(b[4:])))
		if b[0]&needsSum != 0 {
			d.partial++
		}
		if binary.BigEndian.Uint16(frame[12:]) != unix.ETH_P_IP {
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
	s.from, s.to = seen{}, seen{}
	return from, to
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
