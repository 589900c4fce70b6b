package gateway

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// What is marked for the proxy is for this host, whatever address it is for: a rule leads to a table that says so.

func proxyRule(n *config.Network) *netlink.Rule {
	r := netlink.NewRule()
	mask := n.MarkMask
	r.Family, r.Priority, r.Table, r.IifName, r.Mark, r.Mask = netlink.FAMILY_V4, n.RulePriority, n.RouteTable, n.Device, n.Marks().Proxy, &mask
	return r
}

func proxyRoute(n *config.Network, loopback int) *netlink.Route {
	return &netlink.Route{
		LinkIndex: loopback, Dst: ipNet(netip.PrefixFrom(netip.IPv4Unspecified(), 0)), Type: unix.RTN_LOCAL,
		Scope: unix.RT_SCOPE_HOST, Table: n.RouteTable, Protocol: unix.RTPROT_STATIC,
	}
}

// steering is what of it is there, and what else is in the table.
type steering struct {
	loopback    int
	rule, route bool
	foreign     []netlink.Route
}

func lookSteering(h *netlink.Handle, n *config.Network) (s steering, err error) {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return s, fmt.Errorf("look for device lo: %w", err)
	}
	s.loopback = lo.Attrs().Index
	have, err := list(func() ([]netlink.Rule, error) { return h.RuleList(netlink.FAMILY_V4) })
	if err != nil {
		return s, fmt.Errorf("list routing rules: %w", err)
	}
	want := proxyRule(n)
	for _, r := range have {
		s.rule = s.rule || r.Priority == want.Priority && r.Table == want.Table && r.IifName == want.IifName &&
			r.Mark == want.Mark && r.Mask != nil && *r.Mask == *want.Mask
	}
	routes, err := routes(h, n.RouteTable)
	if err != nil {
		return s, err
	}
	for _, r := range routes {
		if r.Type == unix.RTN_LOCAL && r.LinkIndex == s.loopback && isDefault(r.Dst) {
			s.route = true
			continue
		}
		s.foreign = append(s.foreign, r)
	}
	return s, nil
}

func ensureSteering(h *netlink.Handle, n *config.Network) error {
	s, err := lookSteering(h, n)
	if err != nil {
		return err
	}
	if len(s.foreign) > 0 {
		return fmt.Errorf("routing table %d has a route of somebody else's, %s: set network.route_table to another one: %w", n.RouteTable, describe(h, s.foreign[0]), errdefs.ErrAlreadyExists)
	}
	if !s.route {
		if err := h.RouteAdd(proxyRoute(n, s.loopback)); err != nil {
			return fmt.Errorf("add the egress proxy's route to table %d: %w", n.RouteTable, err)
		}
	}
	if !s.rule {
		if err := h.RuleAdd(proxyRule(n)); err != nil {
			return fmt.Errorf("add the egress proxy's routing rule with priority %d: %w", n.RulePriority, err)
		}
	}
	return nil
}

func removeSteering(h *netlink.Handle, n *config.Network) error {
	s, err := lookSteering(h, n)
	if err != nil {
		return err
	}
	var errs []error
	if s.rule {
		if err := h.RuleDel(proxyRule(n)); err != nil {
			errs = append(errs, fmt.Errorf("remove the egress proxy's routing rule with priority %d: %w", n.RulePriority, err))
		}
	}
	if s.route {
		if err := h.RouteDel(proxyRoute(n, s.loopback)); err != nil {
			errs = append(errs, fmt.Errorf("remove the egress proxy's route from table %d: %w", n.RouteTable, err))
		}
	}
	return errors.Join(errs...)
}

func diffSteering(h *netlink.Handle, n *config.Network) (diff []string, err error) {
	s, err := lookSteering(h, n)
	if err != nil {
		return nil, err
	}
	if !s.rule {
		diff = append(diff, fmt.Sprintf("the routing rule with priority %d for the egress proxy is missing", n.RulePriority))
	}
	if !s.route {
		diff = append(diff, fmt.Sprintf("the route in table %d for the egress proxy is missing", n.RouteTable))
	}
	for _, r := range s.foreign {
		diff = append(diff, fmt.Sprintf("routing table %d has a route of somebody else's, %s", n.RouteTable, describe(h, r)))
	}
	return diff, nil
}
