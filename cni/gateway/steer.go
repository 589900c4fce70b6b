package gateway

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/whole"
)

// What is marked for the proxy is for this host, whatever address it is for: a rule leads to a table that says so. What is
// marked for the resolver and has not become the gateway's by then is dropped, as nothing but the nftables rules, which
// somebody may flush, would keep it from where it is for.

func proxyRule(n *config.Network) *netlink.Rule {
	r := markRule(n, n.Marks().Proxy)
	r.Table = n.RouteTable
	return r
}

func resolverRule(n *config.Network) *netlink.Rule {
	r := markRule(n, n.Marks().Resolver)
	r.Type = unix.RTN_BLACKHOLE
	return r
}

func markRule(n *config.Network, mark uint32) *netlink.Rule {
	r := netlink.NewRule()
	mask := n.MarkMask
	r.Family, r.Priority, r.IifName, r.Mark, r.Mask = netlink.FAMILY_V4, n.RulePriority, n.Device, mark, &mask
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
	loopback               int
	proxy, resolver, route bool
	foreign                []netlink.Route
}

// rules are those that are to be there, with whether they are and what they are for.
func (s *steering) rules(n *config.Network) []steeringRule {
	return []steeringRule{{proxyRule(n), &s.proxy, "the egress proxy"}, {resolverRule(n), &s.resolver, "the DNS forwarder"}}
}

type steeringRule struct {
	*netlink.Rule
	there *bool
	what  string
}

func lookSteering(h *netlink.Handle, n *config.Network) (s steering, err error) {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return s, fmt.Errorf("look for device lo: %w", err)
	}
	s.loopback = lo.Attrs().Index
	have, err := whole.List(func() ([]netlink.Rule, error) { return h.RuleList(netlink.FAMILY_V4) })
	if err != nil {
		return s, fmt.Errorf("list routing rules: %w", err)
	}
	for _, want := range s.rules(n) {
		for _, r := range have {
			// The library doesn't tell of a rule's type; the one that drops is the one without a table.
			*want.there = *want.there || r.Priority == want.Priority && max(r.Table, 0) == max(want.Table, 0) &&
				r.IifName == want.IifName && r.Mark == want.Mark && r.Mask != nil && *r.Mask == *want.Mask
		}
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
	for _, r := range s.rules(n) {
		if *r.there {
			continue
		}
		if err := h.RuleAdd(r.Rule); err != nil {
			return fmt.Errorf("add the routing rule with priority %d for %s: %w", n.RulePriority, r.what, err)
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
	for _, r := range s.rules(n) {
		if !*r.there {
			continue
		}
		if err := h.RuleDel(r.Rule); err != nil {
			errs = append(errs, fmt.Errorf("remove the routing rule with priority %d for %s: %w", n.RulePriority, r.what, err))
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
	for _, r := range s.rules(n) {
		if !*r.there {
			diff = append(diff, fmt.Sprintf("the routing rule with priority %d for %s is missing", n.RulePriority, r.what))
		}
	}
	if !s.route {
		diff = append(diff, fmt.Sprintf("the route in table %d for the egress proxy is missing", n.RouteTable))
	}
	for _, r := range s.foreign {
		diff = append(diff, fmt.Sprintf("routing table %d has a route of somebody else's, %s", n.RouteTable, describe(h, r)))
	}
	return diff, nil
}
