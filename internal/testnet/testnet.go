// Package testnet gives tests a network of Cube's in a network namespace of their own.
package testnet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
)

// Host is a network namespace that stands for a host.
type Host struct {
	*network.Network
	Config *config.Config
	// Datapath is the daemon's, once Up.
	Datapath *bpf.Datapath
	t        *testing.T
	ns       netns.NsHandle
}

// New puts the test's goroutine into a namespace of its own, for good, with an uplink that has the address 198.51.100.2/24.
// All of Cube's is removed with the test.
func New(t *testing.T) *Host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: network namespaces and BPF take root")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	ns, err := netns.New()
	Must(t, err)
	t.Cleanup(func() { _ = ns.Close() })
	lo, err := netlink.LinkByName("lo")
	Must(t, err)
	Must(t, netlink.LinkSetUp(lo))
	Must(t, os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0))
	Must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up0", MTU: 1500}, PeerName: "up1"}))
	for _, name := range []string{"up0", "up1"} {
		l, err := netlink.LinkByName(name)
		Must(t, err)
		Must(t, netlink.LinkSetUp(l))
		if name == "up0" {
			addr, err := netlink.ParseAddr("198.51.100.2/24")
			Must(t, err)
			Must(t, netlink.AddrAdd(l, addr))
			Must(t, netlink.RouteAdd(&netlink.Route{Gw: []byte{198, 51, 100, 1}}))
		}
	}
	// Paths in a configuration's run_dir are short.
	dir, err := os.MkdirTemp("", "cube-net")
	Must(t, err)
	cfg := config.Default()
	cfg.RunDir = dir
	cfg.Network.WarmTaps = 2
	h := &Host{Network: network.New(cfg), Config: cfg, t: t, ns: ns}
	t.Cleanup(func() {
		// The test's context has ended.
		if err := errors.Join(h.Network.Down(context.Background()), gateway.Down(context.Background(), cfg)); err != nil {
			t.Error(err)
		}
		_ = os.RemoveAll(dir)
	})
	return h
}

// Up brings the network up, or up again, as a daemon that starts.
func (h *Host) Up() {
	h.t.Helper()
	g, err := gateway.Up(h.t.Context(), h.Config)
	Must(h.t, err)
	Must(h.t, g.Close())
	d, err := h.Network.Up(h.t.Context(), g)
	Must(h.t, err)
	h.t.Cleanup(func() { _ = d.Close() })
	h.Datapath = d
}

// Enter puts another goroutine into the namespace, for good.
func (h *Host) Enter() error {
	runtime.LockOSThread()
	return netns.Set(h.ns)
}

// Write writes the configuration and returns its path.
func (h *Host) Write() string {
	h.t.Helper()
	file := filepath.Join(h.Config.RunDir, "config.toml")
	Must(h.t, os.WriteFile(file, fmt.Appendf(nil, "run_dir = %q\n[network]\nwarm_taps = %d\n", h.Config.RunDir, h.Config.Network.WarmTaps), 0o600))
	return file
}

// Left lists what there is of sandboxes: devices, sandboxes of the datapath, files.
func (h *Host) Left() []string {
	h.t.Helper()
	var left []string
	links, err := netlink.LinkList()
	Must(h.t, err)
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, h.Config.Network.TapPrefix) {
			left = append(left, "device "+l.Attrs().Name)
		}
	}
	sandboxes, err := h.Datapath.Sandboxes()
	Must(h.t, err)
	for _, id := range sandboxes {
		left = append(left, fmt.Sprintf("sandbox %d", id))
	}
	taps, err := h.Datapath.Taps()
	Must(h.t, err)
	for _, i := range taps {
		left = append(left, fmt.Sprintf("hook of device %d", i))
	}
	for _, dir := range []string{"taps", "free", "addresses", "ports", "attachments"} {
		entries, err := os.ReadDir(filepath.Join(h.Config.NetworkDir(), dir))
		if !errors.Is(err, fs.ErrNotExist) {
			Must(h.t, err)
		}
		for _, e := range entries {
			left = append(left, dir+"/"+e.Name())
		}
	}
	return left
}

// Path is a file of the network's state.
func (h *Host) Path(elem ...string) string {
	return filepath.Join(append([]string{h.Config.NetworkDir()}, elem...)...)
}

// UDP is a frame of the guest's.
func UDP(to netip.AddrPort, payload string) []byte {
	b := append(append([]byte{}, gateway.MAC...), network.GuestMAC...)
	b = append(b, 8, 0)
	length := 20 + 8 + len(payload)
	ip := []byte{0x45, 0, byte(length >> 8), byte(length), 0, 0, 0, 0, 64, 17, 0, 0}
	ip = append(append(ip, network.GuestPrefix.Addr().AsSlice()...), to.Addr().AsSlice()...)
	var sum uint32
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(ip[i])<<8 | uint32(ip[i+1])
	}
	sum = sum>>16 + sum&0xffff
	sum += sum >> 16
	ip[10], ip[11] = ^byte(sum>>8), ^byte(sum)
	port := to.Port()
	udp := []byte{0x10, 0, byte(port >> 8), byte(port), byte((8 + len(payload)) >> 8), byte(8 + len(payload)), 0, 0} // no checksum
	return append(append(append(b, ip...), udp...), payload...)
}

// VnetHeader is before each frame at a tap's descriptor, as no machine has set another size.
const VnetHeader = 10

// Must ends the test at an error.
func Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// isolatedEnv is set in a test's process whose network namespace is its own.
const isolatedEnv = "CUBE_TESTNET_ISOLATED"

// Main runs a package's tests in a process with a network namespace of its own, for tests whose goroutines make sockets. It has
// nothing but its loopback.
func Main(m *testing.M) int {
	if os.Geteuid() != 0 {
		return m.Run() // which skips what takes root
	}
	if os.Getenv(isolatedEnv) == "" {
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.Env = append(os.Environ(), isolatedEnv+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		if err := cmd.Run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}
