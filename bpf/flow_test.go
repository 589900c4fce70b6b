package bpf

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf/policy"
)

// sandboxed is a network with one sandbox, and what is sent to and from it.
type sandboxed struct {
	*network
	id  ID
	tap int
}

func newSandboxed(t *testing.T, change func(*Sandbox), rules ...policy.Rule) *sandboxed {
	t.Helper()
	n := newNetwork(t)
	_, tap := n.tap("tap0")
	s := unlimited(tap)
	if change != nil {
		change(&s)
	}
	id, err := n.add(s, n.rows(rules...))
	n.must(err)
	return &sandboxed{network: n, id: id, tap: tap}
}

func (s *sandboxed) send(f frame) result {
	s.t.Helper()
	return s.feed(s.objs.TapIn, s.id, s.tap, 0, 0, f.bytes())
}

// receive is a packet from another machine, local one from the host itself.
func (s *sandboxed) receive(f frame) result {
	s.t.Helper()
	return s.feed(s.objs.GwOut, s.id, s.gateway.Attrs().Index, 7, 0, f.bytes())
}

func (s *sandboxed) local(f frame) result {
	s.t.Helper()
	return s.feed(s.objs.GwOut, s.id, s.gateway.Attrs().Index, 0, 0, f.bytes())
}

func (s *sandboxed) flows() []Flow {
	s.t.Helper()
	flows, err := s.Flows(s.id)
	s.must(err)
	return flows
}

func tcpToHost(src netip.Addr, sport, dport uint16, flags uint8) frame {
	return toHost(src, unix.IPPROTO_TCP, tcp(at(src, sport), at(hostIP, dport), flags, ""))
}

func udpToHost(src netip.Addr, sport, dport uint16) frame {
	return toHost(src, unix.IPPROTO_UDP, udp(at(src, sport), at(hostIP, dport), "to the guest"))
}

// TestToGuest: what came in by a device gets to the guest only as an answer.
func TestToGuest(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", ""))
	for _, tc := range []struct {
		name   string
		frame  frame
		reason Reason
	}{
		{"TCP SYN", tcpToHost(remote, 443, 1000, syn), NoFlow},
		{"TCP SYN-ACK", tcpToHost(remote, 443, 1000, syn|ack), NoFlow},
		{"UDP", udpToHost(remote, 53, 1000), NoFlow},
		{"echo request", toHost(remote, unix.IPPROTO_ICMP, icmp(8, 0, 1, nil)), NoFlow},
		{"echo reply", toHost(remote, unix.IPPROTO_ICMP, icmp(0, 0, 1, nil)), NoFlow},
		{"redirect", toHost(remote, unix.IPPROTO_ICMP, icmp(5, 0, 1, make([]byte, 28))), ICMPType},
		{"later fragment", func() frame { f := udpToHost(remote, 53, 1000); f.edit = put(ethLen+6, 0, 1); return f }(), Fragment},
		{"IP options", func() frame { f := udpToHost(remote, 53, 1000); f.edit = put(ethLen, 0x46); return f }(), IPOptions},
		{"no sandbox", func() frame { f := udpToHost(remote, 53, 1000); f.dst = netip.MustParseAddr("10.88.0.9"); return f }(), NoSandbox},
	} {
		s.run(tc.name, func(t *testing.T) { s.expect(s.receive(tc.frame), tcShot, tc.reason) })
	}

	// With the flow there, what belongs to it passes, and what would begin another doesn't.
	s.expect(s.send(tcpFromGuest(remote, 1000, 443, syn)), tcRedirect, TX)
	s.expect(s.receive(tcpToHost(remote, 443, 1000, syn)), tcShot, NoFlow)
	s.expect(s.receive(tcpToHost(remote, 443, 1001, syn|ack)), tcShot, NoFlow)
	s.expect(s.receive(tcpToHost(remote, 443, 1000, syn|ack)), tcRedirect, RX)
	if f := s.flows(); len(f) != 1 || f[0].State != FlowOpen || f[0].Inbound || f[0].Rule != 1 || f[0].RXPackets != 1 || f[0].TXPackets != 1 || f[0].RemotePort != 443 || f[0].GuestPort != 1000 || f[0].Remote != remote {
		t.Errorf("flows %+v", f)
	}
}

// TestFromHost: the host opens flows, which the guest answers whatever its policy, but doesn't open others with.
func TestFromHost(t *testing.T) {
	s := newSandboxed(t, nil)
	host := netip.MustParseAddr("10.88.255.254")
	s.expect(s.send(tcpFromGuest(host, 80, 5000, syn|ack)), tcRedirect, Reset)
	s.expect(s.local(tcpToHost(host, 5000, 80, syn)), tcRedirect, RX)
	s.expect(s.send(tcpFromGuest(host, 80, 5000, syn|ack)), tcRedirect, TX)
	s.expect(s.send(tcpFromGuest(host, 80, 5000, ack)), tcRedirect, TX)
	s.expect(s.send(tcpFromGuest(host, 80, 5001, ack)), tcRedirect, Reset)
	if f := s.flows(); len(f) != 1 || !f[0].Inbound || f[0].State != FlowOpen {
		t.Errorf("flows %+v", f)
	}
	s.must(s.SetPolicy(s.id, s.rows(allow("9.0.0.0/8", ""))))
	s.expect(s.send(tcpFromGuest(host, 80, 5000, ack)), tcRedirect, TX)
	// Its ports open nothing of the guest's own.
	s.expect(s.send(tcpFromGuest(host, 80, 5000, syn)), tcShot, HardDeny)

	s.expect(s.local(udpToHost(host, 5000, 90)), tcRedirect, RX)
	s.expect(s.send(udpFromGuest(host, 90, 5000, "")), tcRedirect, TX)
	s.expect(s.local(toHost(host, unix.IPPROTO_ICMP, icmp(8, 0, 0, nil))), tcRedirect, RX)
	s.expect(s.send(fromGuest(host, unix.IPPROTO_ICMP, icmp(0, 0, 0, nil))), tcRedirect, TX)
	s.expect(s.send(fromGuest(host, unix.IPPROTO_ICMP, icmp(8, 0, 0, nil))), tcShot, HardDeny)
}

// TestLateName: an answer of the resolver's that comes when nobody knows the question any more opens nothing: the guest would
// be as free to answer the name server, whatever its policy, as it is to answer the host.
func TestLateName(t *testing.T) {
	s := newSandboxed(t, func(s *Sandbox) { s.Resolver = true })
	s.expect(s.local(udpToHost(remote, 53, 1000)), tcShot, NoFlow)
	if r := s.send(udpFromGuest(remote, 1000, 53, "")); r.mark != marks.Resolver {
		t.Errorf("a question has the mark %#x", r.mark)
	}
	s.expect(s.local(udpToHost(remote, 53, 1000)), tcRedirect, RX)
	// Other protocols have no port 53.
	s.expect(s.local(toHost(remote, unix.IPPROTO_ICMP, icmp(8, 0, 53<<16, nil))), tcRedirect, RX)
}

// TestICMPErrors: an error about a flow's packet gets to who sent it, with the addresses that they know.
func TestICMPErrors(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", ""))
	router := netip.MustParseAddr("5.5.5.5")
	s.expect(s.send(udpFromGuest(remote, 1000, 2000, "")), tcRedirect, TX)
	for _, kind := range []uint8{3, 11, 12} {
		sent := packet(hostIP, remote, unix.IPPROTO_UDP, 1, udp(at(hostIP, 1000), at(remote, 2000), ""))
		r := s.receive(toHost(router, unix.IPPROTO_ICMP, icmp(kind, 4, 1300, sent)))
		s.expect(r, tcRedirect, RX)
		p := parse(t, r.frame)
		q := p.l4[8:]
		if p.src != router || p.dst != guestIP || !bytes.Equal(q[12:16], guestIP.AsSlice()) || sum(q[:20], 0) != 0xffff {
			t.Errorf("error %d to the guest: %+v", kind, p)
		}
	}
	other := packet(hostIP, remote, unix.IPPROTO_UDP, 1, udp(at(hostIP, 1001), at(remote, 2000), ""))
	s.expect(s.receive(toHost(router, unix.IPPROTO_ICMP, icmp(3, 4, 1300, other))), tcShot, NoFlow)
	// The host's own errors are no flows either.
	s.expect(s.local(toHost(router, unix.IPPROTO_ICMP, icmp(3, 4, 1300, other))), tcShot, NoFlow)

	got := packet(remote, guestIP, unix.IPPROTO_UDP, 60, udp(at(remote, 2000), at(guestIP, 1000), ""))
	r := s.send(fromGuest(remote, unix.IPPROTO_ICMP, icmp(3, 3, 0, got)))
	s.expect(r, tcRedirect, TX)
	p := parse(t, r.frame)
	q := p.l4[8:]
	if p.src != hostIP || p.dst != remote || !bytes.Equal(q[16:20], hostIP.AsSlice()) || sum(q[:20], 0) != 0xffff {
		t.Errorf("error from the guest: %+v", p)
	}
	s.expect(s.send(fromGuest(router, unix.IPPROTO_ICMP, icmp(3, 3, 0, got))), tcShot, NoFlow)
}

// TestFragmentsToGuest: later fragments follow their packet's first one.
func TestFragmentsToGuest(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", ""))
	s.expect(s.send(udpFromGuest(remote, 1000, 53, "")), tcRedirect, TX)
	first, later := udpToHost(remote, 53, 1000), udpToHost(remote, 53, 1000)
	first.edit = func(b []byte) []byte { b[l4+4] = 8; return put(ethLen+6, 0x20, 0)(b) }
	later.edit = put(ethLen+6, 0, 3)
	s.expect(s.receive(later), tcShot, Fragment)
	s.expect(s.receive(first), tcRedirect, RX)
	r := s.receive(later)
	s.expect(r, tcRedirect, RX)
	if p := parse(t, r.frame); p.dst != guestIP || !bytes.Equal(p.l4, later.l4) {
		t.Errorf("later fragment %+v, sent with %x", p, later.l4)
	}
}

// TestLimits: each limit holds after its burst.
func TestLimits(t *testing.T) {
	slow := Rate{PerSecond: 1, Burst: 5}
	for _, tc := range []struct {
		name   string
		limit  Settings
		frame  func(i int) frame
		in     bool
		passes int
		reason Reason
	}{
		{"flows at a time", Settings{MaxFlows: 5}, func(i int) frame { return udpFromGuest(remote, uint16(i), 1, "") }, false, 5, FlowQuota},
		{"flows in a time", Settings{MaxFlows: 100, NewFlows: slow}, func(i int) frame { return udpFromGuest(remote, uint16(i), 1, "") }, false, 5, FlowRate},
		{"bytes", Settings{MaxFlows: 100, TX: Rate{PerSecond: 1000, Burst: 1 << 17}}, func(int) frame { return udpFromGuest(remote, 1, 1, string(make([]byte, 1466))) }, false, 1 << 17 / 1508, TXRate},
		{"bytes to the guest", Settings{MaxFlows: 100, RX: Rate{PerSecond: 1000, Burst: 1 << 17}}, func(int) frame {
			return toHost(remote, unix.IPPROTO_UDP, udp(at(remote, 1), at(hostIP, 1), string(make([]byte, 1466))))
		}, true, 1 << 17 / 1508, RXRate},
		{"echo requests", Settings{MaxFlows: 100}, func(int) frame { return fromGuest(remote, unix.IPPROTO_ICMP, icmp(8, 0, 1, nil)) }, false, 4, EchoRate},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newSandboxed(t, func(s *Sandbox) { s.Settings = tc.limit }, allow("1.0.0.0/8", ""))
			if tc.in {
				s.expect(s.send(udpFromGuest(remote, 1, 1, "")), tcRedirect, TX)
			}
			passed := 0
			for i := range tc.passes + 10 {
				var r result
				if tc.in {
					r = s.receive(tc.frame(i + 1))
				} else {
					r = s.send(tc.frame(i + 1))
				}
				if r.verdict == tcRedirect {
					passed++
				} else {
					s.expect(r, tcShot, tc.reason)
				}
			}
			// A token or two may have flowed in meanwhile.
			if passed < tc.passes || passed > tc.passes+5 {
				t.Errorf("%d passed, not about %d", passed, tc.passes)
			}
		})
	}
}

// TestQuota: flows that are forgotten make room, and a quota that was left too small by a kill is put right.
func TestQuota(t *testing.T) {
	s := newSandboxed(t, func(s *Sandbox) { s.MaxFlows = 10 }, allow("1.0.0.0/8", ""))
	fill := func() (opened int) {
		for i := range 20 {
			if s.send(udpFromGuest(remote, uint16(1000+i), 1, "")).verdict == tcRedirect {
				opened++
			}
		}
		return opened
	}
	if n := fill(); n != 10 {
		t.Fatalf("%d flows opened", n)
	}
	s.expect(s.send(udpFromGuest(remote, 1, 1, "")), tcShot, FlowQuota)

	reaped, err := s.Reap(DefaultTimeouts)
	if err != nil || reaped != 0 {
		t.Errorf("%d live flows forgotten, %v", reaped, err)
	}
	reaped, err = s.Reap(Timeouts{TCPOpening: time.Hour, TCPOpen: time.Hour, ICMP: time.Hour})
	if err != nil || reaped != 10 || len(s.flows()) != 0 {
		t.Errorf("%d idle flows forgotten, %v", reaped, err)
	}
	if n := fill(); n != 10 {
		t.Errorf("%d flows opened after that", n)
	}

	// Killed between the two steps.
	var keys []dpFlowKey
	s.must(s.walk(func(k *dpFlowKey, _ *dpFlow) bool { keys = append(keys, *k); return true }))
	s.expect(s.send(udpFromGuest(remote, 1, 1, "")), tcShot, FlowQuota)
	if _, err := s.Reap(DefaultTimeouts); err != nil {
		t.Fatal(err)
	}
	if n := fill(); n != 10 || len(keys) != 10 {
		t.Errorf("%d flows opened after the quota was put right", n)
	}
}

func TestFlowStates(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", ""))
	state := func(want FlowState, limit time.Duration) {
		t.Helper()
		f := s.flows()
		if len(f) != 1 || f[0].State != want || DefaultTimeouts.limit(f[0]) != limit {
			t.Fatalf("not %s: %+v", want, f)
		}
	}
	s.send(tcpFromGuest(remote, 1000, 443, syn))
	state(FlowOpening, DefaultTimeouts.TCPOpening)
	s.receive(tcpToHost(remote, 443, 1000, syn|ack))
	state(FlowOpen, DefaultTimeouts.TCPOpen)
	s.send(tcpFromGuest(remote, 1000, 443, fin|ack))
	state(FlowOpen, DefaultTimeouts.TCPOpen)
	s.receive(tcpToHost(remote, 443, 1000, fin|ack))
	state(FlowClosing, DefaultTimeouts.TCPClosing)
	s.send(tcpFromGuest(remote, 1000, 443, syn))
	state(FlowOpening, DefaultTimeouts.TCPOpening)
}

// TestSandboxes: no two have a tap or address in common, and who comes after has nothing of who was before.
func TestSandboxes(t *testing.T) {
	s := newSandboxed(t, nil, allow("1.0.0.0/8", ""))
	_, tap1 := s.network.tap("tap1")
	same := unlimited(s.tap)
	same.HostIP = hostIP.Next()
	for name, sb := range map[string]Sandbox{"tap": same, "address": unlimited(tap1)} {
		if _, err := s.add(sb, nil); !errdefs.IsAlreadyExists(err) {
			t.Errorf("two with one %s: %v", name, err)
		}
	}
	for name, change := range map[string]func(*Sandbox){
		"no device":       func(s *Sandbox) { s.Ifindex = 0 },
		"IPv6":            func(s *Sandbox) { s.GuestIP = netip.MustParseAddr("fd00::1") },
		"no address":      func(s *Sandbox) { s.HostIP = netip.Addr{} },
		"a group's MAC":   func(s *Sandbox) { s.GuestMAC = []byte{1, 0, 0, 0, 0, 0} },
		"a tiny burst":    func(s *Sandbox) { s.TX = Rate{PerSecond: 1, Burst: 1} },
		"a burst of none": func(s *Sandbox) { s.NewFlows = Rate{Burst: 1} },
	} {
		sb := unlimited(tap1)
		sb.HostIP = hostIP.Next()
		change(&sb)
		if _, err := s.add(sb, nil); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", name, err)
		}
	}

	// Two with the same address and MAC, each with its own policy.
	other := unlimited(tap1)
	other.HostIP = hostIP.Next()
	id1, err := s.add(other, s.rows(allow("2.0.0.0/8", "")))
	s.must(err)
	s.expect(s.send(udpFromGuest(remote, 1, 1, "")), tcRedirect, TX)
	r := s.feed(s.objs.TapIn, id1, tap1, 0, 0, udpFromGuest(remote, 1, 1, "").bytes())
	s.expect(r, tcShot, Policy)
	r = s.feed(s.objs.TapIn, id1, tap1, 0, 0, udpFromGuest(netip.MustParseAddr("2.2.2.2"), 1, 1, "").bytes())
	s.expect(r, tcRedirect, TX)
	if p := parse(t, r.frame); p.src != other.HostIP {
		t.Errorf("the other's source is %v", p.src)
	}

	last, err := s.RemoveSandbox(s.id)
	if err != nil || last[TX].Packets != 1 {
		t.Errorf("counted at the end: %v, %v", last, err)
	}
	if _, err := s.RemoveSandbox(s.id); !errdefs.IsNotFound(err) {
		t.Errorf("removed twice: %v", err)
	}
	s.expect(s.feed(s.objs.TapIn, 0, s.tap, 0, 0, udpFromGuest(remote, 1, 1, "").bytes()), tcShot, NoSandbox)
	s.expect(s.feed(s.objs.GwOut, 0, s.gateway.Attrs().Index, 7, 0, udpToHost(remote, 1, 1).bytes()), tcShot, NoSandbox)
	again, err := s.add(unlimited(s.tap), s.rows(allow("2.0.0.0/8", "")))
	if err != nil || again != s.id {
		t.Fatalf("added again: %d, %v", again, err)
	}
	if c, err := s.Counters(again); err != nil || len(c) != 0 {
		t.Errorf("inherited counters %v, %v", c, err)
	}
	if f := s.flows(); len(f) != 0 {
		t.Errorf("inherited flows %v", f)
	}
	s.expect(s.receive(udpToHost(remote, 1, 1)), tcShot, NoFlow)
	s.expect(s.send(udpFromGuest(remote, 1, 1, "")), tcShot, Policy)
	want := fmt.Sprint(map[int]ID{s.tap: again, tap1: id1})
	if got := fmt.Sprint(s.sandboxes()); got != want {
		t.Errorf("sandboxes %s, not %s", got, want)
	}
}

// TestEvents: drops are told until there are too many, and the reader ends when it is closed.
func TestEvents(t *testing.T) {
	s := newSandboxed(t, nil)
	events, err := s.Events()
	s.must(err)
	for i := range 20 {
		s.expect(s.send(udpFromGuest(remote, uint16(i+1), 443, "")), tcShot, Policy)
	}
	for i := range 8 {
		e, err := events.Read()
		s.must(err)
		want := Event{Age: e.Age, Sandbox: s.id, Epoch: e.Epoch, Ifindex: s.tap, Length: 42, Reason: Policy, Protocol: unix.IPPROTO_UDP, Remote: remote, RemotePort: 443, GuestPort: uint16(i + 1)}
		if e != want || e.Epoch == 0 || e.Age > time.Minute {
			t.Errorf("event %+v, not %+v", e, want)
		}
	}
	done := make(chan error, 1)
	go func() {
		for {
			if _, err := events.Read(); err != nil {
				done <- err
				return
			}
		}
	}()
	s.must(events.Close())
	select {
	case err := <-done:
		if err == nil {
			t.Error("read without an error after the end")
		}
	case <-time.After(time.Minute):
		t.Error("the reader doesn't end")
	}
	if c, err := s.Counters(s.id); err != nil || c[Policy].Packets != 20 {
		t.Errorf("counted %v, %v", c, err)
	}
}
