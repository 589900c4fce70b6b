package policy

import (
	"fmt"
	"net/netip"

	"github.com/containerd/errdefs"
	"github.com/gaissmai/bart"
)

// reserved are the networks that nothing on the internet has (RFC 6890 and the registry it started), with link-local
// addresses, where clouds have their metadata services, and a metadata service that has an address outside of those.
var reserved = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("10.0.0.0/8"),
	netip.MustParsePrefix("100.64.0.0/10"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("168.63.129.16/32"),
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("172.16.0.0/12"),
	netip.MustParsePrefix("192.0.0.0/24"),
	netip.MustParsePrefix("192.0.2.0/24"),
	netip.MustParsePrefix("192.88.99.0/24"),
	netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("198.18.0.0/15"),
	netip.MustParsePrefix("198.51.100.0/24"),
	netip.MustParsePrefix("203.0.113.0/24"),
	netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("240.0.0.0/4"),
}

// unopenable are no single host's addresses, or this one's loopback.
var unopenable = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("240.0.0.0/4"),
}

// guard is a Guard that was understood.
type guard struct {
	denied   bart.Lite
	openings []match
}

func (g Guard) parse() (*guard, error) {
	parsed := &guard{}
	for _, p := range reserved {
		parsed.denied.Insert(p)
	}
	for _, p := range g.Denied {
		if !p.IsValid() || !p.Addr().Is4() {
			return nil, fmt.Errorf("hard-denied prefix %s: it takes an IPv4 prefix: %w", p, errdefs.ErrInvalidArgument)
		}
		parsed.denied.Insert(p.Masked())
	}
	for i, o := range g.Openings {
		m, err := parseMatch(o.To, o.Ports, o.Protocol)
		for _, p := range unopenable {
			if err == nil && p.Overlaps(m.prefix) {
				err = fmt.Errorf("%s can't be opened", p)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("opening %d (%s): %w: %w", i+1, o, err, errdefs.ErrInvalidArgument)
		}
		parsed.openings = append(parsed.openings, m)
	}
	return parsed, nil
}
