package traffic

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
)

// runtime calls the installed plugin as a container runtime does, by CNI's own tool.
type runtime struct {
	t    *testing.T
	dir  string // its configuration, and its cache
	tool string
}

// newRuntime has the tool built, unless it is there.
func newRuntime(t *testing.T) *runtime {
	t.Helper()
	root, err := stack.Repository()
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), s.Config.Timeout(10*time.Minute))
	defer cancel()
	if out, err := exec.CommandContext(ctx, filepath.Join(root, "deploy", "setup", "tools.sh"), "cnitool").CombinedOutput(); err != nil {
		t.Fatalf("build cnitool: %v: %s", err, out)
	}
	r := &runtime{t: t, dir: t.TempDir(), tool: filepath.Join(stack.Cache(), "bin", "cnitool")}
	list, err := json.Marshal(map[string]any{"cniVersion": "1.1.0", "name": "cube", "plugins": []any{r.plugin()}})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(r.dir, "10-cube.conflist"), list, 0o600))
	return r
}

// plugin is the plugin's part of the configuration.
func (r *runtime) plugin() map[string]any {
	return map[string]any{"type": "cube-cni", "cubeConfig": filepath.Join(s.Dir, "config.toml"), "policy": map[string]any{"default": "allow"}}
}

// call runs a verb of the tool for the container that has a network namespace. The tool's cache is where it likes, below
// /var/lib, which is the test's own there.
func (r *runtime) call(verb string, container *testhost.Namespace) stack.Result {
	r.t.Helper()
	cmd := s.Host.Command("unshare", "--mount", "sh", "-c", `mount --bind "$0" /var/lib && exec "$@"`, r.dir, r.tool, verb, "cube", container.Path())
	cmd.Env = append(os.Environ(), "NETCONFPATH="+r.dir, "CNI_PATH="+s.Config.BinDir)
	return s.Run(cmd, nil)
}

// does expects that it succeeds.
func (r *runtime) does(verb string, container *testhost.Namespace) string {
	r.t.Helper()
	got := r.call(verb, container)
	if got.Err != nil {
		r.t.Fatalf("cnitool %s: %v %s", verb, got.Err, got.Stdout)
	}
	return got.Stdout
}

// refuses expects that it fails, and says so.
func (r *runtime) refuses(verb string, container *testhost.Namespace, says string) {
	r.t.Helper()
	if got := r.call(verb, container); got.Err == nil || !strings.Contains(got.Stdout+got.Stderr, says) {
		r.t.Errorf("cnitool %s: %+v, want %q", verb, got, says)
	}
}

// empty expects that nobody has a place in the network.
func (r *runtime) empty(when string) {
	r.t.Helper()
	s.Eventually(r.t, patience, when+": nothing left: "+strings.Join(s.VMLeaks(), ", "), func() bool { return len(s.VMLeaks()) == 0 })
}

func newNamespace(t *testing.T) *testhost.Namespace {
	t.Helper()
	ns, err := testhost.NewNamespace()
	must(t, err)
	t.Cleanup(func() { must(t, ns.Close()) })
	return ns
}

// TestCNITool: a runtime adds containers, checks and deletes them, and collects what is left of those that it doesn't know any
// more, whether the daemon runs or not.
func TestCNITool(t *testing.T) {
	r := newRuntime(t)
	one, other := newNamespace(t), newNamespace(t)
	verbs := func() {
		t.Helper()
		r.does("status", one)
		var added struct {
			IPs []struct{ Address netip.Prefix }
		}
		must(t, json.Unmarshal([]byte(r.does("add", one)), &added))
		if len(added.IPs) != 1 || !s.Config.Network.Pool.Contains(added.IPs[0].Address.Addr()) {
			t.Errorf("added %+v", added)
		}
		r.refuses("add", one, "has an interface already")
		r.does("add", other)
		r.does("check", one)
		r.does("del", one)
		r.does("del", one)
		r.refuses("check", one, "")
		r.does("check", other) // who is another container
	}
	verbs()
	r.does("gc", one)
	r.refuses("check", other, "")
	r.empty("after gc")

	// Runtimes go on, and containers come and go, while there is no daemon.
	r.does("add", other)
	s.End(t, up(), unix.SIGKILL)
	r.does("check", other)
	r.does("del", other)
	verbs()
	cube(t, "up", "-d")
	r.does("check", other)
	r.does("del", other)
	r.does("status", other)
	r.empty("after del")
}

// TestCNICrash: a plugin that is killed anywhere, of which the runtime knows nothing any more, leaves nothing after gc.
func TestCNICrash(t *testing.T) {
	r := newRuntime(t)
	after := newNamespace(t)
	one := r.plugin()
	one["cniVersion"], one["name"] = "1.1.0", "cube"
	config, err := json.Marshal(one)
	must(t, err)
	began := time.Now()
	r.does("add", after)
	whole := time.Since(began)
	r.does("del", after)
	killed := 0
	for i := range 10 {
		cmd := s.Host.Command(filepath.Join(s.Config.BinDir, "cube-cni"))
		cmd.Stdin = strings.NewReader(string(config))
		cmd.Env = append(os.Environ(), "CNI_COMMAND=ADD", fmt.Sprint("CNI_CONTAINERID=crash", i), "CNI_NETNS="+after.Path(), "CNI_IFNAME=eth0", "CNI_PATH="+s.Config.BinDir)
		must(t, cmd.Start())
		time.Sleep(rand.N(whole)) // where it is by then is chance, and meant to be
		_ = cmd.Process.Kill()
		if cmd.Wait() != nil {
			killed++
		}
	}
	t.Logf("%d of 10 were killed before their end", killed)
	r.does("gc", after)
	r.empty("after gc")
	r.does("add", after)
	r.does("check", after)
	r.does("del", after)
	r.empty("after del")
}
