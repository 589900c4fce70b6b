package faults

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
)

// TestNetNSGone takes away the network namespace that a container was to have, or has.
func TestNetNSGone(t *testing.T) {
	t.Run("before the start", func(t *testing.T) {
		path, drop := netns(t)
		drop()
		id := s.ID(t, "netns")
		r := s.Ctr("run", "--rm", "--runtime", "io.cube.v2", "--snapshotter", "cube", "--with-ns", "network:"+path, stack.Image, id, "true")
		if msg := strings.TrimSpace(r.Stderr); r.Err == nil || !strings.Contains(msg, path) || strings.Contains(msg, "\n") {
			t.Errorf("want an error of one line that names the namespace: %+v", r)
		}
		remove(t, id)
		nothingLeft(t, id)
	})
	t.Run("while it runs", func(t *testing.T) {
		path, drop := netns(t)
		id, _ := start(t, "netns", []string{"--with-ns", "network:" + path}, "sleep", "1000")
		ch := exits(t, id)
		drop()
		if r := s.Ctr("task", "exec", "--exec-id", "e", id, "echo", "on"); r.Stdout != "on\n" {
			t.Errorf("%+v", r)
		}
		a := ask(t, id)
		a.kill(heard)
		a.wait(heard, 137)
		mustHear(t, id, ch)
		nothingLeft(t, id)
	})
}

// netns makes a network namespace with a path, which drop takes away.
func netns(t *testing.T) (path string, drop func()) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	command(t, exec.Command("unshare", "--net="+path, "true"))
	drop = func() {
		_ = unix.Unmount(path, unix.MNT_DETACH) // the second time there is none
		_ = os.Remove(path)
	}
	t.Cleanup(drop)
	return path, drop
}

// TestFullStore fills the disk that all containers' disks are on. Whoever writes stands still, and goes on when there is
// space; meanwhile it answers, and can be deleted.
func TestFullStore(t *testing.T) {
	log := filepath.Join(s.Config.LogDir(), "containerd.log")
	const write = "dd if=/dev/zero of=/big bs=1M count=300 conv=fsync 2>/dev/null; echo $?"
	stalled := func(t *testing.T, name string) (id string, stdout *strings.Builder, wait func() error, drop func()) {
		id, _ = start(t, name, nil, "sleep", "1000")
		drop = fill(t)
		before := size(t, log)
		cmd := s.Command("ctr", "task", "exec", "--exec-id", "write", id, "sh", "-c", write)
		stdout = &strings.Builder{}
		cmd.Stdout = stdout
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		s.Eventually(t, 60*time.Second, "the machine stands still", func() bool {
			b, err := os.ReadFile(log)
			return err == nil && int64(len(b)) > before && strings.Contains(string(b[before:]), "the store is full")
		})
		return id, stdout, cmd.Wait, drop
	}
	t.Run("goes on", func(t *testing.T) {
		id, stdout, wait, drop := stalled(t, "writer")
		a := ask(t, id)
		a.state(prompt, client.Running)
		a.pids(prompt)
		began := time.Now()
		other := s.ID(t, "other")
		r := s.Ctr("run", "--rm", "--runtime", "io.cube.v2", "--snapshotter", "cube", stack.Image, other, "echo", "hello")
		if msg := strings.TrimSpace(r.Stderr); r.Err != nil && (strings.Contains(msg, "\n") || !strings.Contains(msg, "free")) {
			t.Errorf("want an error of one line that says what is missing: %+v", r)
		}
		if took := time.Since(began); took > s.Config.Timeout(30*time.Second) {
			t.Errorf("another container took %v", took)
		}
		t.Logf("another container: %q, %v", r.Stdout, r.Err)
		remove(t, other)
		drop()
		done := make(chan error, 1)
		go func() { done <- wait() }()
		select {
		case err := <-done:
			if err != nil || stdout.String() != "0\n" {
				t.Errorf("%v, output %q", err, stdout.String())
			}
		case <-time.After(s.Config.Timeout(90 * time.Second)):
			t.Error("it doesn't go on")
		}
		remove(t, id)
		nothingLeft(t, id, other)
	})
	t.Run("deleted", func(t *testing.T) {
		oneOfMany(t)
		id, _, wait, drop := stalled(t, "writer")
		began := time.Now()
		remove(t, id)
		t.Logf("deleted after %v", time.Since(began))
		_ = wait() // its container is gone
		drop()
		nothingLeft(t, id)
	})
}

// fill leaves little space in the store. drop frees it again.
func fill(t *testing.T) (drop func()) {
	t.Helper()
	const rest = 64 << 20
	var st unix.Statfs_t
	if err := unix.Statfs(s.Config.StoreDir(), &st); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(s.Config.StoreDir(), "filler")
	drop = func() { _ = os.Remove(path) } // the second time there is none
	t.Cleanup(drop)
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-rest); err != nil {
		t.Fatal(err)
	}
	return drop
}

func size(t *testing.T, file string) int64 {
	t.Helper()
	st, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	return st.Size()
}

// TestFullRun makes a container while there is no space for what a shim, or a machine, writes down before it acquires
// anything: it is refused, and nothing is left.
func TestFullRun(t *testing.T) {
	for name, dir := range map[string]string{"pods": s.Config.PodDir(), "machines": s.Config.VMDir()} {
		t.Run(name, func(t *testing.T) {
			id := s.ID(t, "full")
			run := func() stack.Result {
				return s.Ctr("run", "--rm", "--runtime", "io.cube.v2", "--snapshotter", "cube", stack.Image, id, "echo", "hello")
			}
			drop := fullTmpfs(t, dir)
			r := run()
			if msg := strings.TrimSpace(r.Stderr); r.Err == nil || strings.Contains(msg, "\n") || !strings.Contains(msg, "no space left") {
				t.Errorf("want an error of one line that says what is missing: %+v", r)
			}
			remove(t, id)
			drop()
			nothingLeft(t, id)
			if r := run(); r.Stdout != "hello\n" {
				t.Errorf("with space: %+v", r)
			}
			nothingLeft(t, id)
		})
	}
}

// fullTmpfs puts a file system on a directory that takes files, but nothing in them. drop takes it away.
func fullTmpfs(t *testing.T, dir string) (drop func()) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("full", dir, "tmpfs", 0, "size=4k,mode=711"); err != nil {
		t.Fatal(err)
	}
	drop = func() { _ = unix.Unmount(dir, unix.MNT_DETACH) } // the second time there is none
	t.Cleanup(drop)
	if err := os.WriteFile(filepath.Join(dir, "filler"), make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	return drop
}
