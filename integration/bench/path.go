package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/internal/undo"
)

// What a path has at its ends. The server's address is one that sandboxes may reach.
var (
	server     = testhost.Server
	hostUplink = netip.PrefixFrom(testhost.Uplink, 24)
	router     = netip.PrefixFrom(testhost.Router, 24)
)

// path leads from a client, in a sandbox's place and with its addresses, through a host to a server on the internet, one hop
// behind it. How the host forwards is the caller's.
type path struct {
	client, host, internet *testhost.Namespace
}

// tap is the host's device to the client.
const tap = "client0"

// newPath gives the host's end of the client's cable the address clientsGateway, if it is one.
func newPath(u *undo.Stack, clientsGateway netip.Prefix) (*path, error) {
	p := &path{}
	for _, n := range []**testhost.Namespace{&p.client, &p.host, &p.internet} {
		var err error
		if *n, err = testhost.NewNamespace(); err != nil {
			return nil, err
		}
		u.Push((*n).Close)
	}
	for _, c := range [][2]end{
		{{p.client, "eth0", network.GuestMAC, network.GuestPrefix}, {p.host, tap, gateway.MAC, clientsGateway}},
		{{p.host, testhost.UplinkDevice, nil, hostUplink}, {p.internet, "eth0", nil, router}},
	} {
		if err := cable(c[0], c[1]); err != nil {
			return nil, err
		}
	}
	return p, errors.Join(
		p.client.Do(func() error { return defaultRoute(network.GuestGateway) }),
		p.host.Do(func() error { return defaultRoute(router.Addr()) }),
		p.internet.Do(func() error { return up("lo", netip.PrefixFrom(server, 32)) }),
	)
}

// end is one of a cable's.
type end struct {
	*testhost.Namespace
	name string
	mac  net.HardwareAddr // none: any
	addr netip.Prefix     // none: it gets none
}

// cable joins two namespaces.
func cable(a, b end) error {
	f, err := os.Open(b.Path())
	if err != nil {
		return err
	}
	defer f.Close()
	if err := a.Do(func() error {
		if err := netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: a.name, HardwareAddr: a.mac, MTU: testhost.MTU},
			PeerName:  b.name, PeerHardwareAddr: b.mac, PeerMTU: testhost.MTU, PeerNamespace: netlink.NsFd(int(f.Fd())),
		}); err != nil {
			return fmt.Errorf("make devices %s and %s: %w", a.name, b.name, err)
		}
		return up(a.name, a.addr)
	}); err != nil {
		return err
	}
	return b.Do(func() error { return up(b.name, b.addr) })
}

func up(name string, addr netip.Prefix) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("look for device %s: %w", name, err)
	}
	if addr.IsValid() {
		ip := &net.IPNet{IP: addr.Addr().AsSlice(), Mask: net.CIDRMask(addr.Bits(), 32)}
		if err := netlink.AddrAdd(l, &netlink.Addr{IPNet: ip}); err != nil {
			return fmt.Errorf("give %s the address %s: %w", name, addr, err)
		}
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s up: %w", name, err)
	}
	return nil
}

func defaultRoute(via netip.Addr) error {
	if err := netlink.RouteAdd(&netlink.Route{Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("route by %s: %w", via, err)
	}
	return nil
}
