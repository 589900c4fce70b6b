package plugin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
)

// netConf is the plugin's part of a network configuration.
type netConf struct {
	types.PluginConf
	// CubeConfig is the path of Cube's configuration; "": where all of Cube looks for it.
	CubeConfig string `json:"cubeConfig"`
	// Policy, as port mappings, is ADD's alone to read: a container must be removable, whatever became of the configuration
	// since.
	Policy        json.RawMessage `json:"policy"`
	RuntimeConfig struct {
		Bandwidth    *bandwidth      `json:"bandwidth"`
		PortMappings json.RawMessage `json:"portMappings"`
	} `json:"runtimeConfig"`
}

// bandwidth is of the container's traffic, ingress that to it, in bits a second, and in bits at once.
type bandwidth struct {
	IngressRate  uint64 `json:"ingressRate"`
	IngressBurst uint64 `json:"ingressBurst"`
	EgressRate   uint64 `json:"egressRate"`
	EgressBurst  uint64 `json:"egressBurst"`
}

func parse(stdin []byte) (*netConf, error) {
	c := &netConf{}
	if err := json.Unmarshal(stdin, c); err != nil {
		return nil, fmt.Errorf("network configuration: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return c, nil
}

// policy returns nil for a configuration that has none.
func (c *netConf) policy() (p *policy.Policy, err error) {
	if len(c.Policy) > 0 {
		err = json.Unmarshal(c.Policy, &p)
	}
	return p, err
}

// ports returns the host's ports that are to lead to the container. What a runtime may leave out is as the portmap plugin has
// it: all of the host's addresses, and TCP.
func (c *netConf) ports() (all []network.Port, err error) {
	if len(c.RuntimeConfig.PortMappings) == 0 {
		return nil, nil
	}
	if err := json.Unmarshal(c.RuntimeConfig.PortMappings, &all); err != nil {
		return nil, fmt.Errorf("portMappings: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	for i := range all {
		p := &all[i]
		if !p.HostIP.IsValid() {
			p.HostIP = netip.IPv4Unspecified()
		}
		p.Protocol = cmp.Or(strings.ToLower(p.Protocol), "tcp")
	}
	return all, nil
}

// limits returns what the runtime asks for, in bytes.
func (c *netConf) limits() (tx, rx bpf.Rate, err error) {
	b := c.RuntimeConfig.Bandwidth
	if b == nil {
		return tx, rx, nil
	}
	if tx, err = rate("egress", b.EgressRate, b.EgressBurst); err != nil {
		return tx, rx, err
	}
	rx, err = rate("ingress", b.IngressRate, b.IngressBurst)
	return tx, rx, err
}

// Bounds of a burst, in bytes: a frame of 64 KiB with all around it must fit, and what is more than 4 GiB is no limit.
const minBurst, maxBurst = 1 << 17, 1 << 32

func rate(what string, rate, burst uint64) (bpf.Rate, error) {
	if rate == 0 {
		return bpf.Rate{}, nil
	}
	if rate < 8 {
		return bpf.Rate{}, fmt.Errorf("bandwidth: %sRate is %d bits a second; it takes 8 or more: %w", what, rate, errdefs.ErrInvalidArgument)
	}
	return bpf.Rate{PerSecond: min(rate/8, 1<<40), Burst: min(max(burst/8, minBurst), maxBurst)}, nil
}

// refuse names what the plugin can't do for a container that is to be added.
func (c *netConf) refuse() error {
	switch {
	case len(c.DNS.Nameservers) > 0:
		return fmt.Errorf("dns.nameservers: containers' queries go to the host's forwarder; set network.dns_upstreams in Cube's configuration: %w", errdefs.ErrInvalidArgument)
	case c.IPAM.Type != "":
		return fmt.Errorf("ipam.type %q: addresses are of network.pool in Cube's configuration: %w", c.IPAM.Type, errdefs.ErrInvalidArgument)
	}
	return nil
}
