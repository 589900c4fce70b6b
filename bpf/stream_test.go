package bpf

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf/policy"
)

// TestStream: a guest with a network stack of its own, and the large segments and unmade checksums that it hands over, opens
// a connection to the host, and the host one to it. A stack that gets a wrong byte or sum stops.
func TestStream(t *testing.T) {
	eachHook(t, func(t *testing.T, n *network) {
		l := newLive(t, n)
		_, err := l.RemoveSandbox(l.id)
		l.must(err)
		in := l.guestStack()
		const size = 8 << 20
		for _, tc := range []struct {
			name         string
			listen, dial func(func() error) error
			address      netip.Addr
			source       netip.Addr
		}{
			{"from the guest", here, in, l.host, hostIP},
			{"from the host", in, here, hostIP, l.host},
		} {
			var server net.Listener
			listen := tc.address
			if listen == hostIP {
				listen = guestIP
			}
			l.must(tc.listen(func() (err error) {
				server, err = net.Listen("tcp4", netip.AddrPortFrom(listen, 0).String())
				return err
			}))
			done := make(chan error, 1)
			go func() { done <- echo(server, size, tc.source) }()
			port := server.Addr().(*net.TCPAddr).Port
			err := tc.dial(func() error { return stream(netip.AddrPortFrom(tc.address, uint16(port)).String(), size) })
			if err := errors.Join(err, <-done, server.Close()); err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
		}
	})
}

func here(f func() error) error { return f() }

// guestStack makes a guest of a network namespace, in place of the tap: the returned function runs another one in it.
func (l *live) guestStack() func(func() error) error {
	l.t.Helper()
	l.must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "stack0"}, PeerName: "eth0", PeerHardwareAddr: guestMAC}))
	outer, err := netlink.LinkByName("stack0")
	l.must(err)
	l.must(netlink.LinkSetUp(outer))

	calls := make(chan func())
	var ns *os.File
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the namespace ends with its last user
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			ns, err = os.Open("/proc/thread-self/ns/net")
		}
		started <- err
		for call := range calls {
			call()
		}
	}()
	l.must(<-started)
	l.t.Cleanup(func() { close(calls); _ = ns.Close() })
	in := func(f func() error) error {
		err := make(chan error)
		calls <- func() { err <- f() }
		return <-err
	}
	inner, err := netlink.LinkByName("eth0")
	l.must(err)
	l.must(netlink.LinkSetNsFd(inner, int(ns.Fd())))
	l.must(in(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return errors.Join(
			netlink.AddrAdd(eth0, &netlink.Addr{IPNet: &net.IPNet{IP: guestIP.AsSlice(), Mask: net.CIDRMask(30, 32)}}),
			netlink.LinkSetUp(eth0),
			netlink.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: gatewayIP.AsSlice()}))
	}))
	ifindex := outer.Attrs().Index
	l.must(l.AttachTap(ifindex))
	rows, err := policy.Compile(policy.Policy{Rules: []policy.Rule{allow("192.0.2.1", "tcp")}}, policy.Guard{Openings: []policy.Opening{{To: "192.0.2.1"}}})
	l.must(err)
	_, err = l.add(unlimited(ifindex), rows)
	l.must(err)
	return in
}

// echo sends back what one connection brings, which comes from source.
func echo(server net.Listener, size int, source netip.Addr) error {
	if err := server.(*net.TCPListener).SetDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	c, err := server.Accept()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	if from := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(); from != source {
		return fmt.Errorf("connected by %v, not %v", from, source)
	}
	if err := c.SetDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	n, err := io.Copy(c, io.LimitReader(c, int64(size)))
	if err == nil && n != int64(size) {
		err = fmt.Errorf("%d bytes came, not %d", n, size)
	}
	return err
}

// stream sends bytes and compares what comes back.
func stream(address string, size int) error {
	c, err := net.DialTimeout("tcp4", address, wait)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	data := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{}).Read(data)
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(data)
		sent <- err
	}()
	digest := sha256.New()
	n, err := io.Copy(digest, io.LimitReader(c, int64(size)))
	if err = errors.Join(err, <-sent); err != nil {
		return err
	}
	if want := sha256.Sum256(data); n != int64(size) || !bytes.Equal(digest.Sum(nil), want[:]) {
		return fmt.Errorf("%d bytes came back, not those that were sent", n)
	}
	return nil
}

// unmade is a frame with a header of virtio_net before it, by which the device is to make the checksum, in segments if it is
// a large one.
func unmade(f frame, checksum int) []byte {
	segment := bytes.Clone(f.l4)
	binary.BigEndian.PutUint16(segment[checksum:], uint16(pseudo(f.src, f.dst, f.proto, len(segment))))
	f.l4 = segment
	header := make([]byte, 10) // struct virtio_net_hdr
	header[0] = 1              // the checksum is to be made
	binary.NativeEndian.PutUint16(header[6:], l4)
	binary.NativeEndian.PutUint16(header[8:], uint16(checksum))
	if len(segment) > 1480 {
		header[1] = 1 // segments of TCP and IPv4
		binary.NativeEndian.PutUint16(header[2:], l4+20)
		binary.NativeEndian.PutUint16(header[4:], segmentSize)
	}
	return append(header, f.bytes()...)
}

const segmentSize = 1000

// TestUnmadeChecksum: a reset for a frame whose checksum the device was to make, one of them with many segments in it.
func TestUnmadeChecksum(t *testing.T) {
	n := newNetwork(t)
	f, ifindex := n.tapFlags("tap0", unix.IFF_VNET_HDR)
	n.must(n.AttachTap(ifindex))
	id, err := n.add(unlimited(ifindex), nil)
	n.must(err)
	for _, payload := range []int{0, 100, 4000} {
		_, err := f.Write(unmade(fromGuest(remote, unix.IPPROTO_TCP, tcp(at(guestIP, 1000), at(remote, 443), ack, string(make([]byte, payload)))), 16))
		n.must(err)
		b := make([]byte, 2048)
		n.must(f.SetReadDeadline(time.Now().Add(wait)))
		got, err := f.Read(b)
		n.must(err)
		if p := parse(t, b[10:got]); len(p.l4) != 20 || p.l4[13] != 4 || p.src != remote || p.dst != guestIP {
			t.Errorf("reset for %d bytes: %+v", payload, p)
		}
	}
	if c, err := n.Counters(id); err != nil || c[Reset].Packets != 3 {
		t.Errorf("counted %v, %v", c, err)
	}
}

// TestForwarded: what leaves the host by a device that makes no sums has them right, whoever was to make them.
func TestForwarded(t *testing.T) {
	n := newNetwork(t)
	n.must(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	uplink, out := n.tap("up0")
	n.must(netlink.RouteAdd(&netlink.Route{LinkIndex: out, Dst: &net.IPNet{IP: net.IP{1, 0, 0, 0}, Mask: net.CIDRMask(8, 32)}, Scope: netlink.SCOPE_LINK}))
	n.must(netlink.NeighAdd(&netlink.Neigh{LinkIndex: out, State: netlink.NUD_PERMANENT, IP: remote.AsSlice(), HardwareAddr: gatewayMAC}))
	n.must(netlink.RouteAdd(&netlink.Route{LinkIndex: n.gateway.Attrs().Index, Dst: &net.IPNet{IP: net.IP{10, 88, 0, 0}, Mask: net.CIDRMask(16, 32)}}))
	f, ifindex := n.tapFlags("tap0", unix.IFF_VNET_HDR)
	n.must(n.AttachTap(ifindex))
	n.must(n.AttachGateway())
	id, err := n.add(unlimited(ifindex), n.rows(allow("1.0.0.0/8", "")))
	n.must(err)

	large := tcpFromGuest(remote, 1000, 443, ack)
	large.l4 = tcp(at(guestIP, 1000), at(remote, 443), ack, string(bytes.Repeat([]byte("large "), 500)))
	for _, tc := range []struct {
		name     string
		frame    frame
		checksum int
		packets  int
	}{
		{"TCP", tcpFromGuest(remote, 1000, 443, syn), 16, 1},
		{"many segments", large, 16, 3},
		{"UDP", udpFromGuest(remote, 1000, 443, "odd"), 6, 1},
	} {
		_, err := f.Write(unmade(tc.frame, tc.checksum))
		n.must(err)
		for range tc.packets {
			p := guest{t, uplink}.get(func(p parsed) bool { return p.dst == remote })
			if p.src != hostIP || p.proto != tc.frame.proto {
				t.Errorf("%s: %+v", tc.name, p)
			}
		}
	}
	// And back, from a device that made them.
	guest{t, uplink}.send(frame{from: gatewayMAC, to: macOf(t, out), src: remote, dst: hostIP, proto: unix.IPPROTO_TCP, l4: tcp(at(remote, 443), at(hostIP, 1000), syn|ack, "")}.bytes())
	b := make([]byte, 2048)
	n.must(f.SetReadDeadline(time.Now().Add(wait)))
	got, err := f.Read(b)
	n.must(err)
	if p := parse(t, b[10:got]); p.src != remote || p.dst != guestIP {
		t.Errorf("the answer: %+v", p)
	}
	// What nobody asked for doesn't get there.
	before, err := n.Counters(id)
	n.must(err)
	guest{t, uplink}.send(frame{from: gatewayMAC, to: macOf(t, out), src: remote, dst: hostIP, proto: unix.IPPROTO_TCP, l4: tcp(at(remote, 443), at(hostIP, 1000), syn, "")}.bytes())
	after, err := n.Counters(id)
	n.must(err)
	if after[NoFlow].Packets != before[NoFlow].Packets+1 || after[RX] != before[RX] {
		t.Errorf("a neighbour's SYN: %v, then %v", before, after)
	}
}

func macOf(t *testing.T, ifindex int) net.HardwareAddr {
	t.Helper()
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		t.Fatal(err)
	}
	return l.Attrs().HardwareAddr
}
