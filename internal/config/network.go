package config

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"path/filepath"
	"regexp"
)

// Network is where sandboxes are in this host's network, and the names and numbers there that are Cube's own. Everything
// outside of them is somebody else's and is left alone.
type Network struct {
	// Pool holds one address of the host's for each sandbox, and the gateway's, which is the last one.
	Pool netip.Prefix `toml:"pool"`
	// Device is the gateway device, by which all sandboxes' packets come and go. Its peer has the same name with "-peer".
	Device string `toml:"device"`
	// TapPrefix, with a number after it, is the name of a sandbox's tap.
	TapPrefix string `toml:"tap_prefix"`
	// WarmTaps is how many taps are kept ready for sandboxes to come.
	WarmTaps int `toml:"warm_taps"`
	// NFTable is the nftables table (family inet) that holds all of Cube's rules.
	NFTable string `toml:"nft_table"`
	// MarkMask is the bits of packet marks that are Cube's: at least three, side by side.
	MarkMask uint32 `toml:"mark_mask"`
	// RouteTable sends what is marked for the proxy to it, by a rule of RulePriority. Another one has what is marked for the
	// resolver go nowhere else.
	RouteTable   int `toml:"route_table"`
	RulePriority int `toml:"rule_priority"`
	// ProxyPort of 127.0.0.1 is where the egress proxy listens, DNSPort of the gateway's address where the DNS forwarder does.
	ProxyPort uint16 `toml:"proxy_port"`
	DNSPort   uint16 `toml:"dns_port"`
	// DNSUpstreams are name servers, "ADDRESS" or "ADDRESS:PORT"; none: those of /etc/resolv.conf.
	DNSUpstreams []Upstream `toml:"dns_upstreams"`
	// MaxFlows is how many connections a sandbox has at a time.
	MaxFlows uint32 `toml:"max_flows"`
	// Openings are what sandboxes may reach of the addresses that no policy opens: the host's own, its networks, private ones.
	Openings []Opening `toml:"openings"`
}

// Opening is a prefix or address with ports of it, all if there are none, and a protocol: tcp, udp, icmp or any, as is "".
type Opening struct {
	To       string   `toml:"to"`
	Ports    []string `toml:"ports"`
	Protocol string   `toml:"protocol"`
}

// Marks are values of the bits of a packet's mark that are Cube's. None is 0.
type Marks struct {
	Mask     uint32
	Direct   uint32 // from a sandbox, may be forwarded
	Proxy    uint32 // from a sandbox, for the egress proxy only
	Resolver uint32 // from a sandbox, for the DNS forwarder only
	Guest    uint32 // to a sandbox
}

func defaultNetwork() Network {
	return Network{
		Pool:         netip.MustParsePrefix("10.200.0.0/16"),
		Device:       "cube-gw",
		TapPrefix:    "cube-tap",
		WarmTaps:     8,
		NFTable:      "cube",
		MarkMask:     0x0f000000,
		RouteTable:   3262,
		RulePriority: 1000,
		ProxyPort:    10443,
		DNSPort:      10053,
		MaxFlows:     4096,
	}
}

// Names are at most 15 bytes in the kernel, with "-peer".
var deviceName = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,9}$`)

var tableName = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,30}$`)

func (n *Network) validate() error {
	switch m := n.MarkMask; {
	case !n.Pool.IsValid() || !n.Pool.Addr().Is4() || n.Pool.Bits() < 8 || n.Pool.Bits() > 24 || n.Pool != n.Pool.Masked():
		return fmt.Errorf("network.pool = %q must be an IPv4 network of /8 to /24, without host bits", n.Pool)
	case !n.Pool.Addr().IsGlobalUnicast() || n.Pool.Addr().As4()[0] == 0 || n.Pool.Addr().As4()[0] >= 240:
		return fmt.Errorf("network.pool = %q must be of addresses that hosts can have", n.Pool)
	case !deviceName.MatchString(n.Device):
		return fmt.Errorf("network.device = %q must be at most 10 letters, digits, - and _, and begin with a letter", n.Device)
	case !deviceName.MatchString(n.TapPrefix) || n.TapPrefix == n.Device:
		return fmt.Errorf("network.tap_prefix = %q must be at most 10 letters, digits, - and _, begin with a letter, and differ from network.device", n.TapPrefix)
	case n.WarmTaps < 0 || n.WarmTaps > 1024:
		return fmt.Errorf("network.warm_taps = %d must be between 0 and 1024", n.WarmTaps)
	case !tableName.MatchString(n.NFTable):
		return fmt.Errorf("network.nft_table = %q must be at most 31 letters, digits, - and _, and begin with a letter", n.NFTable)
	case bits.OnesCount32(m) < 3 || bits.Len32(m)-bits.TrailingZeros32(m) != bits.OnesCount32(m):
		return fmt.Errorf("network.mark_mask = %#x must be three bits or more, side by side", m)
	case n.RouteTable < 1 || n.RouteTable >= 1<<31 || n.RouteTable >= 253 && n.RouteTable <= 255:
		return fmt.Errorf("network.route_table = %d must be between 1 and 2^31-1, and none of 253 to 255, which are the kernel's", n.RouteTable)
	case n.RulePriority < 1 || n.RulePriority >= 32766:
		return fmt.Errorf("network.rule_priority = %d must be between 1 and 32765, before the main table's", n.RulePriority)
	case n.ProxyPort == 0 || n.DNSPort == 0 || n.ProxyPort == n.DNSPort:
		return fmt.Errorf("network.proxy_port = %d and network.dns_port = %d must be two different ports", n.ProxyPort, n.DNSPort)
	case n.MaxFlows < 16 || n.MaxFlows > 1<<20:
		return fmt.Errorf("network.max_flows = %d must be between 16 and %d", n.MaxFlows, 1<<20)
	case len(n.DNSUpstreams) > 8:
		return fmt.Errorf("network.dns_upstreams has %d entries, at most 8 are used", len(n.DNSUpstreams))
	}
	for _, u := range n.DNSUpstreams {
		if n.Pool.Contains(u.Addr()) {
			return fmt.Errorf("network.dns_upstreams: %s is in network.pool", u)
		}
	}
	return nil
}

// Marks returns the values of marks.
func (n *Network) Marks() Marks {
	one := n.MarkMask & -n.MarkMask
	return Marks{Mask: n.MarkMask, Direct: one, Proxy: 2 * one, Resolver: 3 * one, Guest: 4 * one}
}

// Gateway is the gateway device's address: the last of the pool but for the broadcast address.
func (n *Network) Gateway() netip.Addr {
	a := n.Pool.Addr().As4()
	last := uint32(a[0])<<24 | uint32(a[1])<<16 | uint32(a[2])<<8 | uint32(a[3]) | (1<<(32-n.Pool.Bits()) - 1)
	last--
	return netip.AddrFrom4([4]byte{byte(last >> 24), byte(last >> 16), byte(last >> 8), byte(last)})
}

// NetworkDir holds what the network remembers of the host until it is taken down.
func (c *Config) NetworkDir() string { return filepath.Join(c.RunDir, "network") }

// Upstream is a name server's address and port, 53 where none is written.
type Upstream struct{ netip.AddrPort }

// UnmarshalText reads an address with or without a port.
func (u *Upstream) UnmarshalText(b []byte) error {
	if a, err := netip.ParseAddr(string(b)); err == nil {
		u.AddrPort = netip.AddrPortFrom(a, 53)
	} else if u.AddrPort, err = netip.ParseAddrPort(string(b)); err != nil {
		return fmt.Errorf("%q is not an address of a name server (use for example 192.0.2.53 or 192.0.2.53:5353)", b)
	}
	if a := u.Addr(); a.IsUnspecified() || a.IsMulticast() || u.Port() == 0 {
		return errors.New(u.String() + " is not an address of a name server")
	}
	return nil
}
