package e2b

import (
	"net/netip"
	"regexp"
	"strings"

	"github.com/cubesandbox/cube/orchestrator/e2b/jsonbody"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

const (
	// maxDestinations bounds allowOut and denyOut each.
	maxDestinations = 1000
	maxHTTPSPorts   = 64
	portPlaceholder = "${PORT}"
)

var (
	domainForm = regexp.MustCompile(`^(\*|[A-Za-z0-9_-]*[A-Za-z_][A-Za-z0-9_-]*)(\.[A-Za-z0-9_-]+)*\.?$|^(\*\.)?([A-Za-z0-9_-]+\.)+[A-Za-z][A-Za-z0-9_-]*\.?$`)
	// hostForm is a host with or without a port.
	hostForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,252})(:[0-9]{1,5})?$`)
)

// readNetwork reads what a sandbox is created with.
func readNetwork(n *jsonbody.Object) lifecycle.Network {
	net := readEgress(n)
	if public := n.Bool("allowPublicTraffic", true); n.Has("allowPublicTraffic") {
		net.AllowPublicTraffic = &public
	}
	net.MaskRequestHost = n.String("maskRequestHost")
	if h := net.MaskRequestHost; h != "" && !hostForm.MatchString(strings.ReplaceAll(h, portPlaceholder, "65535")) {
		n.Fail("maskRequestHost", "%s isn't a host, with or without a port; %s in it is the port that is asked for", quote(h), portPlaceholder)
	}
	net.HTTPSPorts = n.Ints("httpsPorts", 1, 65535)
	if len(net.HTTPSPorts) > maxHTTPSPorts {
		n.Fail("httpsPorts", "there are %d, there can be %d", len(net.HTTPSPorts), maxHTTPSPorts)
	}
	return net
}

// readEgress reads what can be changed while a sandbox runs.
func readEgress(n *jsonbody.Object) lifecycle.Network {
	n.Refuse("egressProxy", notYet)
	n.Refuse("rules", notYet)
	return lifecycle.Network{AllowOut: destinations(n, "allowOut"), DenyOut: destinations(n, "denyOut")}
}

// destinations are IPv4 addresses and CIDRs.
func destinations(n *jsonbody.Object, name string) []string {
	all := n.Strings(name)
	if len(all) > maxDestinations {
		n.Fail(name, "there are %d entries, there can be %d", len(all), maxDestinations)
		return nil
	}
	for i, s := range all {
		p, err := netip.ParsePrefix(s)
		if addr, addrErr := netip.ParseAddr(s); addrErr == nil {
			p, err = netip.PrefixFrom(addr, addr.BitLen()), nil
		}
		at := jsonbody.Index(name, i)
		switch {
		case err != nil && domainForm.MatchString(s):
			n.Fail(at, "%s is a domain, and those aren't supported here: only IPv4 addresses and CIDRs are", quote(s))
		case err != nil:
			n.Fail(at, "%s isn't an IPv4 address or CIDR", quote(s))
		case !p.Addr().Is4():
			n.Fail(at, "%s isn't IPv4, which is all that sandboxes have", quote(s))
		case p != p.Masked():
			n.Fail(at, "%s has bits set behind its length, %s would be right", quote(s), p.Masked())
		}
	}
	return all
}

func (s *Server) updateNetwork(c *call, id string) (answer, error) {
	net := readEgress(c.body)
	allow := readAllowInternet(c.body)
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	return done, s.engine.UpdateNetwork(c.ctx, c.team, id, net, allow)
}
