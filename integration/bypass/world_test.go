// Package bypass attacks the network from within a sandbox and from outside: with hand-made frames, on a host with the real
// gateway and the real datapath, and with eyes wherever a frame could get to. No machine takes part; the tests write to the
// taps what one would.
package bypass

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/internal/config"
)

const wait = time.Minute

// Who is where. None but the uplink's, the bridge's and the containers' networks are reserved ones, so that what keeps a
// sandbox from the others is not the list of those.
var (
	ok      = netip.MustParseAddr("8.8.4.4")       // the strict policy allows some of it; it never answers
	peer    = netip.MustParseAddr("1.0.0.1")       // allowed, and answers
	bad     = netip.MustParseAddr("93.184.216.34") // denied by the strict policy
	proxied = netip.MustParseAddr("151.101.1.1")   // by TCP through the proxy only
	uplink  = netip.MustParseAddr("198.51.100.2")  // the host's
	router  = netip.MustParseAddr("198.51.100.1")
	public  = netip.MustParseAddr("45.33.32.1") // the host's too
	next    = netip.MustParseAddr("45.33.32.9") // beside it
	bridge  = netip.MustParseAddr("172.17.0.1")
	box     = netip.MustParseAddr("172.17.0.2") // a container at the bridge
)

var (
	uplinkMAC = net.HardwareAddr{2, 0, 0, 0, 1, 1}
	routerMAC = net.HardwareAddr{2, 0, 0, 0, 1, 2}
	boxMAC    = net.HardwareAddr{2, 0, 0, 0, 2, 2}
)

// The policies that a sandbox is attacked from.
var (
	strict = &policy.Policy{Default: policy.Deny, Rules: []policy.Rule{
		{Action: policy.Direct, To: ok.String(), Ports: []string{"9999"}, Protocol: "udp"},
		{Action: policy.Direct, To: ok.String(), Ports: []string{"80"}, Protocol: "tcp"},
		{Action: policy.Direct, To: ok.String(), Protocol: "icmp"},
		{Action: policy.Direct, To: peer.String()},
	}}
	careless = &policy.Policy{Default: policy.Direct, Rules: []policy.Rule{{Action: policy.Direct, To: "0.0.0.0/0"}}}
)

// world is a host with two sandboxes, an uplink to a router, and a container at a bridge.
type world struct {
	*network.Network
	t        *testing.T
	cfg      *config.Config
	datapath *bpf.Datapath
	host     netns.NsHandle
	outside  netns.NsHandle // the router, which is the internet too
	beside   netns.NsHandle // the container
	a, b     *sandbox       // who attacks, and who is attacked
	eyes     []*eye
	wire     *eye // at the router
	barriers uint32
}

type sandbox struct {
	pod  network.Pod
	at   *network.Attachment
	file *os.File
	tap  int // file's descriptor
}

func (s *sandbox) id() string { return s.pod.Namespace + "-" + s.pod.ID }

// newWorld puts the test's goroutine into the host's namespace and on one processor, for good: what one frame sets in
// motion is then done before the next one's.
func newWorld(t *testing.T, p *policy.Policy, change ...func(*config.Config)) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: network namespaces and BPF take root")
	}
	w := &world{t: t, cfg: config.Default()}
	w.pin()
	w.outside, w.beside, w.host = w.namespace(), w.namespace(), w.namespace() // in which the thread is now
	dir, err := os.MkdirTemp("", "cube-net")                                  // paths in a configuration's run_dir are short
	must(t, err)
	w.cfg.RunDir = dir
	w.cfg.Network.WarmTaps = 0
	for _, c := range change {
		c(w.cfg)
	}
	w.Network = network.New(w.cfg)
	t.Cleanup(func() {
		// The test's context has ended.
		err := errors.Join(w.Down(context.Background()), gateway.Down(context.Background(), w.cfg))
		if err == nil {
			err = os.RemoveAll(dir)
		}
		if err != nil {
			t.Error(err)
		}
	})
	w.wires()
	w.up()
	w.a, w.b = w.sandbox("a", p), w.sandbox("b", careless)
	w.watch()
	for _, silent := range []netip.AddrPort{at(w.cfg.Network.Gateway(), w.cfg.Network.DNSPort), at(uplink, 53)} {
		c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(silent))
		must(t, err)
		t.Cleanup(func() { _ = c.Close() })
	}
	return w
}

// pin keeps the goroutine on its thread, and the thread on one processor.
func (w *world) pin() {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	var all, one unix.CPUSet
	must(w.t, unix.SchedGetaffinity(0, &all))
	for i := range 1024 {
		if all.IsSet(i) {
			one.Set(i)
			break
		}
	}
	must(w.t, unix.SchedSetaffinity(0, &one))
}

func (w *world) namespace() netns.NsHandle {
	ns, err := netns.New()
	must(w.t, err)
	w.t.Cleanup(func() { _ = ns.Close() })
	lo, err := netlink.LinkByName("lo")
	must(w.t, err)
	must(w.t, netlink.LinkSetUp(lo))
	must(w.t, os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0)) // its addresses announce themselves
	return ns
}

// in runs f with the thread in a namespace.
func (w *world) in(ns netns.NsHandle, f func()) {
	w.t.Helper()
	must(w.t, netns.Set(ns))
	defer func() { must(w.t, netns.Set(w.host)) }()
	f()
}

// wires lays them: the uplink with two networks, and a bridge with a container, as other software makes it. Neighbours are
// known, so that nobody asks for them but for what should not have come.
func (w *world) wires() {
	t := w.t
	must(t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "up0", HardwareAddr: uplinkMAC, MTU: 1500},
		PeerName:  "w0", PeerHardwareAddr: routerMAC, PeerNamespace: netlink.NsFd(w.outside),
	}))
	must(t, checksumByHost("up0"))
	w.address("up0", uplink, 24)
	w.address("up0", public, 24)
	w.neighbour("up0", router, routerMAC)
	must(t, netlink.RouteAdd(&netlink.Route{Gw: router.AsSlice()}))

	snooping := false // it makes the bridge speak when it likes
	must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "docker0"}, MulticastSnooping: &snooping}))
	w.address("docker0", bridge, 16)
	must(t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "box0"},
		PeerName:  "eth0", PeerHardwareAddr: boxMAC, PeerNamespace: netlink.NsFd(w.beside),
	}))
	br, err := netlink.LinkByName("docker0")
	must(t, err)
	l, err := netlink.LinkByName("box0")
	must(t, err)
	must(t, netlink.LinkSetMaster(l, br))
	must(t, netlink.LinkSetUp(l))
	w.neighbour("docker0", box, boxMAC)

	w.in(w.outside, func() {
		// What it has no way for it is silent about, whatever the host forwards that the namespace is made on.
		must(t, testhost.Sysctl("ipv4/ip_forward", "0"))
		w.address("w0", router, 24)
		w.address("w0", next, 24)
		w.address("lo", peer, 32)
		w.neighbour("w0", uplink, uplinkMAC)
		must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(w.cfg.Network.Pool), Gw: uplink.AsSlice()}))
	})
	w.in(w.beside, func() {
		w.address("eth0", box, 16)
		w.neighbour("eth0", bridge, br.Attrs().HardwareAddr)
		must(t, netlink.RouteAdd(&netlink.Route{Gw: bridge.AsSlice()}))
	})
}

// checksumByHost has the host make checksums of what leaves by a device, as it does for one that can't.
func checksumByHost(dev string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	value := struct{ cmd, data uint32 }{unix.ETHTOOL_STXCSUM, 0} // struct ethtool_value
	ifr := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(ifr.name[:], dev)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&ifr))); errno != 0 {
		return errno
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
}

func (w *world) address(dev string, a netip.Addr, bits int) {
	l, err := netlink.LinkByName(dev)
	must(w.t, err)
	must(w.t, netlink.LinkSetUp(l))
	must(w.t, netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, bits))}))
}

func (w *world) neighbour(dev string, a netip.Addr, mac net.HardwareAddr) {
	l, err := netlink.LinkByName(dev)
	must(w.t, err)
	must(w.t, netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: mac}))
}

// up is what a daemon does that starts.
func (w *world) up() {
	w.t.Helper()
	g, err := gateway.Up(w.t.Context(), w.cfg)
	must(w.t, err)
	must(w.t, g.Close())
	d, err := w.Network.Up(w.t.Context(), g)
	must(w.t, err)
	w.t.Cleanup(func() { _ = d.Close() })
	w.datapath = d
}

// sandbox is one with a policy, or, without, one that nothing opens.
func (w *world) sandbox(name string, p *policy.Policy, limits ...bpf.Rate) *sandbox {
	w.t.Helper()
	s := &sandbox{pod: network.Pod{Namespace: "bypass", ID: name}}
	var err error
	s.at, err = w.Claim(w.t.Context(), s.pod)
	must(w.t, err)
	if p != nil {
		r := network.Request{ID: s.id(), Network: "cube", IfName: "eth0", Policy: p}
		for _, l := range limits {
			r.TX = l
		}
		s.at, err = w.Open(w.t.Context(), r)
		must(w.t, err)
	}
	s.file, err = w.OpenTap(w.t.Context(), s.pod)
	must(w.t, err)
	w.t.Cleanup(func() { _ = s.file.Close() })
	raw, err := s.file.SyscallConn()
	must(w.t, err)
	must(w.t, raw.Control(func(fd uintptr) { s.tap = int(fd) }))
	return s
}

// remove ends a sandbox as its shim and the plugin do.
func (w *world) remove(s *sandbox) {
	w.t.Helper()
	must(w.t, w.Close(w.t.Context(), s.id(), "cube", "eth0"))
	_ = s.file.Close()
	must(w.t, w.Release(w.t.Context(), s.pod))
}

// unguard takes Cube's nftables table away, as somebody does who flushes all rules: what is left is the datapath.
func (w *world) unguard() {
	w.t.Helper()
	c, err := nftables.New()
	must(w.t, err)
	c.DelTable(&nftables.Table{Name: w.cfg.Network.NFTable, Family: nftables.TableFamilyINet})
	must(w.t, c.Flush())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// name tells addresses apart in what was seen.
func (w *world) name(a netip.Addr) string {
	names := map[netip.Addr]string{
		ok: "ok", peer: "peer", bad: "bad", proxied: "proxied", uplink: "uplink", router: "router", public: "public", next: "next",
		bridge: "bridge", box: "box", network.GuestPrefix.Addr(): "guest", network.GuestGateway: "guest-gateway",
		w.cfg.Network.Gateway(): "gateway", w.a.at.Address: "a", w.b.at.Address: "b",
	}
	if n := names[a]; n != "" {
		return n
	}
	return fmt.Sprint(a)
}
