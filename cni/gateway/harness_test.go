package gateway

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"syscall"
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

// snapshot is everything of the network that Down has to leave as it was.
func snapshot(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, request := range []int{unix.NFT_MSG_GETTABLE, unix.NFT_MSG_GETCHAIN, unix.NFT_MSG_GETSET, unix.NFT_MSG_GETRULE} {
		messages, err := dump(unix.NFPROTO_UNSPEC, request)
		must(t, err)
		for _, m := range messages {
			family, _, err := attributes(m)
			must(t, err)
			out = append(out, fmt.Sprintf("nftables %d %d %x", request, family, m.Data[4:]))
		}
	}
	links, err := netlink.LinkList()
	must(t, err)
	for _, l := range links {
		a := l.Attrs()
		out = append(out, fmt.Sprint("device ", a.Index, a.Name, a.Flags&^net.FlagRunning, a.MTU, a.HardwareAddr, a.Alias))
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	must(t, err)
	for _, a := range addrs {
		out = append(out, fmt.Sprint("address ", a))
	}
	all, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	must(t, err)
	for _, r := range all {
		out = append(out, fmt.Sprint("route ", r))
	}
	list, err := netlink.RuleList(netlink.FAMILY_ALL)
	must(t, err)
	for _, r := range list {
		out = append(out, fmt.Sprint("rule ", r))
	}
	must(t, filepath.WalkDir(sysctls, func(path string, d fs.DirEntry, err error) error {
		// Counts, and what is random.
		if err != nil || d.IsDir() || strings.HasSuffix(path, "_count") || strings.Contains(path, "key") || strings.Contains(path, "stable_secret") {
			return nil
		}
		b, err := os.ReadFile(path)
		if err == nil {
			out = append(out, path+" "+string(b))
		}
		return nil
	}))
	sort.Strings(out)
	return out
}

// same fails the test for each difference.
func same(t *testing.T, before, after []string) {
	t.Helper()
	count := map[string]int{}
	for _, s := range before {
		count[s]++
	}
	for _, s := range after {
		count[s]--
	}
	for s, n := range count {
		switch {
		case n > 0:
			t.Errorf("gone: %s", s)
		case n < 0:
			t.Errorf("left: %s", s)
		}
	}
}

// listen accepts connections to an address in a namespace and says hello, to whom and to which address.
func listen(t *testing.T, ns netns.NsHandle, addr, hello string, options ...int) {
	t.Helper()
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		control := c.Control(func(fd uintptr) {
			for _, o := range options {
				err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.SOL_IP, o, 1))
			}
		})
		return errors.Join(err, control)
	}}
	in(t, ns, func() {
		l, err := lc.Listen(t.Context(), "tcp4", addr)
		must(t, err)
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = fmt.Fprintf(c, "%s %s at %s", hello, c.RemoteAddr().(*net.TCPAddr).IP, c.LocalAddr())
				_ = c.Close()
			}
		}()
	})
}

// listenUDP is listen for packets.
func listenUDP(t *testing.T, ns netns.NsHandle, addr, hello string) {
	t.Helper()
	in(t, ns, func() {
		c, err := net.ListenPacket("udp4", addr)
		must(t, err)
		t.Cleanup(func() { _ = c.Close() })
		go func() {
			b := make([]byte, 1500)
			for {
				_, from, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = c.WriteTo(fmt.Appendf(nil, "%s %s at %s", hello, from.(*net.UDPAddr).IP, addr), from)
			}
		}()
	})
}

// say connects from a namespace and returns what is said there, "" for nothing within the timeout.
func say(t *testing.T, ns netns.NsHandle, network, addr string, timeout time.Duration) (answer string) {
	t.Helper()
	in(t, ns, func() {
		c, err := net.DialTimeout(network, addr, timeout)
		if err != nil {
			return
		}
		defer c.Close()
		must(t, c.SetDeadline(time.Now().Add(timeout)))
		if network == "udp4" {
			_, _ = c.Write([]byte("hello"))
		}
		b := make([]byte, 1500)
		n, _ := c.Read(b)
		answer = string(b[:n])
	})
	return answer
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
