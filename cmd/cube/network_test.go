package main

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/daemon"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/cni/ports"
	"github.com/cubesandbox/cube/cni/trace"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/testnet"
)

// box is a host with a container that has an open network, and its machine's end of the tap.
type box struct {
	*testnet.Host
	t   *testing.T
	tap *os.File
	at  *network.Attachment
}

func newBox(t *testing.T) *box {
	t.Helper()
	b := &box{Host: testnet.New(t), t: t}
	b.Up()
	t.Setenv(config.FileEnv, b.Write())
	pod := network.Pod{Namespace: "default", ID: "box"}
	var err error
	b.at, err = b.Claim(t.Context(), pod)
	testnet.Must(t, err)
	_, err = b.Open(t.Context(), (&network.Settings{Policy: &policy.Policy{Default: policy.Direct}}).Request(pod))
	testnet.Must(t, err)
	b.tap, err = b.OpenTap(t.Context(), pod)
	testnet.Must(t, err)
	t.Cleanup(func() { _ = b.tap.Close() })
	l, err := netlink.LinkByName("up0")
	testnet.Must(t, err)
	testnet.Must(t, netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: []byte{198, 51, 100, 1}, HardwareAddr: []byte{2, 0, 0, 0, 0, 9}, State: netlink.NUD_PERMANENT}))
	return b
}

// send has the machine send a packet to an address.
func (b *box) send(to string) {
	b.t.Helper()
	_, err := b.tap.Write(append(make([]byte, testnet.VnetHeader), testnet.UDP(netip.MustParseAddrPort(to), "hello")...))
	testnet.Must(b.t, err)
}

// run runs a command of cube network's and returns what it writes.
func (b *box) run(code int, args ...string) (stdout, stderr string) {
	b.t.Helper()
	var out, msg bytes.Buffer
	app := newApp()
	app.Writer = &out
	if got := runApp(b.t.Context(), app, append([]string{"cube", "network"}, args...), &msg); got != code {
		b.t.Errorf("%v: code %d, not %d: %s", args, got, code, msg.String())
	}
	return out.String(), msg.String()
}

// says checks that there is all of that, each in a line of its own.
func (b *box) says(text string, lines ...string) {
	b.t.Helper()
	for _, line := range lines {
		found := false
		for have := range strings.Lines(text) {
			found = found || strings.Contains(strings.Join(strings.Fields(have), " "), line)
		}
		if !found {
			b.t.Errorf("no line says %q:\n%s", line, text)
		}
	}
}

func TestNetworkCommands(t *testing.T) {
	b := newBox(t)
	out, msg := b.run(1, "status")
	b.says(msg, "cube: network status: list port mappings: no daemon runs; start the stack: cube up")
	b.says(out, "daemon not running", "gateway cube-gw, 10.200.255.254, MTU 1500", "uplink up0", "pool 10.200.0.0/16", "hook tcx", "containers 1 open, 0 closed")

	b.send("1.2.3.4:443")
	out, _ = b.run(0, "flows", "box")
	b.says(out, "udp 1.2.3.4:443 4096 guest opening default", "1 packet, 47B 0 packets, 0B")
	var flows []trace.Flow
	out, _ = b.run(0, "flows", "--json", "default/box")
	testnet.Must(t, json.Unmarshal([]byte(out), &flows))
	if len(flows) != 1 || flows[0].Remote != "1.2.3.4:443" {
		t.Errorf("flows %+v", flows)
	}

	out, _ = b.run(0, "trace", "default-box", "1.2.3.4:443/udp")
	b.says(out, "to 1.2.3.4:443/udp", "verdict allow, by default", "flow from port 4096, opening", "leaves as 198.51.100.2:",
		"route via 198.51.100.1, device up0, MTU 1500", "next hop 198.51.100.1, the gateway: 02:00:00:00:00:09, PERMANENT")
	out, msg = b.run(1, "trace", "box", "10.0.0.1")
	b.says(out, "verdict hard-deny", "flow none", "problem the policy")
	b.says(msg, "10.0.0.1/icmp is not reached: ")

	b.send("10.0.0.1:443")
	b.send("10.0.0.1:443")
	out, _ = b.run(0, "drops", "box")
	b.says(out, "REASON PACKETS BYTES", "hard-deny 2 94")
	var drops dropped
	out, _ = b.run(0, "drops", "--json", "box")
	testnet.Must(t, json.Unmarshal([]byte(out), &drops))
	if !reflect.DeepEqual(drops, dropped{Counters: []reasonCount{{"hard-deny", 2, 94}}}) {
		t.Errorf("drops %+v", drops)
	}
}

func TestNetworkPolicy(t *testing.T) {
	b := newBox(t)
	out, _ := b.run(0, "policy", "get", "box")
	b.says(out, "default allow any any any")
	b.run(0, "policy", "set", "--no-internet", "--allow", "1.2.3.0/24:443,8000-8010/udp", "--allow", "2.0.0.0/8", "box")
	out, _ = b.run(0, "policy", "get", "box")
	b.says(out, "1 allow 1.2.3.0/24 443,8000-8010 udp", "2 allow 2.0.0.0/8 any any", "default deny")
	set, _ := b.run(0, "policy", "get", "--json", "box")
	b.send("1.2.3.4:443")
	b.send("1.2.3.4:444")
	out, _ = b.run(0, "flows", "box")
	b.says(out, "1.2.3.4:443 4096 guest opening 1")
	out, _ = b.run(0, "drops", "box")
	b.says(out, "policy 1 47")

	// What is refused changes nothing.
	file := filepath.Join(t.TempDir(), "policy.json")
	for _, bad := range []string{`{"default":"allow","deny":[{"to":"1.0.0.0/8"},{"to":"1.2.3.4/8"}]}`, `{"default":"alow"}`, `{`, ``} {
		testnet.Must(t, os.WriteFile(file, []byte(bad), 0o600))
		if _, msg := b.run(1, "policy", "set", "-f", file, "box"); strings.Count(msg, "\n") != 1 {
			t.Errorf("%s: not one line: %q", bad, msg)
		}
		if now, _ := b.run(0, "policy", "get", "--json", "box"); now != set {
			t.Errorf("%s is refused, and the policy is %s", bad, now)
		}
	}
	b.run(0, "policy", "set", "--default", "allow", "box")
	testnet.Must(t, os.WriteFile(file, []byte(set), 0o600))
	b.run(0, "policy", "set", "-f", file, "box")
	if now, _ := b.run(0, "policy", "get", "--json", "box"); now != set {
		t.Errorf("%s is read as %s", set, now)
	}
	testnet.Must(t, os.WriteFile(file, []byte("null"), 0o600))
	b.run(0, "policy", "set", "-f", file, "box")
	out, _ = b.run(0, "policy", "get", "box")
	b.says(out, "no policy: nothing can be reached")
}

func TestNetworkRefusals(t *testing.T) {
	b := newBox(t)
	for _, tc := range []struct {
		args  string
		words []string
	}{
		{"bogus", []string{"network:", "bogus", "cube network --help"}},
		{"policy bogus", []string{"network policy:", "bogus"}},
		{"status now", []string{"network status:", "no arguments"}},
		{"flows", []string{"network flows:", "one container"}},
		{"flows none", []string{"container none", "no place in the network"}},
		{"flows none/box", []string{"container none/box"}},
		{"flows -w --json box", []string{"--watch"}},
		{"drops none", []string{"no place"}},
		{"policy get none", []string{"no place"}},
		{"policy set --no-internet none", []string{"no place"}},
		{"policy set box", []string{"which policy"}},
		{"policy set -f - --no-internet box", []string{"-f goes with no other"}},
		{"policy set -f /nonexistent/policy box", []string{"no such file"}},
		{"policy set --default maybe box", []string{"maybe"}},
		{"policy set --default allow --no-internet box", []string{"contradict"}},
		{"policy set --default deny --deny 1.2.3.4 box", []string{"no effect"}},
		{"trace box", []string{"a container and a destination"}},
		{"trace box example.com", []string{`"example.com"`, "IPv4"}},
		{"trace box 1.2.3.4 more --json", []string{"a container and a destination"}},
		{"trace none 1.2.3.4", []string{"no place"}},
	} {
		_, msg := b.run(1, strings.Fields(tc.args)...)
		if !strings.HasPrefix(msg, "cube: network") || strings.Count(msg, "\n") != 1 {
			t.Errorf("%s: not one line of cube's: %q", tc.args, msg)
		}
		for _, w := range tc.words {
			if !strings.Contains(msg, w) {
				t.Errorf("%s: it doesn't say %q: %s", tc.args, w, msg)
			}
		}
	}
	t.Setenv(config.FileEnv, configure(t))
	for _, args := range [][]string{{"status"}, {"flows", "box"}, {"trace", "box", "1.2.3.4"}} {
		if _, msg := b.run(1, args...); !strings.Contains(msg, "cube up") {
			t.Errorf("%v without a network: %s", args, msg)
		}
	}
}

func TestWriteState(t *testing.T) {
	local := netip.MustParseAddr("127.0.0.1")
	var out bytes.Buffer
	testnet.Must(t, writeState(&out, networkState{
		Overview: &network.Overview{Findings: []network.Finding{{Level: "blocked", Detail: "somebody's rules", Remedy: "change them"}, {Level: "broken", Detail: "a record"}}},
		Daemon:   true,
		Ports: []ports.State{
			{Port: ports.Port{HostIP: local, HostPort: 8080, ContainerPort: 80, Protocol: "tcp"}, ID: "default-box"},
			{Port: ports.Port{HostIP: local, HostPort: 53, ContainerPort: 53, Protocol: "udp"}, ID: "default-box", Reason: "address in use"},
		},
	}))
	(&box{t: t}).says(out.String(), "uplink none", "hook none", "daemon running",
		"port 127.0.0.1:8080/tcp to 80 of default-box", "port 127.0.0.1:53/udp to 53 of default-box, which isn't served: address in use",
		"blocked somebody's rules; change them", "broken a record")
}

func TestWriteDrops(t *testing.T) {
	at := time.Date(2024, 1, 2, 3, 4, 5, 678e6, time.Local)
	var out bytes.Buffer
	testnet.Must(t, writeDrops(&out, dropped{
		Counters: []reasonCount{{"policy", 3, 300}},
		Recent: []daemon.Drop{
			{Time: at, Reason: "policy", Rule: 2, Protocol: 6, Remote: netip.MustParseAddr("1.2.3.4"), RemotePort: 443, GuestPort: 1000, Length: 54},
			{Time: at, Reason: "vlan", Length: 60},
			{Time: at, ToGuest: true, Reason: "no-flow", Protocol: 1, Remote: netip.MustParseAddr("1.2.3.4"), Length: 98},
		},
	}))
	(&box{t: t}).says(out.String(), "policy 3 300",
		"Jan 2 03:04:05.678 from guest policy 2 tcp 1.2.3.4:443 1000 54",
		"from guest vlan - - - - 60",
		"to guest no-flow - icmp 1.2.3.4 - 98")
}
