package network

import (
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/testhost"
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
	*testhost.Namespace
	tap *os.File
	dev int // the tap's index
}

func newHost(t *testing.T) *host {
	t.Helper()
	ns, err := testhost.NewNamespace()
	must(t, err)
	t.Cleanup(func() { _ = ns.Close() })
	h := &host{Namespace: ns}
	must(t, h.Do(func() error {
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
	}))
	return h
}

// listener is where the guest's connections come in. All waits end with the deadline.
type listener struct {
	net.Listener
	deadline time.Time
}

func (h *host) listen(t *testing.T, limit time.Duration) *listener {
	t.Helper()
	l := &listener{deadline: time.Now().Add(limit)}
	var err error
	l.Listener, err = h.Listen("tcp4", net.JoinHostPort(gateway.String(), "0"))
	must(t, err)
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
	must(t, h.Do(func() (err error) {
		conn, err = net.ListenPacket("udp4", net.JoinHostPort(gateway.String(), "53"))
		return err
	}))
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

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
