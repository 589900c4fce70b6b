package manager_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"golang.org/x/sys/unix"
)

// newSandbox makes the bundles of a sandbox, which has no config.json, and of containers in it, for which no shim is
// started.
func newSandbox(t *testing.T, ids ...string) (box *daemon, members []*daemon) {
	t.Helper()
	all := newPod(t, append([]string{"pod"}, ids...)...)
	all[0].must(os.Remove(filepath.Join(all[0].bundle, "config.json")))
	return all[0], all[1:]
}

// sandbox starts it, with the containers.
func (d *daemon) sandbox(members []*daemon) sandboxapi.TTRPCSandboxService {
	d.Helper()
	r, err := d.start()
	d.must(err)
	conn := d.dial(r.Address)
	c := sandboxapi.NewTTRPCSandboxClient(conn)
	_, err = c.CreateSandbox(d.Context(), &sandboxapi.CreateSandboxRequest{SandboxID: d.id, BundlePath: d.bundle})
	d.must(err)
	_, err = c.StartSandbox(d.Context(), &sandboxapi.StartSandboxRequest{SandboxID: d.id})
	d.must(err)
	for _, m := range members {
		m.create(taskapi.NewTTRPCTaskClient(conn))
	}
	return c
}

// TestKilledShimOfASandbox: whoever's delete comes first ends the machine, and each is told its own exit.
func TestKilledShimOfASandbox(t *testing.T) {
	for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			box, members := newSandbox(t, "a", "b")
			all := append(members, box)
			box.sandbox(members)
			pid := box.shimPID()
			box.must(unix.Kill(pid, unix.SIGKILL))
			box.ended(pid)
			for _, i := range order {
				if del, warnings := all[i].delete(); del.ExitStatus != 137 || warnings != "" {
					t.Errorf("delete of %s: %v, %q", all[i].id, del, warnings)
				}
			}
			box.nothingLeft()
		})
	}
}

// TestDeleteOfASandbox: containerd has given the pod up, whatever is in it.
func TestDeleteOfASandbox(t *testing.T) {
	box, members := newSandbox(t, "a")
	box.sandbox(members)
	pid := box.shimPID()
	if del, warnings := box.delete(); del.ExitStatus != 137 || warnings != "" {
		t.Errorf("delete: %v, %q", del, warnings)
	}
	box.ended(pid)
	members[0].delete()
	box.nothingLeft()
}

// TestDeleteOfASandboxesContainer: the pod goes on, also with none.
func TestDeleteOfASandboxesContainer(t *testing.T) {
	box, members := newSandbox(t, "a")
	c := box.sandbox(members)
	if del, warnings := members[0].delete(); del.ExitStatus != 137 || warnings != "" {
		t.Errorf("delete: %v, %q", del, warnings)
	}
	s, err := c.SandboxStatus(t.Context(), &sandboxapi.SandboxStatusRequest{SandboxID: box.id})
	box.must(err)
	if s.State != "SANDBOX_READY" {
		t.Errorf("status %v", s)
	}
}

// TestShutdownOfASandbox: it ends the shim, and leaves nothing that `shim delete` would have to undo but records.
func TestShutdownOfASandbox(t *testing.T) {
	box, members := newSandbox(t, "a")
	c := box.sandbox(members)
	pid := box.shimPID()
	_, err := c.ShutdownSandbox(t.Context(), &sandboxapi.ShutdownSandboxRequest{SandboxID: box.id})
	box.must(err)
	box.ended(pid)
	if left, _ := os.ReadDir(box.dir + "/run/vm"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	for _, d := range []*daemon{members[0], box} {
		if _, warnings := d.delete(); warnings != "" {
			t.Errorf("delete: %q", warnings)
		}
	}
	box.nothingLeft()
}

// TestOptionsOfASandbox: the runtime's options name its configuration, since no request for a container comes before.
func TestOptionsOfASandbox(t *testing.T) {
	for name, c := range map[string]func(*daemon) *runtimeoptions.Options{
		"path": func(d *daemon) *runtimeoptions.Options {
			file := filepath.Join(d.dir, "other.toml")
			d.must(os.WriteFile(file, d.other(), 0o600))
			return &runtimeoptions.Options{ConfigPath: file}
		},
		"body": func(d *daemon) *runtimeoptions.Options { return &runtimeoptions.Options{ConfigBody: d.other()} },
	} {
		t.Run(name, func(t *testing.T) {
			box, _ := newSandbox(t)
			box.options = c(box)
			box.sandbox(nil)
			if machines, _ := os.ReadDir(box.dir + "/other/vm"); len(machines) != 1 {
				t.Errorf("machines by the options: %v", machines)
			}
			box.delete()
			if machines, _ := os.ReadDir(box.dir + "/other/vm"); len(machines) > 0 {
				t.Errorf("left: %v", machines)
			}
		})
	}
}

// other is a configuration that differs from the default one.
func (d *daemon) other() []byte {
	return fmt.Appendf(nil, "state_dir = %q\nrun_dir = %q\n", d.dir+"/state", d.dir+"/other")
}
