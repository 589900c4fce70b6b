package bpf

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf/policy"
)

var (
	guestMAC   = net.HardwareAddr{0x02, 0, 0, 0, 0, 2}
	gatewayMAC = net.HardwareAddr{0x02, 0, 0, 0, 0, 1}
	guestIP    = netip.MustParseAddr("169.254.68.6")
	gatewayIP  = netip.MustParseAddr("169.254.68.5")
	hostIP     = netip.MustParseAddr("10.88.0.2")
	remote     = netip.MustParseAddr("1.2.3.4")
	marks      = Marks{Mask: 0xff00, Direct: 0x100, Proxy: 0x200, Resolver: 0x300, Guest: 0x400}
)

// network is a network namespace with a gateway device, and a datapath for it.
type network struct {
	t       *testing.T
	ns      *os.File
	gateway netlink.Link
	cfg     Config
	*Datapath
}

// newNetwork puts the test's goroutine into a namespace of its own, for good. All is removed with the test.
func newNetwork(t *testing.T) *network {
	t.Helper()
	capable(t)
	n := &network{t: t}
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	var err error
	n.ns, err = os.Open("/proc/thread-self/ns/net")
	n.must(err)
	t.Cleanup(func() { _ = n.ns.Close() })
	lo, err := netlink.LinkByName("lo")
	n.must(err)
	n.must(netlink.LinkSetUp(lo))
	n.must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "gw0", HardwareAddr: gatewayMAC, Flags: net.FlagUp}, PeerName: "gw1"}))
	n.gateway, err = netlink.LinkByName("gw0")
	n.must(err)
	peer, err := netlink.LinkByName("gw1")
	n.must(err)
	n.must(netlink.LinkSetARPOff(n.gateway))
	n.must(netlink.LinkSetUp(n.gateway))
	n.must(netlink.LinkSetUp(peer))
	n.cfg = Config{
		Dir:     filepath.Join(t.TempDir(), "bpf"),
		Gateway: Gateway{Ifindex: n.gateway.Attrs().Index, IP: gatewayIP, MAC: gatewayMAC},
		Marks:   marks,
		Echo:    Echo{MaxPayload: 64, Rate: Rate{PerSecond: 1, Burst: 4}},
		Events:  Rate{PerSecond: 1, Burst: 8},
	}
	t.Cleanup(func() {
		if err := Remove(n.cfg.Dir); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(n.cfg.Dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", n.cfg.Dir, err)
		}
	})
	n.open()
	return n
}

// capable skips the test where programs can't be loaded.
func capable(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: it takes root, with CAP_BPF and CAP_NET_ADMIN")
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: noop()})
	if errors.Is(err, unix.EPERM) {
		t.Skip("SKIPPED: root may not load programs here (CAP_BPF, CAP_NET_ADMIN)")
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = p.Close()
}

func (n *network) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

// open opens the datapath, in place of the one that is open.
func (n *network) open() {
	n.t.Helper()
	d, err := Open(n.cfg)
	n.must(err)
	n.Datapath = d
	n.t.Cleanup(func() { _ = d.Close() })
}

// run runs a subtest in the namespace.
func (n *network) run(name string, f func(t *testing.T)) {
	n.t.Helper()
	n.t.Run(name, func(t *testing.T) {
		runtime.LockOSThread()
		if err := unix.Setns(int(n.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			t.Fatal(err)
		}
		outer := n.t
		n.t = t
		defer func() { n.t = outer }()
		f(t)
	})
}

// tap makes a tap that is up. Closing the file removes it.
func (n *network) tap(name string) (*os.File, int) {
	n.t.Helper()
	return n.tapFlags(name, 0)
}

func (n *network) tapFlags(name string, flags uint16) (*os.File, int) {
	n.t.Helper()
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	n.must(err)
	ifr, err := unix.NewIfreq(name)
	n.must(err)
	ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | flags)
	n.must(unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr))
	f := os.NewFile(uintptr(fd), name)
	n.t.Cleanup(func() { _ = f.Close() })
	l, err := netlink.LinkByName(name)
	n.must(err)
	_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0)
	n.must(netlink.LinkSetUp(l))
	return f, l.Attrs().Index
}

func unlimited(ifindex int) Sandbox {
	return Sandbox{ID: ID(ifindex), Ifindex: ifindex, GuestIP: guestIP, GuestMAC: guestMAC, HostIP: hostIP, Settings: Settings{MaxFlows: 100}}
}

func (n *network) add(s Sandbox, rows []policy.Row) (ID, error) { return s.ID, n.AddSandbox(s, rows) }

func (n *network) sandboxes() map[int]ID {
	n.t.Helper()
	all, err := n.Sandboxes()
	n.must(err)
	return all
}

// rows compiles a policy in which the rules are all that is allowed.
func (n *network) rows(rules ...policy.Rule) []policy.Row {
	n.t.Helper()
	rows, err := policy.Compile(policy.Policy{Rules: rules}, policy.Guard{})
	n.must(err)
	return rows
}

func allow(to, protocol string, ports ...string) policy.Rule {
	return policy.Rule{Action: policy.Direct, To: to, Protocol: protocol, Ports: ports}
}

// result is what a program did with a frame.
type result struct {
	verdict uint32
	mark    uint32
	frame   []byte
	// reasons are the counters that changed, of the sandbox and of none.
	reasons []Reason
}

const (
	tcShot     = 2
	tcRedirect = 7
	tcUnspec   = 0xffffffff
)

// skb is the beginning of struct __sk_buff.
type skb struct {
	Len, PktType, Mark, Queue, Protocol, VlanPresent, VlanTCI, VlanProto, Priority, IngressIfindex, Ifindex uint32
	Rest                                                                                                    [37]uint32
}

// feed runs a program on a frame. ifindex is of the device it is at, ingress of the one it came in by.
func (n *network) feed(p *ebpf.Program, id ID, ifindex, ingress int, mark uint32, frame []byte) result {
	n.t.Helper()
	before := n.count(id)
	in := skb{Ifindex: uint32(ifindex), IngressIfindex: uint32(ingress), Mark: mark}
	out := skb{}
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+64), Context: in, ContextOut: &out}
	verdict, err := p.Run(&opts)
	if err != nil {
		n.t.Fatalf("run on %x: %v", frame, err)
	}
	r := result{verdict: verdict, mark: out.Mark, frame: opts.DataOut}
	for reason, c := range n.count(id) {
		if c != before[reason] {
			r.reasons = append(r.reasons, reason)
		}
	}
	return r
}

func (n *network) count(id ID) Counters {
	n.t.Helper()
	all := Counters{}
	for _, id := range []ID{0, id} {
		counters, err := n.Counters(id)
		n.must(err)
		for r, c := range counters {
			all[r] = Count{all[r].Packets + c.Packets, all[r].Bytes + c.Bytes}
		}
	}
	return all
}

// expect checks what was done with a frame, and that just this was counted.
func (n *network) expect(r result, verdict uint32, reason Reason) {
	n.t.Helper()
	if r.verdict != verdict || len(r.reasons) != 1 || r.reasons[0] != reason {
		names := make([]string, 0, len(r.reasons))
		for _, r := range r.reasons {
			names = append(names, r.String())
		}
		n.t.Errorf("verdict %d, counted %s; not %d, %s", int32(r.verdict), strings.Join(names, " "), int32(verdict), reason)
	}
}
