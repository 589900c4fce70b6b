package network

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/cni/daemon"
	"github.com/cubesandbox/cube/cni/trace"
	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
)

// says checks that there is a line with all of that, whatever its columns are wide.
func says(t *testing.T, text string, words string) {
	t.Helper()
	for line := range strings.Lines(text) {
		if strings.Contains(strings.Join(strings.Fields(line), " "), words) {
			return
		}
	}
	t.Errorf("no line says %q:\n%s", words, text)
}

// TestCommands: what cube run and cube network say of a container is what it has.
func TestCommands(t *testing.T) {
	data := fmt.Sprintf("%s:%d", testhost.Server, testhost.DataPort)
	x := newBox(t, "cli", "--no-internet", "--allow", data+"/tcp")

	c := x.converse(t, testhost.Server)
	c.say(t, "one")
	c.hears(t, "one")
	if got := x.sh(t, fmt.Sprintf(`exec 4<>/dev/udp/%s/%d; echo x >&4; read -r -t 1 line <&4; echo "got $line"`, testhost.Server, testhost.EchoPort)); got != "got" {
		t.Errorf("what isn't allowed is answered: %s", got)
	}
	if got := x.sh(t, "getent ahostsv4 server.test | head -1"); !strings.HasPrefix(got, testhost.Server.String()) {
		t.Errorf("without the internet names are looked up as %q", got)
	}

	t.Run("status", func(t *testing.T) {
		got := cube(t, "network", "status")
		says(t, got, "uplink "+testhost.UplinkDevice)
		says(t, got, "hook tcx")
		says(t, got, "daemon running")
		says(t, got, "containers ")
	})
	t.Run("flows", func(t *testing.T) {
		says(t, cube(t, "network", "flows", x.id), "tcp "+data)
		var flows []trace.Flow
		must(t, json.Unmarshal([]byte(cube(t, "network", "flows", "--json", "default/"+x.id)), &flows))
		found := false
		for _, f := range flows {
			found = found || f.Remote == data && f.State == "open" && f.Rule == 1 && f.TXBytes > 0 && f.RXBytes > 0
		}
		if !found {
			t.Errorf("flows %+v", flows)
		}
	})
	t.Run("trace", func(t *testing.T) {
		got := cube(t, "network", "trace", x.id, data)
		says(t, got, "verdict allow, by rule 1")
		says(t, got, "leaves as "+testhost.Uplink.String()+":")
		says(t, got, "ESTABLISHED")
		says(t, got, "route via "+testhost.Router.String()+", device "+testhost.UplinkDevice)
		r := s.Cube("network", "trace", x.id, fmt.Sprintf("%s:%d/udp", testhost.Server, testhost.EchoPort))
		if r.Code != 1 || !strings.Contains(r.Stderr, "is not reached: the policy in force says deny, by default") {
			t.Errorf("of what is denied: %+v", r)
		}
	})
	t.Run("drops", func(t *testing.T) {
		says(t, cube(t, "network", "drops", x.id), "policy 1 ")
		// The daemon reads the event a moment later.
		s.Eventually(t, patience, "the drop by itself", func() bool {
			var drops struct{ Recent []daemon.Drop }
			must(t, json.Unmarshal([]byte(cube(t, "network", "drops", "--json", x.id)), &drops))
			for _, d := range drops.Recent {
				if d.Reason == "policy" && d.Remote == testhost.Server && d.RemotePort == testhost.EchoPort && !d.ToGuest {
					return true
				}
			}
			return false
		})
	})
	t.Run("policy", func(t *testing.T) {
		says(t, cube(t, "network", "policy", "get", x.id), fmt.Sprintf("1 allow %s %d tcp", testhost.Server, testhost.DataPort))
		file := filepath.Join(t.TempDir(), "policy.json")
		must(t, os.WriteFile(file, []byte(cube(t, "network", "policy", "get", "--json", x.id)), 0o600))

		// What is open is cut with the next packet, and goes on.
		cube(t, "network", "policy", "set", "--no-internet", x.id)
		c.say(t, "two")
		c.hearsNothing(t)
		cube(t, "network", "policy", "set", "-f", file, x.id)
		c.hears(t, "two")

		r := s.Cube("network", "policy", "set", "--deny", "1.2.3.4/8", x.id)
		if r.Code != 1 || !strings.Contains(r.Stderr, "--deny 1.2.3.4/8") {
			t.Errorf("a bad rule: %+v", r)
		}
		c.say(t, "three")
		c.hears(t, "three")
	})
	t.Run("none", func(t *testing.T) {
		r := s.Cube("run", "--rm", "--name", s.ID(t, "none"), "--network", "none", stack.Image,
			"bash", "-c", fmt.Sprintf("exec 2>&1; tail -n +2 /proc/net/route; (exec 3<>/dev/tcp/%s/%d)", testhost.Server, testhost.DataPort))
		if got := r.Stdout; !strings.Contains(got, "Network is unreachable") || strings.Contains(got, "eth0") {
			t.Errorf("without a network: %q", got)
		}
		if r = s.Cube("network", "flows", s.ID(t, "none")); r.Code != 1 || !strings.Contains(r.Stderr, "no place in the network") {
			t.Errorf("flows of none: %+v", r)
		}
	})
}
