// Package testhost makes network namespaces that stand for a host and the internet around it, for tests that drive whole
// stacks. Nothing of the real host's network is touched, and nothing has a name that could be left:
//
//	host          up0 198.51.100.2/24, default route by .1       where the stack runs
//	   |
//	router        lan0 198.51.100.1/24, a bridge                  forwards, and answers what it can't forward
//	   |    \____ neighbours  198.51.100.7, 198.51.100.8          other machines of the LAN, each with a MAC of its own
//	   |
//	internet      93.184.216.34, 93.184.216.53, 93.184.217.34     a server, a name server, and the server again, to which
//	                                                              the way is narrower than the way back
//
// The package knows nothing of Cube.
package testhost

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
)

// Addresses of the internet and of the LAN.
var (
	Uplink     = netip.MustParseAddr("198.51.100.2")
	Router     = netip.MustParseAddr("198.51.100.1")
	Neighbours = []netip.Addr{netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("198.51.100.8")}
	Server     = netip.MustParseAddr("93.184.216.34")
	Resolver   = netip.MustParseAddr("93.184.216.53")
	// Narrow is the server's address behind a network whose MTU is NarrowMTU. Answers come by the other one, so that the
	// server promises to take segments of a size that don't get there.
	Narrow = netip.MustParseAddr("93.184.217.34")
)

// MTUs of all devices, and of the narrow network.
const (
	MTU       = 1500
	NarrowMTU = 1300
)

// Names of the uplink and of the router's device on the LAN.
const (
	UplinkDevice = "up0"
	RouterDevice = "lan0"
)

// Host is a host of its own.
type Host struct {
	*Namespace
	// Router, Neighbours and Internet are the namespaces around it.
	Router, Neighbours, Internet *Namespace

	services *services
	clean    []string // what there is before a stack is started
}

// New makes a host, and serves names and data on its internet until Close.
func New() (_ *Host, err error) {
	h := &Host{}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.Close())
		}
	}()
	for _, n := range []**Namespace{&h.Namespace, &h.Router, &h.Neighbours, &h.Internet} {
		if *n, err = NewNamespace(); err != nil {
			return nil, err
		}
	}
	if err := h.wire(); err != nil {
		return nil, err
	}
	if h.services, err = serve(h.Internet); err != nil {
		return nil, err
	}
	h.clean, err = h.state()
	return h, err
}

func (h *Host) wire() error {
	for _, c := range []struct {
		a     *Namespace
		nameA string
		b     *Namespace
		nameB string
		mtu   int
	}{
		{h.Namespace, UplinkDevice, h.Router, "port0", MTU},
		{h.Neighbours, "eth0", h.Router, "port1", MTU},
		{h.Neighbours, "eth1", h.Router, "port2", MTU},
		{h.Internet, "wide0", h.Router, "wide0", MTU},
		{h.Internet, "narrow0", h.Router, "narrow0", NarrowMTU},
	} {
		if err := cable(c.a, c.nameA, c.b, c.nameB, c.mtu); err != nil {
			return err
		}
	}
	for _, err := range []error{
		h.Router.Do(wireRouter),
		h.Do(func() error {
			// As most hosts have it, whatever the one has that the namespace is made on.
			return errors.Join(Sysctl("ipv4/ip_forward", "0"), up(UplinkDevice, Uplink.String()+"/24"), route(Router.String()))
		}),
		h.Neighbours.Do(func() error {
			return errors.Join(
				// Each device answers for its own address.
				Sysctl("ipv4/conf/all/arp_ignore", "1"),
				up("eth0", Neighbours[0].String()+"/24"), up("eth1", Neighbours[1].String()+"/24"))
		}),
		h.Internet.Do(func() error {
			return errors.Join(
				LargeSegments(),
				reversePath(), // of what comes by the narrow network
				up("wide0", Server.String()+"/24", Resolver.String()+"/24"), up("narrow0", Narrow.String()+"/24"), route("93.184.216.1"))
		}),
	} {
		if err != nil {
			return err
		}
	}
	return nil
}

func wireRouter() error {
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: RouterDevice, MTU: MTU}}); err != nil {
		return fmt.Errorf("make a bridge: %w", err)
	}
	bridge, err := netlink.LinkByName(RouterDevice)
	if err != nil {
		return err
	}
	for _, name := range []string{"port0", "port1", "port2"} {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetMaster(l, bridge); err != nil {
			return fmt.Errorf("join %s to the bridge: %w", name, err)
		}
		if err := up(name); err != nil {
			return err
		}
	}
	return errors.Join(
		up(RouterDevice, Router.String()+"/24"), up("wide0", "93.184.216.1/24"), up("narrow0", "93.184.217.1/24"),
		reversePath(), Sysctl("ipv4/ip_forward", "1"))
}

// reversePath lets packets in that come by another way than answers go.
func reversePath() error {
	return errors.Join(Sysctl("ipv4/conf/all/rp_filter", "0"), Sysctl("ipv4/conf/default/rp_filter", "0"))
}

// Left lists what there is in the host's namespace that wasn't there at first, and what is gone.
func (h *Host) Left() ([]string, error) {
	after, err := h.state()
	if err != nil {
		return nil, err
	}
	var left []string
	for _, s := range after {
		if !slices.Contains(h.clean, s) {
			left = append(left, s)
		}
	}
	for _, s := range h.clean {
		if !slices.Contains(after, s) {
			left = append(left, "gone: "+s)
		}
	}
	return left, nil
}

// Close ends the internet and lets go of all namespaces.
func (h *Host) Close() error {
	var errs []error
	if h.services != nil {
		h.services.close()
	}
	for _, n := range []*Namespace{h.Namespace, h.Router, h.Neighbours, h.Internet} {
		if n != nil && n.file != nil {
			errs = append(errs, n.Close())
		}
	}
	return errors.Join(errs...)
}
