package ctr

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
)

// sandbox makes one, and removes it at the end of the test.
func sandbox(t *testing.T) string {
	t.Helper()
	id := s.ID(t, "box")
	spec := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(spec, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Ctr("sandboxes", "rm", "-f", id)
		noLeaks(t, id)
	})
	if r := s.Ctr("sandboxes", "run", "--runtime", "io.cube.v2", spec, id); r.Err != nil {
		t.Fatal(r.Err)
	}
	return id
}

// in starts a container in a sandbox.
func in(t *testing.T, box, name string) string {
	t.Helper()
	id := s.ID(t, name)
	if r := s.Ctr(runArgs(id, []string{"-d", "--sandbox", box}, "sleep", "1000")...); r.Err != nil {
		t.Fatal(r.Err)
	}
	t.Cleanup(func() {
		s.Ctr("task", "rm", "-f", id)
		if r := s.Ctr("container", "rm", id); r.Err != nil {
			t.Error(r.Err)
		}
	})
	return id
}

func status(id string) string {
	for _, line := range strings.Split(s.Ctr("task", "ls").Stdout, "\n") {
		if f := strings.Fields(line); len(f) == 3 && f[0] == id {
			return f[2]
		}
	}
	return ""
}

func execs(t *testing.T, id string) {
	t.Helper()
	if r := s.Ctr("task", "exec", "--exec-id", "e", id, "echo", "here"); r.Err != nil || r.Stdout != "here\n" {
		t.Errorf("exec in %s: %q, %v", id, r.Stdout, r.Err)
	}
}

// TestSandbox: containers come into a machine that is there before them, which a containerd that is killed doesn't end.
func TestSandbox(t *testing.T) {
	box := sandbox(t)
	a, b := in(t, box, "a"), in(t, box, "b")
	machine := s.PID(t, a)
	if pid := s.PID(t, b); pid != machine {
		t.Errorf("machines %d and %d", machine, pid)
	}
	if r := s.Ctr("task", "rm", "-f", a); r.Err != nil {
		t.Error(r.Err)
	}
	execs(t, b)

	daemon := s.Processes(filepath.Join(s.Config.RunDir, "containerd.toml"))
	if len(daemon) != 1 {
		t.Fatalf("containerd: %v", daemon)
	}
	if err := unix.Kill(daemon[0].PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	s.Eventually(t, 60*time.Second, "the next containerd's answer", func() bool {
		next := s.Processes(filepath.Join(s.Config.RunDir, "containerd.toml"))
		return len(next) == 1 && next[0].PID != daemon[0].PID && status(b) == "RUNNING"
	})
	execs(t, b)
	execs(t, in(t, box, "c"))
	if pid := s.PID(t, b); pid != machine {
		t.Errorf("machines %d and %d", machine, pid)
	}

	if r := s.Ctr("sandboxes", "rm", box); r.Err != nil || strings.Contains(r.Stderr, "failed") {
		t.Errorf("rm: %v: %s", r.Err, r.Stderr)
	}
	if err := unix.Kill(machine, 0); err != unix.ESRCH {
		t.Errorf("the machine: %v", err)
	}
}

// TestKilledShimOfASandbox: containerd sees the end of all containers, and the id can be used again.
func TestKilledShimOfASandbox(t *testing.T) {
	box := sandbox(t)
	a := in(t, box, "a")
	shims := s.Processes("containerd-shim-cube-v2")
	if len(shims) != 1 {
		t.Fatalf("shims: %v", shims)
	}
	if err := unix.Kill(shims[0].PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	s.Eventually(t, 10*time.Second, "the end of the machine", func() bool {
		return status(a) != "RUNNING" && len(s.VMLeaks()) == 0 && len(stack.CgroupLeaks(box)) == 0
	})
}
