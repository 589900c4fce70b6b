package bypass

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
)

// TestReplace: while a policy is replaced by another one, and the daemon starts again, no frame passes that both deny, and
// none is dropped that both allow. What is closed stays so.
func TestReplace(t *testing.T) {
	more := &policy.Policy{Default: policy.Direct, Rules: []policy.Rule{{Action: policy.Deny, To: bad.String()}}}
	for i := range 100 {
		more.Rules = append(more.Rules, policy.Rule{Action: policy.Direct, To: fmt.Sprintf("11.0.%d.0/24", i), Ports: []string{"443"}})
	}
	w := newWorld(t, strict)
	closed := w.sandbox("closed", nil)
	for _, tc := range []struct {
		name   string
		times  int
		change func(i int) error
	}{
		{"policies", 200, func(i int) error {
			return w.SetPolicy(w.t.Context(), w.a.id(), []*policy.Policy{more, strict}[i%2])
		}},
		{"a daemon that starts", 5, func(int) error {
			g, err := gateway.Up(w.t.Context(), w.cfg)
			if err != nil {
				return err
			}
			defer g.Close()
			d, err := w.Network.Up(w.t.Context(), g)
			if err != nil {
				return err
			}
			return d.Close()
		}},
		{"the host's addresses", 20, func(int) error { return w.Refresh(w.t.Context()) }},
	} {
		w.seen()
		before := w.counts(w.a)
		done := make(chan error, 1)
		go func() {
			runtime.LockOSThread() // as is the world's thread
			err := netns.Set(w.host)
			for i := 0; i < tc.times && err == nil; i++ {
				err = tc.change(i)
			}
			done <- err
		}()
		sent, forbidden, seen := w.traffic(closed, done)
		before[bpf.TX] += sent / perBarrier // the barriers'
		allowed := 0
		for _, s := range seen {
			if s == "wire: udp uplink > ok:9999" {
				allowed++
			} else {
				t.Errorf("seen %q", s)
			}
		}
		counts := w.counts(w.a)
		if allowed != sent || counts[bpf.TX]-before[bpf.TX] != sent {
			t.Errorf("%d of %d allowed frames on the wire, %d counted", allowed, sent, counts[bpf.TX]-before[bpf.TX])
		}
		if n := counts[bpf.Policy] + counts[bpf.HardDeny] - before[bpf.Policy] - before[bpf.HardDeny]; n != forbidden {
			t.Errorf("%d of %d forbidden frames counted: %v", n, forbidden, counts)
		}
		t.Logf("%s: %d frames that may pass, %d that may not", tc.name, sent, forbidden)
	}
}

// perBarrier is how many frames that may pass are sent between barriers.
const perBarrier = 20

// traffic sends frames that may pass and ones that may not, from the attacker and from a sandbox that nothing opens, until
// something is done.
func (w *world) traffic(closed *sandbox, done <-chan error) (sent, forbidden int, seen []string) {
	w.t.Helper()
	for end := time.Now().Add(wait); ; {
		for range perBarrier {
			for _, f := range [][]byte{guestUDP(bad, 9999), guestUDP(uplink, 9999), guestUDP(w.b.at.Address, 9999), guestTCP(bad, 80, syn)} {
				must(w.t, w.send(w.a, vnet{}, f))
				must(w.t, w.send(closed, vnet{}, f))
				forbidden++
			}
			must(w.t, w.send(w.a, vnet{}, guestUDP(ok, 9999)))
			must(w.t, w.send(closed, vnet{}, guestUDP(ok, 9999)))
			sent++
		}
		seen = append(seen, w.seen()...)
		select {
		case err := <-done:
			must(w.t, err)
			return sent, forbidden, seen
		default:
			if time.Now().After(end) {
				w.t.Fatal("it is never done")
			}
		}
	}
}

// TestTighten: a connection that the policy doesn't allow any more is cut both ways, and goes on when it is allowed again.
func TestTighten(t *testing.T) {
	w := newWorld(t, strict)
	var l net.Listener
	w.in(w.outside, func() {
		var err error
		l, err = net.Listen("tcp4", at(peer, 80).String())
		must(t, err)
	})
	defer l.Close()
	segment := func(flags uint8, seq, acked uint32, data string) {
		must(t, w.send(w.a, vnet{}, fromGuest(tcp(at(guestIP, 5000), at(peer, 80), flags, seq, acked, data))))
	}
	segment(syn, 100, 0, "")
	var server uint32
	for _, f := range w.barrier(w.a) {
		if w.describe(f) == "tcp synack peer:80 > guest" {
			server = binary.BigEndian.Uint32(f[l4+4:]) + 1
		}
	}
	segment(ack, 101, server, "")
	c, err := l.Accept()
	must(t, err)
	defer c.Close()
	must(t, c.SetDeadline(time.Now().Add(wait)))
	hears := func(what string) {
		t.Helper()
		b := make([]byte, 100)
		n, err := c.Read(b)
		must(t, err)
		if string(b[:n]) != what {
			t.Errorf("the server hears %q, not %q", b[:n], what)
		}
	}
	segment(ack, 101, server, "open")
	hears("open")
	w.seen()

	tight := &policy.Policy{Default: policy.Deny, Rules: []policy.Rule{{Action: policy.Direct, To: peer.String(), Ports: []string{fmt.Sprint(barrierPort)}}}}
	must(t, w.SetPolicy(t.Context(), w.a.id(), tight))
	_, err = c.Write([]byte("shut")) // first, so that no packet of the sandbox's has the policy asked
	must(t, err)
	segment(ack, 105, server, "shut")
	if got := w.seen(); len(got) > 0 {
		t.Errorf("after it was denied, seen %q", got)
	}
	if n := w.counts(w.a)[bpf.Policy]; n < 2 {
		t.Errorf("%d packets of the connection are counted as denied", n)
	}
	must(t, w.SetPolicy(t.Context(), w.a.id(), nil))
	segment(ack, 105, server, "shut")
	must(t, w.SetPolicy(t.Context(), w.a.id(), strict))
	if got := w.seen(); slices.ContainsFunc(got, func(s string) bool { return strings.HasPrefix(s, "wire:") }) {
		t.Errorf("without a policy, seen %q", got)
	}
	segment(ack, 105, server, "open again")
	hears("open again")
}

// TestReuse: who has a tap after another one has nothing of the other's: no flow, no connection, no policy, and nothing that
// is still sent to the other.
func TestReuse(t *testing.T) {
	w := newWorld(t, strict)
	c := w.sandbox("c", careless)
	must(t, w.send(c, vnet{}, guestUDP(ok, 9999)))
	must(t, w.send(c, vnet{}, guestTCP(ok, 80, syn)))
	w.barrier(c)
	old := c.at
	answers := w.see(w.wire) // to which there will be answers
	w.remove(c)

	d := w.sandbox("d", nil)
	if d.at.Tap != old.Tap {
		t.Fatalf("tap %s, before %s", d.at.Tap, old.Tap)
	}
	send := w.sender(w.outside, "w0", uplinkMAC, routerMAC)
	attack := func() {
		for _, f := range answers {
			if binary.BigEndian.Uint16(f[l4+2:]) == 9999 {
				send(udp(at(ok, 9999), at(uplink, binary.BigEndian.Uint16(f[l4:])), "still there?"))
			}
		}
		send(udp(at(ok, 9999), at(old.Address, 4000), "still there?"))
		must(t, w.send(d, vnet{}, guestUDP(bad, 9999)))
		must(t, w.send(d, vnet{}, fromGuest(tcp(at(guestIP, 4000), at(ok, 80), ack, 1001, 1, "go on"))))
		// The host may have the answer and say that it didn't ask.
		if got := w.seen(); slices.ContainsFunc(got, func(s string) bool {
			return s != "wire: icmp 3/3 uplink > ok" && !strings.HasPrefix(s, "host: udp ok > uplink:")
		}) {
			t.Errorf("seen %q", got)
		}
	}
	attack()
	if got := w.see(&eye{fd: d.tap, skip: vnetLen}); len(got) > 0 {
		t.Errorf("a closed sandbox gets %q", w.describe(got[0]))
	}
	var err error
	d.at, err = w.Open(t.Context(), network.Request{ID: d.id(), Network: "cube", IfName: "eth0", Policy: strict})
	must(t, err)
	attack()
	var got []string
	for _, f := range w.see(&eye{fd: d.tap, skip: vnetLen}) {
		got = append(got, w.describe(f))
	}
	if !slices.Equal(got, []string{"tcp rst ok:80 > guest"}) {
		t.Errorf("an open sandbox gets %q", got)
	}
	if c := w.counts(d); c[bpf.TX] != 0 || c[bpf.Policy] != 1 || c[bpf.Reset] != 1 {
		t.Errorf("counted %v", c)
	}
}

// TestProxied: what is for the proxy gets to it and to nobody else, whoever listens, and nowhere without one.
func TestProxied(t *testing.T) {
	w := newWorld(t, strict)
	rows, err := policy.Compile(policy.Policy{Default: policy.Deny, Rules: []policy.Rule{
		{Action: policy.Direct, To: peer.String()},
		{Action: policy.Proxy, To: proxied.String(), Ports: []string{"443"}, Protocol: "tcp"},
	}}, policy.Guard{Denied: []netip.Prefix{w.cfg.Network.Pool}})
	must(t, err)
	must(t, w.datapath.SetPolicy(w.a.at.Sandbox, rows))
	port := uint16(6000)
	expect := func(what string, want ...string) {
		t.Helper()
		port++
		must(t, w.send(w.a, vnet{}, fromGuest(tcp(at(guestIP, port), at(proxied, 443), syn, 1, 0, ""))))
		if got := w.seen(); !slices.Equal(got, want) {
			t.Errorf("%s: seen %q, want %q", what, got, want)
		}
	}
	expect("no proxy")
	others := []net.Listener{w.listen(at(netip.IPv4Unspecified(), 443), 0), w.listen(at(netip.IPv4Unspecified(), w.cfg.Network.ProxyPort), 0)}
	expect("others listen")
	for _, l := range others {
		must(t, l.Close())
	}
	must(t, w.send(w.a, vnet{}, guestUDP(proxied, 443)))
	if got := w.seen(); len(got) > 0 || w.counts(w.a)[bpf.Policy] != 1 {
		t.Errorf("UDP: seen %q", got)
	}
	l := w.listen(at(netip.MustParseAddr("127.0.0.2"), w.cfg.Network.ProxyPort), 1)
	expect("a transparent one of another address")
	must(t, l.Close())
	l = w.listen(at(netip.MustParseAddr("127.0.0.1"), w.cfg.Network.ProxyPort), 1)
	expect("the proxy", "host: tcp syn a > proxied:443", "a: tcp synack proxied:443 > guest")
	must(t, l.Close())
	w.unguard()
	// The datapath's mark keeps it on the host. That none but the proxy gets it there is the guard's.
	expect("without the guard", "host: tcp syn a > proxied:443")
}

// listen listens on the host.
func (w *world) listen(addr netip.AddrPort, transparent int) net.Listener {
	w.t.Helper()
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var option error
		err := c.Control(func(fd uintptr) { option = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, transparent) })
		return errors.Join(err, option)
	}}
	l, err := lc.Listen(w.t.Context(), "tcp4", addr.String())
	must(w.t, err)
	return l
}
