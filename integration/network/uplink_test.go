package network

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/integration/testhost"
)

// uplink shows that a box's connection goes by the gateway, whoever else is on the LAN, stays when the gateway has another
// MAC address, and that a host without a way says so.
func uplink(t *testing.T, x *box) {
	target := netip.AddrPortFrom(testhost.Server, testhost.DataPort).String()
	up := device(t, testhost.UplinkDevice)
	// The host knows neighbours before it knows the gateway.
	must(t, s.Host.Do(func() error {
		if err := forget(up); err != nil {
			return err
		}
		for _, n := range testhost.Neighbours {
			c, err := net.Dial("udp4", netip.AddrPortFrom(n, 9).String())
			if err != nil {
				return err
			}
			_, err = c.Write([]byte("hello"))
			_ = c.Close()
			if err != nil {
				return err
			}
		}
		return nil
	}))
	s.Eventually(t, patience, "neighbours, and no gateway", func() bool {
		known := neighbours(t, up)
		return len(known) == len(testhost.Neighbours) && known[testhost.Router] == ""
	})
	wire := sniff(t, s.Host.Namespace, up.Attrs().Index, up.Attrs().HardwareAddr)
	c := x.converse(t, testhost.Server)
	c.say(t, "one")
	c.hears(t, "one")
	router := routerMAC(t)
	if from, _ := wire.take(); len(from.hops) != 1 || from.hops[router] == 0 {
		t.Errorf("packets go to %v, the router has %s", from.hops, router)
	}
	if got := cube(t, "network", "trace", x.id, target); !strings.Contains(got, router) || !strings.Contains(got, "the gateway") {
		t.Errorf("cube network trace:\n%s", got)
	}

	// A gateway that another machine takes over announces it.
	must(t, s.Host.Router.Do(func() error {
		if err := testhost.Sysctl("ipv4/conf/"+testhost.RouterDevice+"/arp_notify", "1"); err != nil {
			return err
		}
		l, err := netlink.LinkByName(testhost.RouterDevice)
		if err != nil {
			return err
		}
		return netlink.LinkSetHardwareAddr(l, net.HardwareAddr{2, 0, 0, 0, 0, 0x77})
	}))
	moved := routerMAC(t)
	wire.take()
	c.say(t, "two")
	c.hears(t, "two")
	if from, _ := wire.take(); from.hops[moved] == 0 || moved == router {
		t.Errorf("packets go to %v, the router has %s", from.hops, moved)
	}

	// The guest's MTU follows the uplink's.
	for _, mtu := range []int{testhost.MTU - 100, testhost.MTU} {
		must(t, s.Host.Do(func() error { return netlink.LinkSetMTU(up, mtu) }))
		s.Eventually(t, patience, fmt.Sprintf("an MTU of %d", mtu), func() bool {
			return x.sh(t, "cat /sys/class/net/eth0/mtu") == strconv.Itoa(mtu)
		})
	}

	// Without a default route nothing leaves, and it is told why.
	must(t, s.Host.Do(func() error { return dropRoute(netip.Prefix{}) }))
	if r := s.Cube("network", "status"); !strings.Contains(r.Stdout, "none") || !strings.Contains(r.Stdout, "no default route") {
		t.Errorf("cube network status: %+v", r)
	}
	r := s.Cube("network", "trace", x.id, target)
	if r.Code == 0 || !strings.Contains(r.Stderr, "no default route") {
		t.Errorf("cube network trace: %+v", r)
	}
	if got := x.sh(t, "(exec 3<>/dev/tcp/"+testhost.Server.String()+"/7000)"); !strings.Contains(got, "unreachable") {
		t.Errorf("bash says %q", got)
	}
	must(t, s.Host.Do(func() error { return addRoute(netip.Prefix{}, testhost.Router) }))
	c.say(t, "three")
	c.hears(t, "three")
}

// addRoute adds a route, the zero prefix's is the default one.
func addRoute(to netip.Prefix, via netip.Addr) error {
	return netlink.RouteAdd(&netlink.Route{Dst: ipNet(to), Gw: via.AsSlice()})
}

func dropRoute(to netip.Prefix) error {
	dst := ipNet(to)
	if dst == nil {
		dst = &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	}
	return netlink.RouteDel(&netlink.Route{Dst: dst})
}

func ipNet(p netip.Prefix) *net.IPNet {
	if !p.IsValid() {
		return nil
	}
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
}

// forget removes all that the host knows of its neighbours.
func forget(l netlink.Link) error {
	all, err := netlink.NeighList(l.Attrs().Index, netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	for _, n := range all {
		if err := netlink.NeighDel(&n); err != nil {
			return err
		}
	}
	return nil
}

// neighbours are the host's, and their MAC addresses.
func neighbours(t *testing.T, l netlink.Link) map[netip.Addr]string {
	t.Helper()
	known := map[netip.Addr]string{}
	must(t, s.Host.Do(func() error {
		all, err := netlink.NeighList(l.Attrs().Index, netlink.FAMILY_V4)
		for _, n := range all {
			if a, ok := netip.AddrFromSlice(n.IP.To4()); ok && len(n.HardwareAddr) > 0 {
				known[a] = n.HardwareAddr.String()
			}
		}
		return err
	}))
	return known
}

func routerMAC(t *testing.T) (mac string) {
	t.Helper()
	must(t, s.Host.Router.Do(func() error {
		l, err := netlink.LinkByName(testhost.RouterDevice)
		if err != nil {
			return err
		}
		mac = l.Attrs().HardwareAddr.String()
		return nil
	}))
	return mac
}
