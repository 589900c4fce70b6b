package trace

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/bpf/policy"
)

// Target is where a packet is for. ICMP has port 0.
type Target struct {
	Address  netip.Addr
	Port     uint16
	Protocol policy.Protocol
}

// ParseTarget reads ADDRESS[:PORT][/PROTOCOL]: tcp where there is a port, icmp where there is none.
func ParseTarget(s string) (t Target, err error) {
	refuse := func(why string) (Target, error) {
		return Target{}, fmt.Errorf("destination %q: %s: use for example 192.0.2.1, 192.0.2.1:443 or 192.0.2.1:53/udp: %w", s, why, errdefs.ErrInvalidArgument)
	}
	where, protocol, hasProtocol := strings.Cut(s, "/")
	address, port, hasPort := strings.Cut(where, ":")
	if t.Address, err = netip.ParseAddr(address); err != nil || !t.Address.Is4() {
		return refuse("it takes an IPv4 address")
	}
	switch {
	case hasProtocol:
	case hasPort:
		protocol = policy.TCP.String()
	default:
		protocol = policy.ICMP.String()
	}
	for _, p := range []policy.Protocol{policy.ICMP, policy.TCP, policy.UDP} {
		if p.String() == protocol {
			t.Protocol = p
		}
	}
	n, err := strconv.ParseUint(port, 10, 16)
	switch {
	case t.Protocol == 0:
		return refuse(fmt.Sprintf("protocol %q is none of tcp, udp and icmp", protocol))
	case t.Protocol == policy.ICMP && hasPort:
		return refuse("icmp has no ports")
	case t.Protocol != policy.ICMP && !hasPort:
		return refuse(protocol + " takes a port")
	case hasPort && (err != nil || n == 0):
		return refuse(fmt.Sprintf("port %q is not a number from 1 to 65535", port))
	}
	t.Port = uint16(n)
	return t, nil
}

func (t Target) String() string {
	s := t.Address.String()
	if t.Protocol != policy.ICMP {
		s += ":" + strconv.Itoa(int(t.Port))
	}
	return s + "/" + t.Protocol.String()
}
