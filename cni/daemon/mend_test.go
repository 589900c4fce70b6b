package daemon_test

import (
	"errors"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
)

// far is the internet: it echoes at remote, and hears what is sent to a place that no policy here allows.
type far struct {
	denied netip.AddrPort
	heard  atomic.Uint64
	talks  atomic.Pointer[net.TCPConn] // the last one
}

// internet is behind the host's uplink.
func internet(t *testing.T) *far {
	t.Helper()
	f := &far{denied: netip.MustParseAddrPort("1.2.3.5:443")}
	host, err := netns.Get()
	testnet.Must(t, err)
	defer host.Close()
	wire, err := netlink.LinkByName("up1")
	testnet.Must(t, err)
	ns, err := netns.New() // and be there
	testnet.Must(t, err)
	defer ns.Close()
	testnet.Must(t, netns.Set(host))
	testnet.Must(t, netlink.LinkSetNsFd(wire, int(ns)))
	testnet.Must(t, netns.Set(ns))
	defer func() { testnet.Must(t, netns.Set(host)) }()
	for dev, addrs := range map[string][]string{"up1": {"198.51.100.1/24"}, "lo": {"1.2.3.4/32", "1.2.3.5/32"}} {
		l, err := netlink.LinkByName(dev)
		testnet.Must(t, err)
		for _, a := range addrs {
			addr, err := netlink.ParseAddr(a)
			testnet.Must(t, err)
			testnet.Must(t, netlink.AddrAdd(l, addr))
		}
		testnet.Must(t, netlink.LinkSetUp(l))
	}
	echo, err := net.Listen("tcp4", remote.String())
	testnet.Must(t, err)
	ear, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(f.denied))
	testnet.Must(t, err)
	var ended sync.WaitGroup
	ended.Go(func() { f.echo(echo) })
	ended.Go(func() { f.hear(ear) })
	t.Cleanup(func() {
		_ = errors.Join(echo.Close(), ear.Close())
		if c := f.talks.Load(); c != nil {
			_ = c.Close() // its other end may have gone without a way to say so
		}
		ended.Wait()
	})
	return f
}

// echo serves one connection after the other.
func (f *far) echo(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		f.talks.Store(c.(*net.TCPConn))
		_, _ = io.Copy(c, c)
		_ = c.Close()
	}
}

// silent waits until all that was echoed has been acknowledged, so that nothing is under way. Who sends while there is no NAT
// is answered by the host, which knows of no such connection, with a reset.
func (f *far) silent(p *process) {
	p.t.Helper()
	raw, err := f.talks.Load().SyscallConn()
	testnet.Must(p.t, err)
	p.until("nothing is under way", func() bool {
		var left int
		var ioctl error
		testnet.Must(p.t, raw.Control(func(fd uintptr) { left, ioctl = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }))
		testnet.Must(p.t, ioctl)
		return left == 0
	})
}

func (f *far) hear(c *net.UDPConn) {
	for b := make([]byte, 2048); ; f.heard.Add(1) {
		if _, err := c.Read(b); err != nil {
			return
		}
	}
}

// caller is a sandbox with a connection to remote. All the time it tries what it may not, too.
type caller struct {
	net.Conn
	t *testing.T
}

func call(t *testing.T, h *testnet.Host, f *far) *caller {
	t.Helper()
	pod := network.Pod{Namespace: "default", ID: "caller"}
	_, err := h.Claim(t.Context(), pod)
	testnet.Must(t, err)
	_, err = h.Open(t.Context(), network.Request{ID: "default-caller", Network: "test", IfName: "eth0", Policy: some})
	testnet.Must(t, err)
	guest, _ := h.Guest(pod)
	c := &caller{t: t}
	var bad net.Conn
	guest.Do(t, func() error {
		var err1, err2 error
		c.Conn, err1 = net.DialTimeout("tcp4", remote.String(), wait)
		bad, err2 = net.Dial("udp4", f.denied.String())
		return errors.Join(err1, err2)
	})
	stop := make(chan struct{})
	var stopped sync.WaitGroup
	stopped.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				_, _ = bad.Write([]byte("bad")) // what it is told of it doesn't matter
			}
		}
	})
	t.Cleanup(func() { close(stop); stopped.Wait(); _ = errors.Join(bad.Close(), c.Close()) })
	return c
}

// talk says whether the connection goes on.
func (c *caller) talk() error {
	if err := c.SetDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("hello")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 5))
	return err
}

// TestMend: what others take apart is in order again at once, said in a line, and once; a connection outlives it, and what
// may not pass doesn't meanwhile.
func TestMend(t *testing.T) {
	h := testnet.New(t)
	f := internet(t)
	n := &h.Config.Network
	device := func() netlink.Link {
		l, err := netlink.LinkByName(n.Device)
		testnet.Must(t, err)
		return l
	}
	table := &nftables.Table{Name: n.NFTable, Family: nftables.TableFamilyINet}
	rules := func(change func(c *nftables.Conn)) {
		c, err := nftables.New()
		testnet.Must(t, err)
		change(c)
		testnet.Must(t, c.Flush())
	}
	unrule := func(mark uint32) {
		r, mask := netlink.NewRule(), n.MarkMask
		r.Family, r.Priority, r.IifName, r.Mark, r.Mask = unix.AF_INET, n.RulePriority, n.Device, mark, &mask
		if mark == n.Marks().Proxy {
			r.Table = n.RouteTable
		} else {
			r.Type = unix.RTN_BLACKHOLE
		}
		testnet.Must(t, netlink.RuleDel(r))
	}
	forward := func() { testnet.Must(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0)) }
	p := start(t, h)
	c := call(t, h, f)
	for _, tc := range []struct {
		name, was string
		damage    func()
	}{
		{"all rules are flushed", "nftables table inet cube is missing", func() { rules(func(c *nftables.Conn) { c.FlushRuleset() }) }},
		{"the table is deleted", "nftables table inet cube is missing", func() { rules(func(c *nftables.Conn) { c.DelTable(table) }) }},
		{"a chain is emptied", "nftables table inet cube has been changed", func() {
			rules(func(c *nftables.Conn) { c.FlushChain(&nftables.Chain{Name: "forward", Table: table}) })
		}},
		{"a chain is deleted", "nftables table inet cube has been changed", func() {
			rules(func(c *nftables.Conn) {
				leave := &nftables.Chain{Name: "leave", Table: table}
				c.FlushChain(leave)
				c.DelChain(leave)
			})
		}},
		{"the device is down", "device cube-gw is down", func() { testnet.Must(t, netlink.LinkSetDown(device())) }},
		{"its peer is down", "cube-gw-peer is down", func() {
			l, err := netlink.LinkByName(n.Device + "-peer")
			testnet.Must(t, err)
			testnet.Must(t, netlink.LinkSetDown(l))
		}},
		{"its address is removed", "hasn't the address 10.200.255.254", func() {
			all, err := netlink.AddrList(device(), unix.AF_INET)
			testnet.Must(t, err)
			testnet.Must(t, netlink.AddrDel(device(), &all[0]))
		}},
		{"the pool's route is removed", "has no route of 10.200.0.0/16", func() {
			testnet.Must(t, netlink.RouteDel(&netlink.Route{
				LinkIndex: device().Attrs().Index, Scope: unix.RT_SCOPE_LINK,
				Dst: &net.IPNet{IP: n.Pool.Addr().AsSlice(), Mask: net.CIDRMask(n.Pool.Bits(), 32)},
			}))
		}},
		{"the device is deleted", "device cube-gw is missing", func() { testnet.Must(t, netlink.LinkDel(device())) }},
		{"the proxy's rule is removed", "for the egress proxy is missing", func() { unrule(n.Marks().Proxy) }},
		{"the forwarder's rule is removed", "for the DNS forwarder is missing", func() { unrule(n.Marks().Resolver) }},
		{"the host is told not to forward", "net.ipv4.ip_forward is 0", forward},
		{"so is the device", "net/ipv4/conf/cube-gw/forwarding is", func() {
			testnet.Must(t, os.WriteFile("/proc/sys/net/ipv4/conf/cube-gw/forwarding", []byte("0"), 0))
		}},
	} {
		testnet.Must(t, c.talk())
		f.silent(p)
		tc.damage()
		p.until(tc.name+", and it is in order again", func() bool {
			return strings.Contains(p.logged(), "it was put in order") && h.Status(t.Context()) == nil
		})
		if err := c.talk(); err != nil {
			t.Fatalf("%s: the connection doesn't go on: %v; the daemon says: %s", tc.name, err, p.logged())
		}
		p.stop() // so that another one has no quarrel
		if said := p.logged(); strings.Count(said, "it was put in order") != 1 || !strings.Contains(said, tc.was) {
			t.Errorf("%s: it says %s", tc.name, said)
		}
		p = start(t, h)
	}
	if n := f.heard.Load(); n > 0 {
		t.Errorf("%d packets came through that may not", n)
	}
}

// TestQuarrel: who takes it apart again and again is told of, and costs ever less. Meanwhile the network isn't ready.
func TestQuarrel(t *testing.T) {
	h := testnet.New(t)
	p := start(t, h)
	c, err := nftables.New()
	testnet.Must(t, err)
	began := time.Now()
	broken := false
	p.until("it tells of it", func() bool {
		c.FlushRuleset()
		testnet.Must(t, c.Flush())
		broken = broken || errdefs.IsUnavailable(h.Status(t.Context()))
		return strings.Count(p.logged(), "again and again") >= 3
	})
	rounds := strings.Count(p.logged(), "nftables table inet cube is missing")
	// The first pause is 200 ms, and each is twice the one before.
	if most := 2 + math.Log2(1+time.Since(began).Seconds()/0.2); float64(rounds) > most {
		t.Errorf("%d rounds in %v", rounds, time.Since(began))
	}
	if !broken {
		t.Error("it was ready all the time")
	}
	p.until("it is in order again", func() bool { return h.Status(t.Context()) == nil })
}
