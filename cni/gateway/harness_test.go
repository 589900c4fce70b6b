package gateway

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

const (
	wait     = 30 * time.Second // for what happens
	nothing  = 700 * time.Millisecond
	internet = "203.0.113.10"
	uplinkIP = "198.51.100.2"
)

// host is a network namespace that stands for a host, with an uplink to another one that stands for the internet.
type host struct {
	t        *testing.T
	cfg      *config.Config
	ns       netns.NsHandle
	internet netns.NsHandle
}

// newHost puts the test's goroutine into a namespace of its own, for good.
func newHost(t *testing.T) *host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: network namespaces take root")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	h := &host{t: t, internet: newNamespace(t), ns: newNamespace(t), cfg: config.Default()}
	h.cfg.RunDir = t.TempDir()
	must(t, netns.Set(h.ns))
	veth(t, h.ns, "up0", net.HardwareAddr{2, 0, 0, 0, 1, 1}, uplinkIP+"/24", h.internet, "eth0", net.HardwareAddr{2, 0, 0, 0, 1, 2}, "198.51.100.1/24")
	in(t, h.internet, func() { address4(t, "lo", internet+"/32") })
	must(t, netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("198.51.100.1")}))
	must(t, setSysctl(ipForward, "1"))
	return h
}

func (h *host) up() *Gateway {
	h.t.Helper()
	g, err := Up(h.t.Context(), h.cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = g.Close() })
	return g
}

func (h *host) down() {
	h.t.Helper()
	must(h.t, Down(h.t.Context(), h.cfg))
}

// found lists what Check finds of some levels.
func (h *host) found(levels ...Level) (out []Finding) {
	h.t.Helper()
	all, err := Check(h.t.Context(), h.cfg)
	must(h.t, err)
	for _, f := range all {
		for _, l := range levels {
			if f.Level == l {
				out = append(out, f)
			}
		}
	}
	return out
}

// guest makes a namespace that stands for a sandbox with an address of the pool, behind a device that stands for its tap:
// filters of it hand packets to the gateway device as the datapath does.
func (h *host) guest(g *Gateway, addr string) netns.NsHandle {
	t := h.t
	t.Helper()
	ns := newNamespace(t)
	tap := "tap" + addr[strings.LastIndex(addr, ".")+1:]
	veth(t, h.ns, tap, MAC, "", ns, "eth0", MAC, addr+"/32")
	in(t, ns, func() {
		l, err := netlink.LinkByName("eth0")
		must(t, err)
		gw := h.cfg.Network.Gateway().AsSlice()
		must(t, netlink.NeighAdd(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: gw, HardwareAddr: MAC}))
		must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: gw, Flags: int(netlink.FLAG_ONLINK)}))
	})
	l, err := netlink.LinkByName(tap)
	must(t, err)
	for _, i := range []int{l.Attrs().Index, g.Index} {
		if err := netlink.QdiscAdd(&netlink.GenericQdisc{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: i, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0)}, QdiscType: "clsact"}); !errors.Is(err, fs.ErrExist) {
			must(t, err)
		}
	}
	must(t, netlink.FilterAdd(redirectAll(l.Attrs().Index, netlink.HANDLE_MIN_INGRESS, nil, g.Index, netlink.TCA_INGRESS_REDIR)))
	must(t, netlink.FilterAdd(redirectAll(g.Index, netlink.HANDLE_MIN_EGRESS, net.ParseIP(addr).To4(), l.Attrs().Index, netlink.TCA_EGRESS_REDIR)))
	return ns
}

func redirectAll(on int, parent uint32, target net.IP, to int, how netlink.MirredAct) *netlink.U32 {
	key := netlink.TcU32Key{}
	if target != nil {
		key = netlink.TcU32Key{Mask: 0xffffffff, Val: binary.BigEndian.Uint32(target), Off: ipTarget}
	}
	a := netlink.NewMirredAction(to)
	a.MirredAction, a.Action = how, netlink.TC_ACT_STOLEN
	return &netlink.U32{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: on, Parent: parent, Priority: 1, Protocol: unix.ETH_P_IP},
		Sel:         &netlink.TcU32Sel{Flags: netlink.TC_U32_TERMINAL, Nkeys: 1, Keys: []netlink.TcU32Key{key}},
		Actions:     []netlink.Action{a},
	}
}

// mark has packets that come in by the gateway device marked, before the guards see them: all to that port.
type mark struct {
	protocol byte // 0 is any
	port     uint16
	value    uint32
}

// marks marks what is for some ports, and the rest with the first.
func (h *host) marks(rest uint32, some ...mark) {
	h.t.Helper()
	c, err := nftables.New()
	must(h.t, err)
	table := &nftables.Table{Name: "datapath", Family: nftables.TableFamilyINet}
	c.AddTable(table)
	c.DelTable(table)
	c.AddTable(table)
	chain := c.AddChain(&nftables.Chain{Name: "mark", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw})
	set := func(v uint32) []expr.Any {
		return []expr.Any{&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(v)}, &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1}}
	}
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: rules(from(h.cfg.Network.Device), set(rest))})
	for _, m := range some {
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: rules(from(h.cfg.Network.Device), protocol(m.protocol), toPort(m.port), set(m.value))})
	}
	must(h.t, c.Flush())
}

// others is a table of somebody else's.
func others(t *testing.T, family nftables.TableFamily, table string, policy nftables.ChainPolicy, chains ...string) func(chain string, r rule) {
	t.Helper()
	tb := &nftables.Table{Name: table, Family: family}
	c, err := nftables.New()
	must(t, err)
	c.AddTable(tb)
	c.AddChain(&nftables.Chain{Name: "FORWARD", Table: tb, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &policy})
	for _, ch := range chains {
		c.AddChain(&nftables.Chain{Name: ch, Table: tb})
		c.AddRule(&nftables.Rule{Table: tb, Chain: &nftables.Chain{Name: "FORWARD"}, Exprs: jump(ch)})
	}
	must(t, c.Flush())
	return func(chain string, r rule) {
		c, err := nftables.New()
		must(t, err)
		c.InsertRule(&nftables.Rule{Table: tb, Chain: &nftables.Chain{Name: chain, Table: tb}, Exprs: r})
		must(t, c.Flush())
	}
}

func newNamespace(t *testing.T) netns.NsHandle {
	t.Helper()
	before, err := netns.Get()
	must(t, err)
	ns, err := netns.New() // and be there
	must(t, err)
	t.Cleanup(func() { _ = ns.Close() })
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	must(t, netlink.LinkSetUp(lo))
	// Its addresses and routes come when they like.
	must(t, setSysctl("ipv6/conf/default/disable_ipv6", "1"))
	must(t, netns.Set(before))
	must(t, before.Close())
	return ns
}

// in runs f with the test's thread in a namespace.
func in(t *testing.T, ns netns.NsHandle, f func()) {
	t.Helper()
	before, err := netns.Get()
	must(t, err)
	defer before.Close()
	must(t, netns.Set(ns))
	defer func() { must(t, netns.Set(before)) }()
	f()
}

// veth joins two namespaces. "" is no address.
func veth(t *testing.T, a netns.NsHandle, nameA string, macA net.HardwareAddr, addrA string, b netns.NsHandle, nameB string, macB net.HardwareAddr, addrB string) {
	t.Helper()
	in(t, a, func() {
		must(t, netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: nameA, HardwareAddr: macA, MTU: 1500}, PeerName: nameB, PeerHardwareAddr: macB, PeerNamespace: netlink.NsFd(b),
		}))
		address4(t, nameA, addrA)
	})
	in(t, b, func() { address4(t, nameB, addrB) })
}

func address4(t *testing.T, dev, addr string) {
	t.Helper()
	l, err := netlink.LinkByName(dev)
	must(t, err)
	if addr != "" {
		a, err := netlink.ParseAddr(addr)
		must(t, err)
		must(t, netlink.AddrAdd(l, a))
	}
	must(t, netlink.LinkSetUp(l))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// lockIn puts a subtest's goroutine into a namespace, for good.
func lockIn(t *testing.T, ns netns.NsHandle) {
	t.Helper()
	runtime.LockOSThread()
	must(t, netns.Set(ns))
}
