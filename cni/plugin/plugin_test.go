package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
)

// The test's binary is the plugin where it is called so.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "cube-cni" {
		Main()
		return
	}
	if testnet.IsDaemon() {
		return
	}
	os.Exit(m.Run())
}

// node is a host with the plugin installed, called as a runtime calls it.
type node struct {
	*testnet.Host
	t      *testing.T
	cni    *libcni.CNIConfig
	bin    string
	config string
	list   *libcni.NetworkConfigList
	pod    string // a container's network namespace
}

const allowAll = `"policy": {"default": "allow"}`

func newNode(t *testing.T) *node {
	t.Helper()
	t.Setenv("GORACE", "atexit_sleep_ms=0") // of each plugin process, in a race test
	n := &node{Host: testnet.New(t), t: t, bin: t.TempDir()}
	self, err := os.Executable()
	testnet.Must(t, err)
	testnet.Must(t, os.Symlink(self, filepath.Join(n.bin, "cube-cni")))
	n.cni = libcni.NewCNIConfigWithCacheDir([]string{n.bin}, t.TempDir(), &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}})
	n.config = n.Write()
	n.list = n.conf(allowAll)
	host, err := netns.Get()
	testnet.Must(t, err)
	pod, err := netns.New()
	testnet.Must(t, err)
	testnet.Must(t, netns.Set(host))
	testnet.Must(t, host.Close())
	t.Cleanup(func() { _ = pod.Close() })
	n.pod = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), pod)
	return n
}

// conf is a network with a plugin that has these keys.
func (n *node) conf(keys string) *libcni.NetworkConfigList {
	n.t.Helper()
	list, err := libcni.NetworkConfFromBytes(fmt.Appendf(nil, `{"cniVersion": "1.1.0", "name": "cube", "plugins": [
		{"type": "cube-cni", "cubeConfig": %q, "capabilities": {"bandwidth": true, "portMappings": true}, %s}]}`, n.config, keys))
	testnet.Must(n.t, err)
	return list
}

func (n *node) rt(id string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{ContainerID: id, NetNS: n.pod, IfName: "eth0"}
}

func codeOf(err error) uint {
	var e *types.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return 0
}

func (n *node) expect(what string, err error, code uint) {
	n.t.Helper()
	if err == nil || codeOf(err) != code {
		n.t.Errorf("%s: %v (code %d), not code %d", what, err, codeOf(err), code)
	}
}

// TestVerbs walks through a container's life, as cnitool does.
func TestVerbs(t *testing.T) {
	n := newNode(t)
	ctx := t.Context()
	n.expect("status before the network is up", n.cni.GetStatusNetworkList(ctx, n.list), types.ErrPluginNotAvailable)
	_, err := n.cni.AddNetworkList(ctx, n.list, n.rt("default-box"))
	n.expect("add before the network is up", err, types.ErrTryAgainLater)
	testnet.Must(t, n.cni.DelNetworkList(ctx, n.list, n.rt("default-box")))
	n.Up()
	testnet.Must(t, n.cni.GetStatusNetworkList(ctx, n.list))
	versions, err := n.cni.ValidateNetworkList(ctx, n.list)
	testnet.Must(t, err)
	if slices.Sort(versions); !slices.Equal(versions, []string{"bandwidth", "portMappings"}) {
		t.Errorf("capabilities %v", versions)
	}

	added, err := n.cni.AddNetworkList(ctx, n.list, n.rt("default-box"))
	testnet.Must(t, err)
	r, err := types100.GetResult(added)
	testnet.Must(t, err)
	a, err := n.Get(ctx, "default-box")
	testnet.Must(t, err)
	gw := n.Config.Network.Gateway().String()
	if len(r.Interfaces) != 2 || r.Interfaces[0].Name != a.Tap || r.Interfaces[0].Sandbox != "" || r.Interfaces[1].Name != "eth0" ||
		r.Interfaces[1].Mac != network.GuestMAC.String() || r.Interfaces[1].Mtu != 1500 || r.Interfaces[1].Sandbox != n.pod {
		t.Errorf("interfaces %v", r.Interfaces)
	}
	if len(r.IPs) != 1 || r.IPs[0].Address.String() != a.Address.String()+"/32" || r.IPs[0].Gateway.String() != gw || *r.IPs[0].Interface != 1 {
		t.Errorf("addresses %v", r.IPs)
	}
	if len(r.Routes) != 1 || r.Routes[0].Dst.String() != "0.0.0.0/0" || !slices.Equal(r.DNS.Nameservers, []string{gw}) {
		t.Errorf("routes %v, DNS %v", r.Routes, r.DNS)
	}
	_, err = n.cni.AddNetworkList(ctx, n.list, n.rt("default-box"))
	n.expect("a second add", err, codeExists)
	testnet.Must(t, n.cni.CheckNetworkList(ctx, n.list, n.rt("default-box")))
	testnet.Must(t, n.cni.GCNetworkList(ctx, n.list, &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: "default-box", IfName: "eth0"}}}))
	testnet.Must(t, n.cni.CheckNetworkList(ctx, n.list, n.rt("default-box")))

	// Both orders of shim and plugin.
	box := network.Pod{Namespace: "default", ID: "box"}
	if c, err := n.Claim(ctx, box); err != nil || c.Tap != a.Tap {
		t.Errorf("claimed %+v, %v", c, err)
	}
	second := network.Pod{Namespace: "default", ID: "second"}
	c, err := n.Claim(ctx, second)
	testnet.Must(t, err)
	added, err = n.cni.AddNetworkList(ctx, n.list, n.rt("default-second"))
	testnet.Must(t, err)
	if r, err := types100.GetResult(added); err != nil || r.Interfaces[0].Name != c.Tap {
		t.Errorf("added %v to %s, %v", r, c.Tap, err)
	}

	// The tap breaks, and what is left of the container goes all the same.
	l, err := netlink.LinkByName(a.Tap)
	testnet.Must(t, err)
	testnet.Must(t, netlink.LinkSetDown(l))
	n.expect("check with a tap that is down", n.cni.CheckNetworkList(ctx, n.list, n.rt("default-box")), codeBroken)
	testnet.Must(t, netlink.LinkSetUp(l))
	testnet.Must(t, n.cni.CheckNetworkList(ctx, n.list, n.rt("default-box")))
	testnet.Must(t, netlink.LinkDel(l))
	n.expect("check without a tap", n.cni.CheckNetworkList(ctx, n.list, n.rt("default-box")), codeBroken)
	gone := n.rt("default-box")
	gone.NetNS = ""
	testnet.Must(t, n.cni.DelNetworkList(ctx, n.list, gone))
	testnet.Must(t, n.cni.DelNetworkList(ctx, n.list, gone))
	testnet.Must(t, n.Release(ctx, box))
	n.expect("check after del", n.cni.CheckNetworkList(ctx, n.list, n.rt("default-box")), types.ErrInvalidNetworkConfig)

	testnet.Must(t, n.cni.GCNetworkList(ctx, n.list, &libcni.GCArgs{}))
	testnet.Must(t, n.Release(ctx, second))
	n.empty()
}

// empty expects that nothing is there but taps that are ready.
func (n *node) empty() {
	n.t.Helper()
	for _, what := range n.Left() {
		if strings.HasPrefix(what, "sandbox") || strings.HasPrefix(what, "addresses") || strings.HasPrefix(what, "ports") || strings.HasPrefix(what, "attachments") {
			n.t.Errorf("left: %s", what)
		}
	}
	count := func(prefix string) (c int) {
		for _, what := range n.Left() {
			if strings.HasPrefix(what, prefix) {
				c++
			}
		}
		return c
	}
	if free := count("free"); count("device") != free || count("taps") != free || count("hook") != free {
		n.t.Errorf("taps that aren't ready are left: %v", n.Left())
	}
}

// TestConfig: what can't be had is refused, and nothing is left of it.
func TestConfig(t *testing.T) {
	n := newNode(t)
	n.Up()
	for _, tc := range []struct {
		name, keys string
		caps       map[string]any
		code       uint
		want       string
	}{
		{"a rule that can't be", `"policy": {"default": "deny", "allow": [{"to": "1.0.0.0/8"}, {"to": "1.2.3.4/8"}]}`, nil, 7, `rule 2 (allow "1.2.3.4/8")`},
		{"a misspelt key", `"policy": {"default": "allow", "denny": []}`, nil, 7, "denny"},
		{"a misspelt default", `"policy": {"default": "alow"}`, nil, 7, "alow"},
		{"no default", `"policy": {"allow": []}`, nil, 7, "default is missing"},
		{"name servers", `"dns": {"nameservers": ["9.9.9.9"]}`, nil, 7, "network.dns_upstreams"},
		{"ipam", `"ipam": {"type": "host-local"}`, nil, 7, "network.pool"},
		{"no port", allowAll, map[string]any{"portMappings": []any{map[string]any{"hostPort": 65536, "containerPort": 80}}}, 7, "portMappings"},
		{"a protocol that isn't mapped", allowAll, map[string]any{"portMappings": []any{map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "sctp"}}}, 7, "sctp"},
		{"no bandwidth", allowAll, map[string]any{"bandwidth": map[string]any{"ingressRate": 1}}, 7, "ingressRate"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			testnet.Must(t, n.Enter())
			rt := n.rt("default-box")
			rt.CapabilityArgs = tc.caps
			_, err := n.cni.AddNetworkList(t.Context(), n.conf(tc.keys), rt)
			if err == nil || codeOf(err) != tc.code || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v (code %d), not code %d with %q", err, codeOf(err), tc.code, tc.want)
			}
			if left := n.Left(); len(left) != 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
	// Rules and limits that can be had are those that are in force.
	list := n.conf(`"dns": {"search": ["example.com"]}, "policy": {"default": "deny", "allow": [{"to": "1.0.0.0/8", "ports": ["443"], "protocol": "tcp"}], "deny": [{"to": "1.2.0.0/16"}]}`)
	rt := n.rt("default-box")
	rt.CapabilityArgs = map[string]any{"bandwidth": map[string]any{"ingressRate": 8000000, "ingressBurst": 8, "egressRate": 16000000, "egressBurst": 1 << 31}}
	r, err := n.cni.AddNetworkList(t.Context(), list, rt)
	testnet.Must(t, err)
	if result, err := types100.GetResult(r); err != nil || !slices.Equal(result.DNS.Search, []string{"example.com"}) {
		t.Errorf("%v, %v", result, err)
	}
	a, err := n.Get(t.Context(), "default-box")
	testnet.Must(t, err)
	if got := fmt.Sprint(a.Policy.Rules, a.TX, a.RX); got != `[allow "1.0.0.0/8" ports 443 tcp deny "1.2.0.0/16"] {2000000 268435456} {1000000 131072}` {
		t.Error(got)
	}
	// A configuration of Cube's that can't be read.
	n.config = filepath.Join(t.TempDir(), "none")
	_, err = n.cni.AddNetworkList(t.Context(), n.conf(allowAll), n.rt("other"))
	n.expect("no configuration", err, types.ErrInvalidNetworkConfig)
}

// TestVersions: what a runtime asks first.
func TestVersions(t *testing.T) {
	self, err := os.Executable()
	testnet.Must(t, err)
	bin := filepath.Join(t.TempDir(), "cube-cni")
	testnet.Must(t, os.Symlink(self, bin))
	cmd := exec.Command(bin)
	cmd.Env = append(os.Environ(), "CNI_COMMAND=VERSION")
	out, err := cmd.Output()
	testnet.Must(t, err)
	var v struct {
		SupportedVersions []string `json:"supportedVersions"`
	}
	testnet.Must(t, json.NewDecoder(bytes.NewReader(out)).Decode(&v))
	if !slices.Contains(v.SupportedVersions, "1.1.0") || !slices.Contains(v.SupportedVersions, "0.4.0") {
		t.Errorf("versions %v", v.SupportedVersions)
	}
}
