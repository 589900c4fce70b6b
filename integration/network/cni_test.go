package network

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
)

// cniConfig is the plugin's part of a network configuration.
func cniConfig() map[string]any {
	return map[string]any{
		"cniVersion": "1.1.0", "name": "internet", "type": "cube-cni",
		"cubeConfig": filepath.Join(s.Dir, "config.toml"), "policy": map[string]any{"default": "allow"},
	}
}

// withCNI runs ctr as on a host that has this network configuration alone: where it looks for it, and for plugins, isn't
// ctr's to choose.
func withCNI(t *testing.T, args ...string) stack.Result {
	t.Helper()
	dir := t.TempDir()
	conf, bin := filepath.Join(dir, "etc/cni/net.d"), filepath.Join(dir, "opt/cni/bin")
	must(t, os.MkdirAll(conf, 0o755))
	must(t, os.MkdirAll(bin, 0o755))
	must(t, os.Symlink(filepath.Join(s.Config.BinDir, "cube-cni"), filepath.Join(bin, "cube-cni")))
	list, err := json.Marshal(map[string]any{"cniVersion": "1.1.0", "name": "internet", "plugins": []any{cniConfig()}})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(conf, "10-cube.conflist"), list, 0o600))
	const mounts = `set -e
for d in etc opt; do mount -t overlay -o "lowerdir=$0/$d:/$d" overlay /$d; done
mount --bind "$0/etc/cni/net.d" /etc/cni/net.d
exec "$@"`
	ctr := s.Command("ctr", args...)
	// All after nsenter's own arguments, which is the command that it runs.
	cmd := s.Host.Command("unshare", append([]string{"--mount", "sh", "-c", mounts, dir}, ctr.Args[3:]...)...)
	cmd.Env = ctr.Env
	return s.Run(cmd, nil)
}

// plugin runs cube-cni for a container, with a namespace that a runtime would give it.
func plugin(t *testing.T, command, id, netns string) stack.Result {
	t.Helper()
	conf, err := json.Marshal(cniConfig())
	must(t, err)
	cmd := s.Host.Command(filepath.Join(s.Config.BinDir, "cube-cni"))
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+command, "CNI_CONTAINERID=default-"+id, "CNI_NETNS="+netns, "CNI_IFNAME=eth0", "CNI_PATH="+s.Config.BinDir)
	return s.Run(cmd, conf)
}

// TestCNI: the plugin opens a container's place before there is one, or when there is one that isn't started yet; without it
// the place stays closed.
func TestCNI(t *testing.T) {
	const ask = `exec 3<>/dev/tcp/server.test/7000 && echo who >&3 && head -n 1 <&3`
	run := func(name, within string, flags ...string) []string {
		args := append([]string{"run", "--rm", "--runtime", "io.cube.v2", "--snapshotter", "cube"}, flags...)
		return append(args, stack.Image, s.ID(t, name), "timeout", within, "bash", "-c", ask)
	}
	reached := testhost.Uplink.String() + "\n"
	t.Run("ADD after Create", func(t *testing.T) {
		nothingLeft(t)
		if r := withCNI(t, run("after", "60", "--cni")...); r.Stdout != reached {
			t.Errorf("%+v", r)
		}
	})
	t.Run("ADD before Create", func(t *testing.T) {
		nothingLeft(t)
		ns, err := testhost.NewNamespace()
		must(t, err)
		defer ns.Close()
		id := s.ID(t, "before")
		r := plugin(t, "ADD", id, ns.Path())
		var result struct{ IPs []struct{ Address string } }
		if err := json.Unmarshal([]byte(r.Stdout), &result); err != nil || r.Err != nil || len(result.IPs) != 1 {
			t.Fatalf("ADD: %+v, %v", r, err)
		}
		if r := s.Ctr(run("before", "60")...); r.Stdout != reached {
			t.Errorf("%+v", r)
		}
		for range 2 {
			if r := plugin(t, "DEL", id, ns.Path()); r.Err != nil {
				t.Errorf("DEL: %+v", r)
			}
		}
	})
	t.Run("no ADD", func(t *testing.T) {
		nothingLeft(t)
		if r := s.Ctr(run("closed", "3")...); r.Code == 0 || r.Stdout != "" {
			t.Errorf("%+v", r)
		}
	})
}
