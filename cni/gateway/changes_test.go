package gateway

import (
	"context"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Of what happens on a host, what may concern the gateway is told, and the rest is not: a host may have much of that.
func TestWatchChanges(t *testing.T) {
	h := newHost(t)
	h.up()
	for _, name := range []string{"cube-gw", "cube-gw-peer"} { // the kernel tells of their carriers when it likes
		for end := time.Now().Add(wait); link(t, name).Attrs().OperState != netlink.OperUp; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s doesn't come up", name)
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ruled, rest, ended := make(chan bool, 1000), make(chan bool, 1000), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocks: it is in the host
		err := netns.Set(h.ns)
		if err == nil {
			err = WatchChanges(ctx, h.cfg, func() { ruled <- true }, func() { rest <- true })
		}
		ended <- err
	}()
	next := func(what string, c chan bool) {
		t.Helper()
		select {
		case <-c:
		case <-time.After(wait):
			t.Fatalf("it isn't told that %s", what)
		}
	}
	next("it begins", ruled)
	next("it begins", rest)

	// Each is told in its order, so what comes first shows what was told before it.
	others(t, nftables.TableFamilyINet, "theirs", nftables.ChainPolicyAccept)
	c, err := nftables.New()
	must(t, err)
	table := &nftables.Table{Name: h.cfg.Network.NFTable, Family: nftables.TableFamilyINet}
	c.FlushChain(&nftables.Chain{Name: "leave", Table: table}) // of one rule
	must(t, c.Flush())
	next("a rule is gone", ruled)
	if n := len(ruled); n > 0 {
		t.Errorf("it is told of %d other changes of rules", n)
	}

	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "theirs"}, PeerName: "theirs2"}))
	address4(t, "theirs", "192.0.2.1/24")
	must(t, setSysctl(forwardingOf("theirs"), "0"))
	must(t, netlink.RouteAdd(&netlink.Route{Dst: network("192.0.3.0/24"), Gw: net.ParseIP("198.51.100.7"), Table: 77}))
	dev := link(t, h.cfg.Network.Device)
	must(t, netlink.RouteDel(poolRoute(&h.cfg.Network, dev.Attrs().Index)))
	next("the pool's route is gone", rest)
	if n := len(rest); n > 0 {
		t.Errorf("it is told of %d other changes", n)
	}
	for _, tc := range []struct {
		what   string
		change func() error
	}{
		{"another's route of the pool has come", func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: ipNet(h.cfg.Network.Pool), Gw: net.ParseIP("198.51.100.7")})
		}},
		{"a route is in the table", func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: network("192.0.3.0/24"), Gw: net.ParseIP("198.51.100.7"), Table: h.cfg.Network.RouteTable})
		}},
		{"a rule is gone", func() error { return netlink.RuleDel(proxyRule(&h.cfg.Network)) }},
		{"the device forwards nothing", func() error { return setSysctl(forwardingOf(h.cfg.Network.Device), "0") }},
		{"the host forwards nothing", func() error { return setSysctl(ipForward, "0") }},
		{"the address is gone", func() error { return netlink.AddrDel(dev, gatewayAddr(&h.cfg.Network)) }},
		{"the device has another name", func() error {
			if err := netlink.LinkSetDown(dev); err != nil {
				return err
			}
			return netlink.LinkSetName(dev, "mine")
		}},
	} {
		for len(rest) > 0 {
			<-rest
		}
		must(t, tc.change())
		next(tc.what, rest)
	}
	cancel()
	select {
	case err := <-ended:
		must(t, err)
	case <-time.After(wait):
		t.Fatal("it doesn't end")
	}
}
