// Package network gives the guest the network that the host decides on: an address and a gateway on its one network card.
package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/cubesandbox/cube/guest-agent/api"
)

// ErrInvalid says that a network can't be like that.
var ErrInvalid = errors.New("invalid network")

const (
	// minMTU is what every IPv4 host takes (RFC 1122, 3.3.3), maxMTU what its length field can say.
	minMTU, maxMTU = 576, 1<<16 - 1
	// maxNameservers is how many resolvers look at (MAXNS of resolv.h).
	maxNameservers = 3
)

// Config is what the card has.
type Config struct {
	Address     netip.Prefix
	Gateway     netip.Addr
	GatewayMAC  net.HardwareAddr
	MTU         int
	Nameservers []netip.Addr
}

// Parse checks what the host has sent; nil, for no network, stays nil.
func Parse(n *api.Network) (*Config, error) {
	if n == nil {
		return nil, nil
	}
	c, err := parse(n)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return c, nil
}

func parse(n *api.Network) (c *Config, err error) {
	c = &Config{GatewayMAC: n.GatewayMac, MTU: int(n.Mtu)}
	if c.Address, err = netip.ParsePrefix(n.Address); err != nil || !unicast(c.Address.Addr()) {
		return nil, fmt.Errorf("%q is no IPv4 address with the length of a prefix", n.Address)
	}
	if c.Gateway, err = netip.ParseAddr(n.Gateway); err != nil || !unicast(c.Gateway) || c.Gateway == c.Address.Addr() {
		return nil, fmt.Errorf("%q is no IPv4 address of a gateway", n.Gateway)
	}
	if len(c.GatewayMAC) != 6 || c.GatewayMAC[0]&1 != 0 || slices.Equal(c.GatewayMAC, make([]byte, 6)) {
		return nil, fmt.Errorf("%q is no MAC address of a gateway", c.GatewayMAC)
	}
	if n.Mtu < minMTU || n.Mtu > maxMTU {
		return nil, fmt.Errorf("an MTU of %d, not %d to %d", n.Mtu, minMTU, maxMTU)
	}
	if len(n.Nameservers) > maxNameservers {
		return nil, fmt.Errorf("%d name servers are more than %d", len(n.Nameservers), maxNameservers)
	}
	for _, s := range n.Nameservers {
		a, err := netip.ParseAddr(s)
		if err != nil || !unicast(a) {
			return nil, fmt.Errorf("%q is no IPv4 address of a name server", s)
		}
		c.Nameservers = append(c.Nameservers, a)
	}
	return c, nil
}

func unicast(a netip.Addr) bool {
	return a.Is4() && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}
