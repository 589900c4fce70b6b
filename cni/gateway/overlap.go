package gateway

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/whole"
)

// everywhere is the shortest prefix of a route to some place: shorter ones are halves and quarters of a default route, as
// VPNs have them.
const everywhere = 8

// checkPool refuses a pool that is in use on this host: sandboxes' addresses would take it over, or get nothing.
func checkPool(h *netlink.Handle, n *config.Network) error {
	own, err := find(h, n.Device)
	if err != nil {
		return err
	}
	addrs, err := whole.List(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		if p := prefix(a.IPNet); p.Overlaps(n.Pool) && (own == nil || a.LinkIndex != own.Attrs().Index) {
			return overlap(n, fmt.Sprintf("the address %s of device %s", p, deviceName(h, a.LinkIndex)))
		}
	}
	routes, err := routes(h, unix.RT_TABLE_UNSPEC)
	if err != nil {
		return err
	}
	for _, r := range routes {
		p := prefix(r.Dst)
		if p.Bits() < everywhere || !p.Overlaps(n.Pool) || own != nil && r.LinkIndex == own.Attrs().Index {
			continue
		}
		return overlap(n, "the route "+describe(h, r))
	}
	return nil
}

// routes lists a table's IPv4 routes, RT_TABLE_UNSPEC all tables'.
func routes(h *netlink.Handle, table int) ([]netlink.Route, error) {
	all, err := whole.List(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("list the routes of table %d: %w", table, err)
	}
	return all, nil
}

func overlap(n *config.Network, what string) error {
	return fmt.Errorf("network.pool = %q overlaps with %s: set network.pool to addresses that this host doesn't use: %w", n.Pool, what, errdefs.ErrFailedPrecondition)
}

// prefix is 0.0.0.0/0 for nil, as routes have it.
func prefix(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	a, _ := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(a.Unmap(), ones)
}

func isDefault(n *net.IPNet) bool { return prefix(n).Bits() == 0 }

// describe names a route like ip(8) does.
func describe(h *netlink.Handle, r netlink.Route) string {
	s := prefix(r.Dst).String()
	if r.Gw != nil {
		s += " via " + r.Gw.String()
	}
	switch {
	case r.LinkIndex != 0:
		s += " dev " + deviceName(h, r.LinkIndex)
	case len(r.MultiPath) > 0:
		s += " dev " + deviceName(h, r.MultiPath[0].LinkIndex) + " and others"
	default:
		s += " without a device"
	}
	if r.Table != unix.RT_TABLE_MAIN && r.Table != unix.RT_TABLE_LOCAL {
		s += " table " + strconv.Itoa(r.Table)
	}
	return s
}

func deviceName(h *netlink.Handle, index int) string {
	l, err := h.LinkByIndex(index)
	if err != nil {
		return "number " + strconv.Itoa(index) // it has gone since
	}
	return l.Attrs().Name
}
