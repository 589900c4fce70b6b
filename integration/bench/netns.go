package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/undo"
)

// namespace is a network namespace without a name, which ends with this process.
type namespace struct{ handle netns.NsHandle }

// newNamespace makes one with loopback and without IPv6, of which nobody measures anything.
func newNamespace(u *undo.Stack) (n namespace, err error) {
	err = onThread(func() error {
		var err error
		if n.handle, err = netns.New(); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		u.Push(n.handle.Close)
		for _, file := range []string{"all", "default"} {
			if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+file+"/disable_ipv6", []byte("1"), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
		return up("lo", netip.Prefix{})
	})
	return n, err
}

// do calls f on a thread of the namespace's. Sockets that f makes stay there, and processes too.
func (n namespace) do(f func() error) error {
	return onThread(func() error {
		if err := netns.Set(n.handle); err != nil {
			return fmt.Errorf("enter a network namespace: %w", err)
		}
		return f()
	})
}

// onThread calls f on a thread that ends with it.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocks: the thread is spoilt
		done <- f()
	}()
	return <-done
}

// end is one of a cable's.
type end struct {
	namespace
	name string
	mac  net.HardwareAddr
	addr netip.Prefix // none: it gets none
}

// cable joins two namespaces.
func cable(a, b end) error {
	err := a.do(func() error {
		if err := netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: a.name, HardwareAddr: a.mac, MTU: mtu},
			PeerName:  b.name, PeerHardwareAddr: b.mac, PeerMTU: mtu, PeerNamespace: netlink.NsFd(b.handle),
		}); err != nil {
			return fmt.Errorf("make veth %s: %w", a.name, err)
		}
		return up(a.name, a.addr)
	})
	if err != nil {
		return err
	}
	return b.do(func() error { return up(b.name, b.addr) })
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

const mtu = 1500

// What a path has at its ends. The server's address is one that sandboxes may reach.
var (
	server     = netip.MustParseAddr("93.184.216.34")
	hostUplink = netip.MustParsePrefix("198.51.100.2/24")
	router     = netip.MustParsePrefix("198.51.100.1/24")
)

// path leads from a client, in a sandbox's place and with its addresses, through a host to a server on the internet. How the
// host forwards is the caller's.
type path struct {
	client, host, internet namespace
}

// tap is the host's device to the client.
const tap = "client0"

// newPath gives the host's end of the client's cable the address clientsGateway, if it is one.
func newPath(u *undo.Stack, clientsGateway netip.Prefix) (*path, error) {
	p := &path{}
	for _, n := range []*namespace{&p.client, &p.host, &p.internet} {
		var err error
		if *n, err = newNamespace(u); err != nil {
			return nil, err
		}
	}
	for _, c := range [][2]end{
		{{p.client, "eth0", network.GuestMAC, network.GuestPrefix}, {p.host, tap, gateway.MAC, clientsGateway}},
		{{p.host, "up0", nil, hostUplink}, {p.internet, "eth0", nil, router}},
	} {
		if err := cable(c[0], c[1]); err != nil {
			return nil, err
		}
	}
	return p, errors.Join(
		p.client.do(func() error { return defaultRoute(network.GuestGateway) }),
		p.host.do(func() error { return defaultRoute(router.Addr()) }),
		p.internet.do(func() error { return up("lo", netip.PrefixFrom(server, 32)) }),
	)
}
