package daemon_test

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/daemon"
	"github.com/cubesandbox/cube/internal/testnet"
)

// TestStop: a daemon that ends in order leaves all in force.
func TestStop(t *testing.T) {
	h := testnet.New(t)
	p := start(t, h)
	testnet.Must(t, h.Status(t.Context()))
	if want := "network 10.200.0.0/16 by up0"; p.summary != want {
		t.Errorf("it says %q, not %q", p.summary, want)
	}
	p.until("taps are ready", func() bool {
		free, err := os.ReadDir(h.Path("free"))
		testnet.Must(t, err)
		return len(free) == h.Config.Network.WarmTaps
	})
	b := open(t, h, "box", all)
	p.stop()
	testnet.Must(t, h.Status(t.Context()))
	if !b.counted(remote, bpf.TX) {
		t.Error("what is open isn't any more")
	}
	if _, err := daemon.Drops(t.Context(), h.Config, b.id); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "cube up") {
		t.Errorf("drops without a daemon: %v", err)
	}
}

// TestAdopt: of what a sandbox sends while its daemon is killed and another one takes over, all goes its way, and what it
// may not do stays so.
func TestAdopt(t *testing.T) {
	h := testnet.New(t)
	p := start(t, h)
	b := open(t, h, "box", some)
	denied := netip.MustParseAddrPort("1.2.3.5:443")
	var sent atomic.Uint64
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		good := append(make([]byte, testnet.VnetHeader), testnet.UDP(remote, "good")...)
		bad := append(make([]byte, testnet.VnetHeader), testnet.UDP(denied, "bad")...)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			case <-tick.C:
			}
			for _, f := range [][]byte{good, bad} {
				if _, err := b.tap.Write(f); err != nil {
					stopped <- err
					return
				}
			}
			sent.Add(1)
		}
	}()
	more := func() {
		t.Helper()
		n := sent.Load() + 20
		p.until("frames are sent", func() bool { return sent.Load() > n })
	}
	more()
	for range 3 {
		p.kill()
		more()
		p = start(t, h)
		more()
	}
	close(stop)
	testnet.Must(t, <-stopped)
	if n := b.count(bpf.TX); n != sent.Load() {
		t.Errorf("%d frames of %d went their way", n, sent.Load())
	}
	if n := b.count(bpf.Policy); n != sent.Load() {
		t.Errorf("%d frames of %d were denied", n, sent.Load())
	}
	testnet.Must(t, h.Check(t.Context(), b.id, "test", "eth0", []netip.Addr{b.Address}))
}

// TestFollow: taps have the uplink's MTU, and a policy doesn't open what has become the host's.
func TestFollow(t *testing.T) {
	h := testnet.New(t)
	up, err := netlink.LinkByName("up0")
	testnet.Must(t, err)
	addr, err := netlink.ParseAddr(remote.Addr().String() + "/32")
	testnet.Must(t, err)
	p := start(t, h)
	b := open(t, h, "box", all)
	if !b.counted(remote, bpf.TX) {
		t.Error("it isn't open")
	}
	mtu := func(want int) {
		t.Helper()
		p.until("the tap has the uplink's MTU", func() bool {
			l, err := netlink.LinkByName(b.Tap)
			testnet.Must(t, err)
			return l.Attrs().MTU == want
		})
	}
	testnet.Must(t, netlink.LinkSetMTU(up, 1400))
	mtu(1400)
	testnet.Must(t, netlink.AddrAdd(up, addr))
	p.until("the host's address is denied", func() bool { return b.counted(remote, bpf.HardDeny) })
	testnet.Must(t, netlink.AddrDel(up, addr))
	p.until("it is the host's no more", func() bool { return b.counted(remote, bpf.TX) })

	// What changes while none runs is the next one's first work.
	p.kill()
	testnet.Must(t, netlink.LinkSetMTU(up, 1300))
	testnet.Must(t, netlink.AddrAdd(up, addr))
	p = start(t, h)
	mtu(1300)
	p.until("the host's address is denied", func() bool { return b.counted(remote, bpf.HardDeny) })
}

// TestFollowBeside: one that can't follow the host doesn't have the others wait.
func TestFollowBeside(t *testing.T) {
	h := testnet.New(t)
	up, err := netlink.LinkByName("up0")
	testnet.Must(t, err)
	addr, err := netlink.ParseAddr(remote.Addr().String() + "/32")
	testnet.Must(t, err)
	p := start(t, h)
	b, gone := open(t, h, "box", all), open(t, h, "gone", all)
	l, err := netlink.LinkByName(gone.Tap)
	testnet.Must(t, err)
	testnet.Must(t, netlink.LinkDel(l))
	testnet.Must(t, netlink.LinkSetMTU(up, 1400))
	p.until("it is tried again, less and less often", func() bool { return strings.Contains(p.logged(), "in=6.4s") })
	began := time.Now()
	testnet.Must(t, netlink.AddrAdd(up, addr))
	p.until("the host's address is denied", func() bool { return b.counted(remote, bpf.HardDeny) })
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the host's address was open for %v", took)
	}
}

// TestNoRoute: without a default route there is a network, and a warning; one that comes is followed.
func TestNoRoute(t *testing.T) {
	h := testnet.New(t)
	route := &netlink.Route{Gw: net.IPv4(198, 51, 100, 1)}
	testnet.Must(t, netlink.RouteDel(route))
	p := start(t, h)
	if want := "network 10.200.0.0/16 without internet: the host has no default route"; p.summary != want {
		t.Errorf("it says %q, not %q", p.summary, want)
	}
	p.until("it warns", func() bool { return strings.Contains(p.logged(), "there is no default route") })
	b := open(t, h, "box", all)
	up, err := netlink.LinkByName("up0")
	testnet.Must(t, err)
	testnet.Must(t, netlink.LinkSetMTU(up, 1400))
	testnet.Must(t, netlink.RouteAdd(route))
	p.until("it has the uplink", func() bool { return strings.Contains(p.logged(), "devices=up0 mtu=1400") })
	p.until("the tap follows", func() bool {
		l, err := netlink.LinkByName(b.Tap)
		testnet.Must(t, err)
		return l.Attrs().MTU == 1400
	})
}

// TestTakenDown: a daemon without a network ends, and says so.
func TestTakenDown(t *testing.T) {
	h := testnet.New(t)
	p := start(t, h)
	p.until("taps are ready", func() bool {
		free, err := os.ReadDir(h.Path("free"))
		testnet.Must(t, err)
		return len(free) == h.Config.Network.WarmTaps
	})
	testnet.Must(t, h.Down(t.Context()))
	timer := time.AfterFunc(wait, func() { _ = p.Process.Kill() })
	defer timer.Stop()
	if err := p.Wait(); err == nil || !strings.Contains(p.logged(), "the network has been taken down") {
		t.Errorf("it ends with %v: %s", err, p.logged())
	}
}

// TestLookup: a lookup of a sandbox's, sent to whatever address, is answered.
func TestLookup(t *testing.T) {
	h := testnet.New(t)
	packets, err := net.ListenPacket("udp4", "198.51.100.2:5353")
	testnet.Must(t, err)
	upstream := &dns.Server{PacketConn: packets, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		a := new(dns.Msg).SetReply(q)
		rr, _ := dns.NewRR(q.Question[0].Name + " 60 IN A 192.0.2.80")
		a.Answer = []dns.RR{rr}
		_ = w.WriteMsg(a)
	})}
	served := make(chan error, 1)
	go func() { served <- upstream.ActivateAndServe() }()
	defer func() { testnet.Must(t, upstream.Shutdown()); testnet.Must(t, <-served) }()

	p := start(t, h, `dns_upstreams = ["198.51.100.2:5353"]`)
	b := open(t, h, "box", all)
	q, err := new(dns.Msg).SetQuestion("example.org.", dns.TypeA).Pack()
	testnet.Must(t, err)
	b.send(netip.MustParseAddrPort("8.8.8.8:53"), string(q))
	testnet.Must(t, b.tap.SetReadDeadline(time.Now().Add(wait)))
	frame := make([]byte, 4096)
	for {
		n, err := b.tap.Read(frame)
		if err != nil {
			t.Fatalf("no answer: %v; the daemon says %s", err, p.logged())
		}
		f := frame[testnet.VnetHeader:n]
		const headers = 14 + 20 + 8
		if len(f) < headers || f[14+9] != 17 || binary.BigEndian.Uint16(f[14+20:]) != 53 {
			continue
		}
		if from := netip.AddrFrom4([4]byte(f[14+12:])); from.String() != "8.8.8.8" {
			t.Errorf("the answer comes from %s", from)
		}
		a := new(dns.Msg)
		testnet.Must(t, a.Unpack(f[headers:]))
		if len(a.Answer) != 1 || !strings.Contains(a.Answer[0].String(), "192.0.2.80") {
			t.Errorf("answered %v", a)
		}
		return
	}
}

// TestDrops: what was dropped is told, to whom it was of and not to who comes after.
func TestDrops(t *testing.T) {
	h := testnet.New(t)
	h.Config.Network.WarmTaps = 0 // the next one has the same number
	p := start(t, h)
	b := open(t, h, "box", some)
	denied := netip.MustParseAddrPort("1.2.3.5:443")
	b.send(denied, "hello")
	var last []daemon.Drop
	p.until("the drop is told", func() bool {
		var err error
		last, err = daemon.Drops(t.Context(), h.Config, b.id)
		testnet.Must(t, err)
		return len(last) > 0
	})
	d := last[0]
	if d.Remote != denied.Addr() || d.RemotePort != 443 || d.Protocol != 17 || d.Reason != bpf.Policy.String() || d.ToGuest {
		t.Errorf("it was %+v", d)
	}
	if age := time.Since(d.Time); age < 0 || age > wait {
		t.Errorf("it was %v ago", age)
	}
	if !strings.Contains(p.logged(), "reason=policy protocol=17 remote=1.2.3.5") {
		t.Error("it isn't logged")
	}
	b.close()
	if _, err := daemon.Drops(t.Context(), h.Config, b.id); !errdefs.IsNotFound(err) {
		t.Errorf("of one that is closed: %v", err)
	}
	next := open(t, h, "next", some)
	if next.Sandbox != b.Sandbox {
		t.Fatalf("the next one has the number %d", next.Sandbox)
	}
	last, err := daemon.Drops(t.Context(), h.Config, next.id)
	testnet.Must(t, err)
	if len(last) > 0 {
		t.Errorf("the next one has %+v", last)
	}
}

// TestRefused: where the network can't be, it is said why, and nothing is left.
func TestRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		spoil func(*testing.T)
		by    []string
		says  []string
	}{
		"capability": {func(*testing.T) {}, []string{"setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin"},
			[]string{"operation not permitted", "CAP_NET_ADMIN", "run cube up as the host's root"}},
		"kernel's types": {func(*testing.T) {}, []string{"unshare", "--mount", "sh", "-c", "mount -t tmpfs none /sys/kernel/btf && exec \"$0\""},
			[]string{"load the datapath: the kernel doesn't show its types (BTF)", "CONFIG_DEBUG_INFO_BTF"}},
		"overlap": {func(t *testing.T) {
			testnet.Must(t, netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: net.IPv4(10, 200, 7, 0), Mask: net.CIDRMask(24, 32)}, Gw: net.IPv4(198, 51, 100, 9)}))
		}, nil, []string{"10.200.7.0/24 via 198.51.100.9 dev up0", "set network.pool"}},
		"device": {func(t *testing.T) {
			testnet.Must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "cube-gw"}, PeerName: "x"}))
		}, nil, []string{"device cube-gw is there and not Cube's", "set network.device"}},
		"port": {func(t *testing.T) {
			c, err := net.ListenPacket("udp4", "0.0.0.0:10053")
			testnet.Must(t, err)
			t.Cleanup(func() { _ = c.Close() })
		}, nil, []string{"10.200.255.254:10053", "network.dns_port"}},
	} {
		t.Run(name, func(t *testing.T) {
			h := testnet.New(t)
			tc.spoil(t)
			p := launch(t, h, tc.by)
			if p.summary != "" {
				t.Fatalf("it is up: %s", p.summary)
			}
			_ = p.Wait()
			for _, s := range tc.says {
				if !strings.Contains(p.logged(), s) {
					t.Errorf("it doesn't say %q: %s", s, p.logged())
				}
			}
			if n := strings.Count(strings.TrimSpace(p.logged()), "\n"); n > 0 {
				t.Errorf("it says more than a line: %s", p.logged())
			}
		})
	}
}
