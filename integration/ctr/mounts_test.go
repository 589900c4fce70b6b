package ctr

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
)

// bind is ctr's flag for a bind mount.
func bind(source, destination, options string) []string {
	return []string{"--mount", "type=bind,src=" + source + ",dst=" + destination + ",options=" + options}
}

// TestBindMounts: directories and single files of the host, live in both directions, and read-only where that is asked for.
func TestBindMounts(t *testing.T) {
	dir, readOnly := t.TempDir(), t.TempDir()
	file := filepath.Join(t.TempDir(), "settings")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(dir, "hello"), "from the host")
	write(filepath.Join(readOnly, "data"), "can't be changed")
	write(file, "one file")
	flags := append(bind(dir, "/dir", "rbind:rw"), bind(readOnly, "/ro", "rbind:ro")...)
	flags = append(append(flags, bind(file, "/etc/settings", "bind:ro")...), "-d")

	id := s.ID(t, "mounts")
	if r := s.Ctr(runArgs(id, flags, "sleep", "1000")...); r.Err != nil {
		t.Fatal(r.Err)
	}
	removed := false
	t.Cleanup(func() {
		if !removed {
			s.Ctr("task", "rm", "-f", id)
			s.Ctr("container", "rm", id)
		}
	})
	in := func(script string) stack.Result {
		return s.Ctr("task", "exec", "--exec-id", "e", id, "sh", "-c", script)
	}
	r := in("cat /dir/hello /ro/data /etc/settings; echo from the guest >/dir/answer; echo no >/ro/data; ls /etc/settings /dir")
	if want := "from the hostcan't be changedone file"; !strings.HasPrefix(r.Stdout, want) || !strings.Contains(r.Stderr, "Read-only file system") {
		t.Errorf("%q and %q, want %q", r.Stdout, r.Stderr, want)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "answer")); err != nil || string(b) != "from the guest\n" {
		t.Errorf("the guest's file: %q, %v", b, err)
	}
	if b, err := os.ReadFile(filepath.Join(readOnly, "data")); err != nil || string(b) != "can't be changed" {
		t.Errorf("the read-only file: %q, %v", b, err)
	}
	write(filepath.Join(dir, "hello"), "something else")
	write(filepath.Join(dir, "later"), " and new")
	if r := in("cat /dir/hello /dir/later"); r.Stdout != "something else and new" {
		t.Errorf("after a change %q, %v", r.Stdout, r.Err)
	}
	if left := stack.CgroupLeaks(id); len(left) == 0 {
		t.Error("no helper, says the test for what is left of it")
	}

	if r := s.Ctr("task", "rm", "-f", id); r.Err != nil {
		t.Fatal(r.Err)
	}
	if r := s.Ctr("container", "rm", id); r.Err != nil {
		t.Fatal(r.Err)
	}
	removed = true
	noLeaks(t, id)
}

// TestBindMountsOfAKilledShim: the helper goes with it.
func TestBindMountsOfAKilledShim(t *testing.T) {
	id := s.ID(t, "killed")
	if r := s.Ctr(runArgs(id, append(bind(t.TempDir(), "/dir", "rbind:rw"), "-d"), "sleep", "1000")...); r.Err != nil {
		t.Fatal(r.Err)
	}
	t.Cleanup(func() {
		s.Ctr("task", "rm", "-f", id)
		s.Ctr("container", "rm", id)
	})
	shims := s.Processes("containerd-shim-cube-v2")
	if len(shims) != 1 {
		t.Fatalf("shims %v", shims)
	}
	if err := syscall.Kill(shims[0].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	s.Eventually(t, 10*time.Second, "all of it undone", func() bool {
		return len(s.VMLeaks()) == 0 && len(stack.CgroupLeaks(id)) == 0
	})
}
