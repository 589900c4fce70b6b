package traffic

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/internal/netstate"
)

// The network of somebody for whom the host is the router.
var (
	stranger       = netip.MustParseAddr("192.0.2.2")
	strangerRouter = netip.MustParseAddr("192.0.2.1")
	strangers      = netip.MustParsePrefix("192.0.2.0/24")
)

// TestOthers: what the host forwards for others goes on through the whole life of Cube's network, without a packet less; and a
// host that forwards for nobody doesn't begin to. Afterwards it is as it was.
func TestOthers(t *testing.T) {
	cube(t, "down", "--purge")
	var boxes []*box
	t.Cleanup(func() { // for the tests that follow
		cube(t, "up", "-d")
		for _, b := range boxes {
			cube(t, "rm", "-f", b.id)
		}
	})
	others := strangersNetwork(t)
	internet := listenForTalks(t)
	lives := func(t *testing.T, between func(t *testing.T, when string)) {
		t.Helper()
		state := func() []string {
			var all []string
			must(t, s.Host.Do(func() (err error) {
				all, err = netstate.Take(testhost.UplinkDevice, "str0")
				return err
			}))
			return all
		}
		before := state()
		cube(t, "up", "-d")
		between(t, "up")
		b := newBox(t, fmt.Sprint("visitor", len(boxes)))
		boxes = append(boxes, b)
		if got := answered(t, b); got != "still here" {
			t.Errorf("a box gets %q", got)
		}
		between(t, "run")
		cube(t, "down")
		between(t, "down")
		cube(t, "down", "--purge")
		between(t, "purged")
		for _, d := range netstate.Diff(before, state()) {
			t.Error(d)
		}
	}
	t.Run("a host that forwards", func(t *testing.T) {
		forwards(t, "1")
		defer forwards(t, "0")
		control := internet.call(t, "the router", s.Host.Router)
		theirs := internet.call(t, "the stranger", others)
		stop := echoes(t, others)
		goOn(t, theirs, control)
		judge(t, "before", control, theirs)
		lives(t, func(t *testing.T, when string) {
			t.Helper()
			goOn(t, theirs, control)
			judge(t, when, control, theirs)
		})
		if sent, back := stop(); sent == 0 || back != sent {
			t.Errorf("of %d datagrams of the stranger's %d came back", sent, back)
		}
	})
	t.Run("a host that doesn't", func(t *testing.T) {
		lives(t, func(t *testing.T, when string) {
			t.Helper()
			must(t, others.Do(func() error {
				c, err := net.DialTimeout("tcp4", netip.AddrPortFrom(testhost.Server, talkPort).String(), time.Second)
				if err == nil {
					_ = c.Close()
					t.Errorf("%s: the host forwards for a stranger", when)
				}
				return nil
			}))
		})
	})
}

func forwards(t *testing.T, value string) {
	t.Helper()
	must(t, s.Host.Do(func() error { return testhost.Sysctl("ipv4/ip_forward", value) }))
}

// strangersNetwork joins a namespace to the host, for whose addresses the internet asks the host. It goes with the test.
func strangersNetwork(t *testing.T) *testhost.Namespace {
	t.Helper()
	ns, err := testhost.NewNamespace()
	must(t, err)
	t.Cleanup(func() { must(t, ns.Close()) })
	f, err := os.Open(ns.Path())
	must(t, err)
	defer f.Close()
	must(t, s.Host.Do(func() error {
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "str0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(f.Fd()))}); err != nil {
			return err
		}
		return upWith("str0", strangerRouter)
	}))
	t.Cleanup(func() {
		must(t, s.Host.Do(func() error {
			l, err := netlink.LinkByName("str0")
			if err != nil {
				return err
			}
			return netlink.LinkDel(l)
		}))
	})
	must(t, ns.Do(func() error {
		if err := upWith("eth0", stranger); err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Gw: strangerRouter.AsSlice()})
	}))
	route := &netlink.Route{Dst: &net.IPNet{IP: strangers.Addr().AsSlice(), Mask: net.CIDRMask(strangers.Bits(), 32)}, Gw: testhost.Uplink.AsSlice()}
	must(t, s.Host.Router.Do(func() error { return netlink.RouteAdd(route) }))
	t.Cleanup(func() { must(t, s.Host.Router.Do(func() error { return netlink.RouteDel(route) })) })
	return ns
}

// upWith sets a device up with an address of the strangers' network.
func upWith(name string, a netip.Addr) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(strangers.Bits(), 32)}}); err != nil {
		return err
	}
	return netlink.LinkSetUp(l)
}

// echoes sends datagrams to the internet and counts those that come back, until it is told to stop.
func echoes(t *testing.T, from *testhost.Namespace) (stop func() (sent, back int)) {
	t.Helper()
	var c net.Conn
	must(t, from.Do(func() (err error) {
		c, err = net.Dial("udp4", netip.AddrPortFrom(testhost.Server, testhost.EchoPort).String())
		return err
	}))
	quit, sender, reader := make(chan struct{}), make(chan int, 1), make(chan int, 1)
	go func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-quit:
				sender <- n
				return
			case <-tick.C:
				if _, err := fmt.Fprint(c, n); err != nil {
					t.Errorf("datagram %d: %v", n, err)
				}
			}
		}
	}()
	go func() {
		b := make([]byte, 64)
		n := 0
		for {
			if _, err := c.Read(b); err != nil {
				reader <- n
				return
			}
			n++
		}
	}()
	return func() (sent, back int) {
		close(quit)
		sent = <-sender
		_ = c.SetReadDeadline(time.Now().Add(s.Config.Timeout(2 * time.Second))) // for those on the way
		back = <-reader
		_ = c.Close()
		return sent, back
	}
}
