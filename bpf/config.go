package bpf

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/containerd/errdefs"
)

// Config is what a datapath is opened with. All of it but Dir may differ from the process before: it holds for a hook from
// when it is attached again.
type Config struct {
	// Dir is where the BPF file system is mounted, absolute. The directory is made, and removed by Remove.
	Dir     string
	Gateway Gateway
	Marks   Marks
	// Echo bounds what a sandbox can send by ICMP echo requests.
	Echo Echo
	// Events bounds how many drops of each sandbox are reported. All are counted.
	Events Rate
	// Clsact has programs attached as filters of a clsact qdisc, as is done anyway where the kernel has no TCX (before 6.6).
	Clsact bool
}

// Gateway is the device that sandboxes' packets come into the host's network by, and go to them.
type Gateway struct {
	Ifindex int
	IP      netip.Addr // as the guests know it
	MAC     net.HardwareAddr
}

// Marks are the values of the bits of a packet's mark that are the datapath's. They differ, and none is 0.
type Marks struct {
	Mask     uint32
	Direct   uint32 // from a sandbox, to be forwarded
	Proxy    uint32 // from a sandbox, for the proxy only
	Resolver uint32 // from a sandbox, for the resolver only
	Guest    uint32 // to a sandbox
}

// Echo bounds echo requests.
type Echo struct {
	MaxPayload uint32 // bytes
	Rate       Rate
}

// Rate is a token bucket: so many tokens a second, and Burst at once. The zero value is no limit.
type Rate struct {
	PerSecond uint64 `json:"perSecond"`
	Burst     uint64 `json:"burst"`
}

func (r Rate) validate(what string, largest uint64) error {
	if r == (Rate{}) {
		return nil
	}
	if r.PerSecond == 0 || r.PerSecond > 1<<40 || r.Burst < largest || r.Burst > 1<<32 {
		return fmt.Errorf("%s: %d a second, %d at once; it takes 1 to 2^40 a second and %d to 2^32 at once: %w", what, r.PerSecond, r.Burst, largest, errdefs.ErrInvalidArgument)
	}
	return nil
}

// kernel returns the bucket as the programs have it, which count its size in time.
func (r Rate) kernel() dpRate {
	if r == (Rate{}) {
		return dpRate{}
	}
	// Each token's time is rounded down in the programs, that of all at once is rounded up.
	return dpRate{PerSecond: r.PerSecond, BurstNs: uint64(float64(r.Burst)*1e9/float64(r.PerSecond)) + 1}
}

func (c Config) validate() error {
	if !filepath.IsAbs(c.Dir) || filepath.Clean(c.Dir) != c.Dir || c.Dir == "/" {
		return fmt.Errorf("directory %q of the datapath is not a clean absolute path: %w", c.Dir, errdefs.ErrInvalidArgument)
	}
	g := c.Gateway
	if g.Ifindex <= 0 || !g.IP.Is4() || !validMAC(g.MAC) {
		return fmt.Errorf("gateway device %d, address %v, MAC %v: it takes a device, an IPv4 and a unicast MAC address: %w", g.Ifindex, g.IP, g.MAC, errdefs.ErrInvalidArgument)
	}
	if err := c.Echo.Rate.validate("echo requests", 1); err != nil {
		return err
	}
	if err := c.Events.validate("drop events", 1); err != nil {
		return err
	}
	return c.Marks.validate()
}

func (m Marks) validate() error {
	seen := map[uint32]bool{}
	for _, v := range []uint32{m.Direct, m.Proxy, m.Resolver, m.Guest} {
		if v == 0 || v&^m.Mask != 0 || seen[v] {
			return fmt.Errorf("mark %#x with mask %#x: marks take four different values within the mask, none of them 0: %w", v, m.Mask, errdefs.ErrInvalidArgument)
		}
		seen[v] = true
	}
	return nil
}

// set puts the configuration into the programs' constants.
func (c Config) set(spec *ebpf.CollectionSpec) error {
	echo, events := c.Echo.Rate.kernel(), c.Events.kernel()
	for name, value := range map[string]any{
		dpVarGatewayIfindex:  uint32(c.Gateway.Ifindex),
		dpVarGatewayIp:       ip4(c.Gateway.IP),
		dpVarGatewayMac:      [6]byte(c.Gateway.MAC),
		dpVarMarkMask:        c.Marks.Mask,
		dpVarMarkDirect:      c.Marks.Direct,
		dpVarMarkProxy:       c.Marks.Proxy,
		dpVarMarkResolver:    c.Marks.Resolver,
		dpVarMarkGuest:       c.Marks.Guest,
		dpVarEchoMaxPayload:  c.Echo.MaxPayload,
		dpVarEchoPerSecond:   echo.PerSecond,
		dpVarEchoBurstNs:     echo.BurstNs,
		dpVarEventsPerSecond: events.PerSecond,
		dpVarEventsBurstNs:   events.BurstNs,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set constant %s: %w", name, err)
		}
	}
	return nil
}

func validMAC(mac net.HardwareAddr) bool {
	return len(mac) == 6 && mac[0]&1 == 0 && !bytes.Equal(mac, make([]byte, 6))
}
