package cgroup

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// group makes a cgroup on this host, where there is a unified hierarchy.
func group(t *testing.T) Group {
	t.Helper()
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup2"))
	if err != nil {
		t.Fatal(err)
	}
	if len(mounts) == 0 || os.Geteuid() != 0 {
		t.Skip("making a cgroup takes root and a cgroup2 mount")
	}
	g := New(mounts[0].Mountpoint, "/cube-test-"+strings.ToLower(filepath.Base(t.Name())))
	if err := os.Mkdir(g.dir(), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(g.dir()); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	})
	return g
}

// run starts a process in the cgroup, or in one below it.
func run(t *testing.T, g Group, script string) *exec.Cmd {
	t.Helper()
	dir, err := os.Open(g.dir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	c := exec.Command("/bin/sh", "-c", script)
	c.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	return c
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestKillAndWaitEmpty(t *testing.T) {
	g := group(t)
	below := New(g.mountpoint, g.path+"/below")
	if err := os.Mkdir(below.dir(), 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(below.dir())
	a, b := run(t, g, "sleep 60"), run(t, below, "exec sleep 60")
	pids, err := g.Processes()
	if err != nil || !slices.Contains(pids, a.Process.Pid) || !slices.Contains(pids, b.Process.Pid) {
		t.Fatalf("processes %v, %v", pids, err)
	}
	short, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := g.WaitEmpty(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait while there are processes: %v", err)
	}
	if err := g.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if _ = b.Wait(); !strings.Contains(b.ProcessState.String(), "terminated") {
		t.Errorf("ended with %v", b.ProcessState)
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = a.Wait()
	if err := g.WaitEmpty(testContext(t)); err != nil {
		t.Fatal(err)
	}
}

func TestDelegate(t *testing.T) {
	g := group(t)
	for range 2 {
		if err := g.Delegate(); err != nil {
			t.Fatal(err)
		}
	}
	has, err := os.ReadFile(filepath.Join(g.dir(), "cgroup.controllers"))
	if err != nil {
		t.Fatal(err)
	}
	gives, err := os.ReadFile(filepath.Join(g.dir(), "cgroup.subtree_control"))
	if err != nil || string(gives) != string(has) {
		t.Errorf("has %q, gives %q, %v", has, gives, err)
	}
	if err := New(g.mountpoint, "/no/such/parent").Delegate(); err == nil {
		t.Error("made a cgroup without a parent")
	}
}

func TestWaitEmptyWakesUp(t *testing.T) {
	g := group(t)
	c := run(t, g, "sleep 60")
	waited := make(chan error)
	go func() { waited <- g.WaitEmpty(testContext(t)) }()
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
	if err := <-waited; err != nil {
		t.Fatal(err)
	}
}

// Nothing about a cgroup that isn't there is an error: its runtime may have removed it.
func TestGone(t *testing.T) {
	g := New(t.TempDir(), "/none")
	pids, err := g.Processes()
	n, err2 := g.OOMKills()
	if err := errors.Join(err, err2, g.Kill(), g.Signal(unix.SIGTERM), g.Freeze(testContext(t)), g.WaitEmpty(testContext(t))); err != nil || len(pids)+int(n) != 0 {
		t.Errorf("%v, %d, %v", pids, n, err)
	}
}

func TestValue(t *testing.T) {
	g := New(t.TempDir(), "/")
	for content, want := range map[string]uint64{"low 0\noom 1\noom_kill 3\n": 3, "oom_kill 0\n": 0} {
		if err := os.WriteFile(filepath.Join(g.dir(), "memory.events"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if n, err := g.OOMKills(); n != want || err != nil {
			t.Errorf("%q: %d, %v", content, n, err)
		}
	}
	if _, err := g.value("memory.events", "oom_"); err == nil {
		t.Error("found a key that isn't there")
	}
}
