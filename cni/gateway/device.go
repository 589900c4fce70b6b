package gateway

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// MAC is the gateway device's address, and the gateway's to every guest. It is the same on all hosts, so that a guest that
// goes on on another one has the right one in its cache.
var MAC = net.HardwareAddr{0x02, 0x00, 0x00, 0x00, 0x00, 0x01}

// alias marks the device as ours.
const alias = "cube gateway"

func peerOf(dev string) string { return dev + "-peer" }

// find returns nil where there is no such device.
func find(h *netlink.Handle, name string) (netlink.Link, error) {
	l, err := h.LinkByName(name)
	var none netlink.LinkNotFoundError
	if errors.As(err, &none) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("look for device %s: %w", name, err)
	}
	return l, nil
}

func ours(l netlink.Link) bool { return l != nil && l.Attrs().Alias == alias && l.Type() == "veth" }

// ensureDevice makes the device, or makes it right: its addresses, routes and settings. It is up at the end, never before.
func ensureDevice(h *netlink.Handle, n *config.Network, mtu int) (netlink.Link, error) {
	l, err := find(h, n.Device)
	if err != nil {
		return nil, err
	}
	peer, err := find(h, peerOf(n.Device))
	if err != nil {
		return nil, err
	}
	if l != nil && !ours(l) {
		return nil, fmt.Errorf("device %s is there and not Cube's: remove it, or set network.device to another name: %w", n.Device, errdefs.ErrAlreadyExists)
	}
	if l != nil && peer == nil { // renamed or moved away: what goes out on l comes in somewhere else
		if err := h.LinkDel(l); err != nil {
			return nil, fmt.Errorf("remove %s, whose peer has gone: %w", n.Device, err)
		}
		l = nil
	}
	if l == nil {
		if l, peer, err = makeDevice(h, n, mtu); err != nil {
			return nil, err
		}
	}
	if l.Attrs().MasterIndex != 0 {
		if err := h.LinkSetNoMaster(l); err != nil {
			return nil, fmt.Errorf("take %s out of another device: %w", n.Device, err)
		}
	}
	if err := setMTU(h, l, peer, mtu); err != nil {
		return nil, err
	}
	if a := l.Attrs(); !bytes.Equal(a.HardwareAddr, MAC) {
		if err := h.LinkSetHardwareAddr(l, MAC); err != nil {
			return nil, fmt.Errorf("set the MAC address of %s: %w", n.Device, err)
		}
	}
	if err := h.LinkSetARPOff(l); err != nil {
		return nil, fmt.Errorf("turn ARP off on %s: %w", n.Device, err)
	}
	for _, s := range present(settings(n.Device)) {
		if err := setSysctl(s.key, s.value); err != nil {
			return nil, err
		}
	}
	if err := h.LinkSetUp(peer); err != nil {
		return nil, fmt.Errorf("set %s up: %w", peerOf(n.Device), err)
	}
	if err := h.AddrReplace(l, gatewayAddr(n)); err != nil {
		return nil, fmt.Errorf("give %s the address %s: %w", n.Device, n.Gateway(), err)
	}
	if err := h.LinkSetUp(l); err != nil {
		return nil, fmt.Errorf("set %s up: %w", n.Device, err)
	}
	if err := h.RouteReplace(poolRoute(n, l.Attrs().Index)); err != nil {
		return nil, fmt.Errorf("route %s to %s: %w", n.Pool, n.Device, err)
	}
	return l, nil
}

func makeDevice(h *netlink.Handle, n *config.Network, mtu int) (l, peer netlink.Link, err error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = n.Device, mtu, MAC
	v := &netlink.Veth{LinkAttrs: attrs, PeerName: peerOf(n.Device), PeerMTU: uint32(mtu)}
	if err := h.LinkAdd(v); err != nil {
		return nil, nil, fmt.Errorf("make devices %s and %s: %w", n.Device, peerOf(n.Device), err)
	}
	l, err = h.LinkByName(n.Device)
	if err == nil {
		err = h.LinkSetAlias(l, alias)
	}
	if err == nil {
		peer, err = h.LinkByName(peerOf(n.Device))
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("mark device %s as Cube's: %w", n.Device, err), h.LinkDel(v))
	}
	return l, peer, nil
}

func setMTU(h *netlink.Handle, l, peer netlink.Link, mtu int) error {
	for _, l := range []netlink.Link{l, peer} {
		if l.Attrs().MTU == mtu {
			continue
		}
		if err := h.LinkSetMTU(l, mtu); err != nil {
			return fmt.Errorf("set the MTU of %s to %d: %w", l.Attrs().Name, mtu, err)
		}
	}
	return nil
}

func gatewayAddr(n *config.Network) *netlink.Addr {
	return &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(n.Gateway(), 32)), Scope: unix.RT_SCOPE_UNIVERSE}
}

func poolRoute(n *config.Network, index int) *netlink.Route {
	return &netlink.Route{
		LinkIndex: index, Dst: ipNet(n.Pool), Src: n.Gateway().AsSlice(),
		Scope: unix.RT_SCOPE_LINK, Table: unix.RT_TABLE_MAIN, Protocol: unix.RTPROT_STATIC,
	}
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// diffDevice says in what the device isn't as it should be.
func diffDevice(h *netlink.Handle, n *config.Network, mtu int) (diff []string, err error) {
	l, err := find(h, n.Device)
	if err != nil {
		return nil, err
	}
	if !ours(l) {
		return []string{"device " + n.Device + " is missing"}, nil
	}
	say := func(wrong bool, format string, args ...any) {
		if wrong {
			diff = append(diff, "device "+n.Device+" "+fmt.Sprintf(format, args...))
		}
	}
	a := l.Attrs()
	say(a.RawFlags&unix.IFF_UP == 0, "is down")
	say(a.RawFlags&unix.IFF_UP != 0 && a.RawFlags&unix.IFF_LOWER_UP == 0, "has no carrier: %s is down", peerOf(n.Device))
	say(a.RawFlags&unix.IFF_NOARP == 0, "speaks ARP")
	say(!bytes.Equal(a.HardwareAddr, MAC), "has the MAC address %s and not %s", a.HardwareAddr, MAC)
	peer, err := find(h, peerOf(n.Device))
	if err != nil {
		return nil, err
	}
	say(peer == nil, "has lost its peer %s", peerOf(n.Device))
	say(a.MasterIndex != 0, "is part of another device")
	say(a.MTU != mtu, "has an MTU of %d, the uplink %d", a.MTU, mtu)
	addrs, err := h.AddrList(l, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("list the addresses of %s: %w", n.Device, err)
	}
	has := false
	for _, x := range addrs {
		has = has || x.IPNet.String() == gatewayAddr(n).IPNet.String()
	}
	say(!has, "hasn't the address %s", n.Gateway())
	routes, err := h.RouteListFiltered(netlink.FAMILY_V4, poolRoute(n, a.Index), netlink.RT_FILTER_OIF|netlink.RT_FILTER_DST)
	if err != nil {
		return nil, fmt.Errorf("list the routes to %s: %w", n.Device, err)
	}
	say(len(routes) == 0, "has no route of %s", n.Pool)
	for _, s := range present(settings(n.Device)) {
		if v, err := getSysctl(s.key); err != nil || v != s.value {
			diff = append(diff, fmt.Sprintf("%s/%s is %q and not %s", sysctls, s.key, v, s.value))
		}
	}
	return diff, nil
}
