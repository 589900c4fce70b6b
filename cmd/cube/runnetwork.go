package main

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/cni/ports"
)

// The values of --network.
const (
	cubeNetwork = "cube"
	noNetwork   = "none"
)

// runNetworkFlags are those of run that are about the network.
func runNetworkFlags() []cli.Flag {
	return append([]cli.Flag{
		&cli.StringFlag{Name: "network", Value: cubeNetwork, Usage: "`cube`, or none: no network at all"},
		&cli.StringSliceFlag{Name: "publish", Aliases: []string{"p"}, Usage: "lead a port of the host to one of the container's, as `PORTS` say, [ADDRESS:]PORT:PORT[/udp]; without an address only this host reaches it; may be repeated"},
	}, policyFlags()...)
}

// runNetwork is what the command line says of the container's network; nil is none.
func runNetwork(c *cli.Context) (*network.Settings, error) {
	switch c.String("network") {
	case cubeNetwork:
	case noNetwork:
		for _, flag := range []string{"publish", "no-internet", "allow", "deny"} {
			if c.IsSet(flag) {
				return nil, fmt.Errorf("--%s goes without --network none", flag)
			}
		}
		return nil, nil
	default:
		return nil, fmt.Errorf("--network %q is neither cube nor none", c.String("network"))
	}
	p, err := flaggedPolicy(c, policy.Direct)
	if err != nil {
		return nil, err
	}
	s := &network.Settings{Policy: p}
	for _, flag := range c.StringSlice("publish") {
		p, err := parsePort(flag)
		if err != nil {
			return nil, err
		}
		s.Ports = append(s.Ports, p)
	}
	return s, ports.Validate(s.Ports)
}

// parsePort reads [ADDRESS:]PORT:PORT[/PROTOCOL], the host's port first.
func parsePort(s string) (network.Port, error) {
	refuse := func(why string) (network.Port, error) {
		return network.Port{}, fmt.Errorf("--publish %q: %s: use for example 8080:80, 0.0.0.0:8080:80 or 5353:53/udp", s, why)
	}
	p := network.Port{HostIP: netip.AddrFrom4([4]byte{127, 0, 0, 1}), Protocol: ports.TCP}
	ends, protocol, hasProtocol := strings.Cut(s, "/")
	if hasProtocol {
		p.Protocol = protocol
	}
	if p.Protocol != ports.TCP && p.Protocol != ports.UDP {
		return refuse(fmt.Sprintf("protocol %q is neither tcp nor udp", protocol))
	}
	parts := strings.Split(ends, ":")
	if len(parts) == 3 {
		a, err := netip.ParseAddr(parts[0])
		if err != nil || !a.Is4() {
			return refuse(fmt.Sprintf("%q is not an IPv4 address", parts[0]))
		}
		p.HostIP, parts = a, parts[1:]
	}
	if len(parts) != 2 {
		return refuse("it takes a port of the host and one of the container")
	}
	for i, to := range []*uint16{&p.HostPort, &p.ContainerPort} {
		n, err := strconv.ParseUint(parts[i], 10, 16)
		if err != nil || n == 0 {
			return refuse(fmt.Sprintf("port %q is not a number from 1 to 65535", parts[i]))
		}
		*to = uint16(n)
	}
	return p, nil
}
