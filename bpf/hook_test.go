package bpf

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf/policy"
)

// wait bounds everything that is waited for.
const wait = time.Minute

// guest is a machine at a tap.
type guest struct {
	t   *testing.T
	tap *os.File
}

func (g guest) send(frame []byte) {
	g.t.Helper()
	if _, err := g.tap.Write(frame); err != nil {
		g.t.Fatal(err)
	}
}

// get waits for a frame that is wanted.
func (g guest) get(wanted func(parsed) bool) parsed {
	g.t.Helper()
	b := make([]byte, 2048)
	if err := g.tap.SetReadDeadline(time.Now().Add(wait)); err != nil {
		g.t.Fatal(err)
	}
	for {
		n, err := g.tap.Read(b)
		if err != nil {
			g.t.Fatal(err)
		}
		if b[12] == 8 && b[13] == 0 {
			if p := parse(g.t, b[:n]); wanted(p) {
				return p
			}
		}
	}
}

// live is a network with a host behind the gateway device and one guest.
type live struct {
	*network
	guest guest
	tap   int
	id    ID
	// host is an address of the host that the guest may reach.
	host netip.Addr
}

func newLive(t *testing.T, n *network) *live {
	t.Helper()
	l := &live{network: n, host: netip.MustParseAddr("192.0.2.1")}
	n.must(netlink.AddrAdd(n.gateway, &netlink.Addr{IPNet: &net.IPNet{IP: l.host.AsSlice(), Mask: net.CIDRMask(32, 32)}}))
	n.must(netlink.RouteAdd(&netlink.Route{LinkIndex: n.gateway.Attrs().Index, Dst: &net.IPNet{IP: net.IP{10, 88, 0, 0}, Mask: net.CIDRMask(16, 32)}}))
	tap, ifindex := n.tap("tap0")
	l.guest, l.tap = guest{t, tap}, ifindex
	n.must(n.AttachGateway())
	n.must(n.AttachTap(ifindex))
	rows, err := policy.Compile(policy.Policy{Rules: []policy.Rule{allow("192.0.2.1", "")}}, policy.Guard{Openings: []policy.Opening{{To: "192.0.2.1"}}})
	n.must(err)
	l.id, err = n.add(unlimited(ifindex), rows)
	n.must(err)
	return l
}

// roundTrip has the guest ask the host by UDP, and the host answer.
func (l *live) roundTrip(word string) {
	l.t.Helper()
	server, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(l.host, 7)))
	l.must(err)
	defer func() { _ = server.Close() }()
	l.must(server.SetDeadline(time.Now().Add(wait)))
	l.guest.send(udpFromGuest(l.host, 1000, 7, word).bytes())
	b := make([]byte, 100)
	n, from, err := server.ReadFromUDPAddrPort(b)
	if err != nil || string(b[:n]) != word || from != at(hostIP, 1000) {
		l.t.Fatalf("the host got %q from %v, %v", b[:n], from, err)
	}
	_, err = server.WriteToUDPAddrPort([]byte("re: "+word), from)
	l.must(err)
	l.guest.get(func(p parsed) bool {
		return p.proto == unix.IPPROTO_UDP && p.src == l.host && p.dst == guestIP && string(p.l4[8:]) == "re: "+word
	})
}

func (l *live) check() error { return errors.Join(l.CheckTap(l.tap), l.CheckGateway()) }

// TestTraffic: through devices, both ways, opened from either side, over closing, upgrading and removing the datapath.
func TestTraffic(t *testing.T) {
	eachHook(t, func(t *testing.T, n *network) {
		l := newLive(t, n)
		l.must(l.check())
		l.roundTrip("to begin with")

		// The host connects to the guest, which answers by hand.
		local, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(l.host, 0)))
		l.must(err)
		defer func() { _ = local.Close() }()
		port := uint16(local.LocalAddr().(*net.UDPAddr).Port)
		_, err = local.WriteToUDPAddrPort([]byte("knock"), at(hostIP, 80))
		l.must(err)
		l.guest.get(func(p parsed) bool {
			return p.dst == guestIP && p.proto == unix.IPPROTO_UDP && string(p.l4[8:]) == "knock"
		})
		l.guest.send(udpFromGuest(l.host, 80, port, "who is there").bytes())
		l.must(local.SetDeadline(time.Now().Add(wait)))
		b := make([]byte, 100)
		if n, err := local.Read(b); err != nil || string(b[:n]) != "who is there" {
			t.Errorf("the host got %q, %v", b[:n], err)
		}

		// The checksum of its SYN is made on the way.
		dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(l.host, 0))}
		ctx, cancel := context.WithCancel(context.Background())
		dialed := make(chan struct{})
		go func() {
			defer close(dialed)
			runtime.LockOSThread()
			if unix.Setns(int(n.ns.Fd()), unix.CLONE_NEWNET) == nil {
				_, _ = dialer.DialContext(ctx, "tcp4", at(hostIP, 81).String())
			}
		}()
		l.guest.get(func(p parsed) bool { return p.dst == guestIP && p.proto == unix.IPPROTO_TCP && p.l4[13]&syn != 0 })
		cancel()
		<-dialed

		// All stays in force without a process.
		l.must(l.Close())
		l.roundTrip("closed")

		// Another process takes over. Until it attaches its programs, it sees others there.
		l.open()
		if got := l.sandboxes(); len(got) != 1 || got[l.tap] != l.id {
			t.Errorf("taken over: %v", got)
		}
		if err := l.check(); err == nil {
			t.Error("the former process's programs pass for this one's")
		}
		l.roundTrip("taken over")
		flows := len(l.flows())
		l.must(l.AttachTap(l.tap))
		l.must(l.AttachGateway())
		l.must(l.check())
		l.roundTrip("upgraded")
		if n := len(l.flows()); n != flows {
			t.Errorf("%d flows after the upgrade, %d before", n, flows)
		}
		if taps, err := l.Taps(); err != nil || len(taps) != 1 || taps[0] != l.tap {
			t.Errorf("taps %v, %v", taps, err)
		}
		// The policy that was taken over can be replaced and leaves no rows.
		l.must(l.SetPolicy(l.id, nil))
		if n := l.policyRows(); n != 0 {
			t.Errorf("%d rows are left", n)
		}

		l.must(l.DetachTap(l.tap))
		if err := l.CheckTap(l.tap); err == nil {
			t.Error("programs are attached after detaching")
		}
		l.must(l.Close())
		l.must(Remove(l.cfg.Dir))
		for _, h := range []hook{{l.tap, tapIn}, {l.tap, tapOut}, {l.gateway.Attrs().Index, gwOut}} {
			if id, err := firstFilter(h); err != nil || id != 0 {
				t.Errorf("%s has filter %d, %v", h, id, err)
			}
			if hasTCX() {
				if id, err := firstTCX(h); err != nil || id != 0 {
					t.Errorf("%s has link %d, %v", h, id, err)
				}
			}
		}
		qdiscs, err := netlink.QdiscList(l.gateway)
		l.must(err)
		for _, q := range qdiscs {
			if q.Type() == "clsact" {
				t.Error("the clsact qdisc is left")
			}
		}
		l.must(Remove(l.cfg.Dir)) // and again
	})
}

func (l *live) flows() []Flow {
	l.t.Helper()
	f, err := l.Flows(l.id)
	l.must(err)
	return f
}

// TestClosedTap: a tap without a sandbox lets nothing through, to the guest neither.
func TestClosedTap(t *testing.T) {
	eachHook(t, func(t *testing.T, n *network) {
		l := newLive(t, n)
		_, err := l.RemoveSandbox(l.id)
		l.must(err)
		before, err := l.Counters(0)
		l.must(err)
		l.guest.send(udpFromGuest(l.host, 1000, 7, "").bytes())
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
		l.must(err)
		defer func() { _ = unix.Close(fd) }()
		// What somebody else sends to the tap isn't ours.
		err = unix.Sendto(fd, udpToHost(remote, 1, 1).bytes(), 0, &unix.SockaddrLinklayer{Ifindex: l.tap, Protocol: 0x0008})
		if !errors.Is(err, unix.ENOBUFS) { // as the kernel tells senders of a dropped frame
			t.Errorf("sent to a closed tap: %v", err)
		}
		after, err := l.Counters(0)
		l.must(err)
		for _, r := range []Reason{NoSandbox, NotOurs} {
			if after[r].Packets <= before[r].Packets {
				t.Errorf("%s: %d, then %d", r, before[r].Packets, after[r].Packets)
			}
		}
		if after[TX] != before[TX] || after[RX] != before[RX] {
			t.Errorf("something passed: %v", after)
		}
	})
}

// TestCheckFindsOthers: a program in front of ours is found, and so is a hook that lost its program.
func TestCheckFindsOthers(t *testing.T) {
	eachHook(t, func(t *testing.T, n *network) {
		l := newLive(t, n)
		_, tap1 := n.tap("tap1")
		l.must(l.AttachTap(tap1))
		l.must(l.check())
		l.must(l.CheckTap(tap1))
		pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
		l.must(err)
		defer func() { _ = pass.Close() }()
		if n.cfg.Clsact {
			f := filter(hook{l.tap, tapIn})
			f.Fd, f.Name = pass.FD(), "pass"
			l.must(netlink.FilterReplace(f))
		} else {
			other, err := link.AttachTCX(link.TCXOptions{Interface: l.tap, Program: pass, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
			l.must(err)
			defer func() { _ = other.Close() }()
		}
		if err := l.CheckTap(l.tap); err == nil {
			t.Error("a program that lets all pass is not found")
		}
		l.must(l.CheckTap(tap1))
		l.must(l.CheckGateway())
	})
}

// TestGoneTap: what is left of a tap that is gone doesn't keep another from its number, or the datapath from removal.
func TestGoneTap(t *testing.T) {
	eachHook(t, func(t *testing.T, n *network) {
		f, ifindex := n.tap("tap0")
		n.must(n.AttachTap(ifindex))
		n.must(f.Close())
		if _, err := netlink.LinkByIndex(ifindex); err == nil {
			t.Fatal("the tap is still there")
		}
		n.must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "again0", Index: ifindex}, PeerName: "again1"}))
		if err := n.CheckTap(ifindex); err == nil {
			t.Error("a device that came after passes for attached")
		}
		n.must(n.AttachTap(ifindex))
		n.must(n.CheckTap(ifindex))
		l, err := netlink.LinkByIndex(ifindex)
		n.must(err)
		n.must(netlink.LinkDel(l))
		n.must(n.DetachTap(ifindex))
		if err := n.AttachTap(ifindex); err == nil {
			t.Error("attached to no device")
		}
		if taps, err := n.Taps(); err != nil || len(taps) != 0 {
			t.Errorf("taps %v, %v", taps, err)
		}
	})
}
