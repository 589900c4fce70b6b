package leftover

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/process"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/orchestrator/stack"
	shimrecord "github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/vmm/jail"
	"github.com/cubesandbox/cube/vmm/record"
)

// newSearch looks at a stack in directories of its own, whose containerd has nothing.
func newSearch(t *testing.T) *search {
	t.Helper()
	cfg := config.Default()
	cfg.StateDir, cfg.RunDir = t.TempDir(), shortDir(t)
	cfg.Artefacts = filepath.Join(cfg.StateDir, "artefacts")
	return &search{cfg: cfg, inv: &sandbox.Inventory{
		Containers: map[sandbox.Ref]string{}, Sandboxes: map[sandbox.Ref]struct{}{}, Tasks: map[sandbox.Ref]sandbox.Task{},
	}}
}

// shortDir is a directory whose path leaves room for sockets.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "left-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// age makes a file as old as a leftover must be.
func age(t *testing.T, path string) {
	t.Helper()
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(path, old, old); err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, path, content string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// mustFind checks that exactly these are found.
func mustFind(t *testing.T, s *search, kind string, want ...string) []Leftover {
	t.Helper()
	for _, f := range finders {
		if f.kind != kind {
			continue
		}
		found, err := f.of(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, l := range found {
			names = append(names, l.Name)
			if l.Kind != kind || l.Detail == "" || l.Remedy == "" {
				t.Errorf("incomplete: %+v", l)
			}
		}
		if !slices.Equal(names, want) {
			t.Errorf("%s: found %q, want %q", kind, names, want)
		}
		return found
	}
	t.Fatalf("no finder of %s", kind)
	return nil
}

// mustGo removes what was found and checks that it is gone, and that a second removal is none.
func mustGo(t *testing.T, s *search, found []Leftover) {
	t.Helper()
	for _, l := range found {
		for range 2 {
			if err := l.remove(t.Context()); err != nil {
				t.Errorf("remove %s %s: %v", l.Kind, l.Name, err)
			}
		}
		mustFind(t, s, l.Kind)
	}
}

func TestLogs(t *testing.T) {
	s := newSearch(t)
	mustFind(t, s, "log")
	dir := filepath.Join(s.cfg.LogDir(), "containers")
	s.inv.Containers[sandbox.Ref{Namespace: "other", ID: "known"}] = sandbox.Runtime
	for _, name := range []string{"known.log", "known.log.1", "gone.log", "gone.log.2", "strange"} {
		age(t, write(t, filepath.Join(dir, name), "text"))
	}
	write(t, filepath.Join(dir, "young.log"), "text")
	found := mustFind(t, s, "log", filepath.Join(dir, "gone.log"), filepath.Join(dir, "gone.log.2"))
	if found[0].Size == 0 || time.Since(found[0].Since) < time.Hour {
		t.Errorf("%+v", found[0])
	}
	for _, l := range found {
		if err := l.remove(t.Context()); err != nil {
			t.Error(err)
		}
	}
	mustFind(t, s, "log")
}

func TestSockets(t *testing.T) {
	s := newSearch(t)
	mustFind(t, s, "socket")
	dir := stack.ShimSocketDir(s.cfg)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	listen := func(name string) (string, net.Listener) {
		t.Helper()
		l, err := net.Listen("unix", filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false)
		t.Cleanup(func() { l.Close() })
		return filepath.Join(dir, name), l
	}
	live, _ := listen("live")
	dead, l := listen("dead")
	_, young := listen("young")
	l.Close()
	young.Close()
	age(t, live)
	age(t, dead)
	age(t, write(t, filepath.Join(dir, "file"), ""))
	mustGo(t, s, mustFind(t, s, "socket", dead))
	s.cfg.Containerd.Address = "/run/containerd.sock"
	mustFind(t, s, "socket")
}

func TestMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	s := newSearch(t)
	mustFind(t, s, "mount")
	dir := sandbox.MountDir(s.cfg)
	at := filepath.Join(dir, "containerd-mount1")
	if err := os.MkdirAll(at, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	mustFind(t, s, "mount") // somebody may be at it
	age(t, dir)
	mustGo(t, s, mustFind(t, s, "mount", dir))
}

func TestHalfMade(t *testing.T) {
	s := newSearch(t)
	mustFind(t, s, "snapshot")
	mustFind(t, s, "base snapshot")
	mustFind(t, s, "artefact")
	saved := filepath.Join(s.cfg.SnapshotDir(), ".tmp-3")
	write(t, filepath.Join(saved, "memory"), "x")
	base := filepath.Join(s.cfg.BaseDir(), ".tmp-1")
	write(t, filepath.Join(base, "memory"), strings.Repeat("x", 8192))
	artefact := filepath.Join(filepath.Dir(s.cfg.GuestDir()), ".tmp-2")
	write(t, filepath.Join(artefact, "vmlinuz"), "x")
	found := mustFind(t, s, "base snapshot", base)
	if found[0].Size < 8192 {
		t.Errorf("%+v", found[0])
	}
	mustGo(t, s, found)
	mustGo(t, s, mustFind(t, s, "artefact", artefact))
	mustGo(t, s, mustFind(t, s, "snapshot", saved))
}

func TestMachines(t *testing.T) {
	s := newSearch(t)
	mustFind(t, s, "machine")
	dir := filepath.Join(s.cfg.VMDir(), "m")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	r, err := record.New(t.Context(), dir, "m")
	if err != nil {
		t.Fatal(err)
	}
	mustFind(t, s, "machine") // this process owns it
	if err := r.Update(func(st *record.State) { st.Owner.Start++ }); err != nil {
		t.Fatal(err)
	}
	found := mustFind(t, s, "machine", dir)
	if !strings.Contains(found[0].Detail, "is gone") {
		t.Errorf("%+v", found[0])
	}
	mustGo(t, s, found)
}

// sleeper is a process that stands for QEMU.
func sleeper(t *testing.T) process.ID {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	id, err := process.Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestGhosts(t *testing.T) {
	s := newSearch(t)
	qemu := sleeper(t)
	task := func(id, runtime string, pid int, alive bool) {
		r := sandbox.Ref{Namespace: "ns", ID: id}
		s.inv.Containers[r] = runtime
		s.inv.Tasks[r] = sandbox.Task{PID: uint32(pid), Alive: alive}
	}
	task("fine", sandbox.Runtime, qemu.PID, true)
	task("member", sandbox.Runtime, qemu.PID, true)
	task("ghost", sandbox.Runtime, qemu.PID+1, true)
	task("ended", sandbox.Runtime, qemu.PID+1, false)
	task("runc", "io.containerd.runc.v2", qemu.PID+1, true)
	machines := []record.Machine{
		{State: record.State{QEMU: qemu}},
		{State: record.State{QEMU: process.ID{PID: qemu.PID + 1, Start: 1}}}, // has ended
	}
	if got := ghosts(s.inv, machines); len(got) != 1 || got[0].ID != "ghost" {
		t.Errorf("got %v", got)
	}
}

func TestUIDs(t *testing.T) {
	s := newSearch(t)
	mustFind(t, s, "uid")
	dir := filepath.Join(s.cfg.RunDir, "bundle")
	pool := jail.NewUIDs(s.cfg)
	uid, err := pool.Take(dir, func(uint32) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	mustFind(t, s, "uid") // this process owns it
	file := filepath.Join(s.cfg.RunDir, "uids", fmt.Sprint(uid))
	write(t, file, `{"owner":{"pid":1,"start":999},"dir":"`+dir+`"}`)
	found := mustFind(t, s, "uid", fmt.Sprint(uid))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	mustFind(t, s, "uid") // the bundle's undoing gives it back
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	mustGo(t, s, found)
}

func TestPodIsKnown(t *testing.T) {
	ref := func(id string) sandbox.Ref { return sandbox.Ref{Namespace: "ns", ID: id} }
	pod := podInfo{state: shimrecord.PodState{ID: "pod", Namespace: "ns", PID: 7}, members: []string{"a", "b"}}
	for name, tc := range map[string]struct {
		inv  sandbox.Inventory
		want bool
	}{
		"nothing":                      {sandbox.Inventory{}, false},
		"others":                       {sandbox.Inventory{Containers: map[sandbox.Ref]string{ref("c"): ""}}, false},
		"another namespace":            {sandbox.Inventory{Containers: map[sandbox.Ref]string{{Namespace: "n2", ID: "pod"}: ""}}, false},
		"its first container":          {sandbox.Inventory{Containers: map[sandbox.Ref]string{ref("pod"): ""}}, true},
		"a member":                     {sandbox.Inventory{Containers: map[sandbox.Ref]string{ref("b"): ""}}, true},
		"its sandbox":                  {sandbox.Inventory{Sandboxes: map[sandbox.Ref]struct{}{ref("pod"): {}}}, true},
		"a task without a container":   {sandbox.Inventory{Tasks: map[sandbox.Ref]sandbox.Task{ref("a"): {}}}, true},
		"a task in its machine":        {sandbox.Inventory{Tasks: map[sandbox.Ref]sandbox.Task{ref("x"): {PID: 7, Alive: true}}}, true},
		"one that ended under its pid": {sandbox.Inventory{Tasks: map[sandbox.Ref]sandbox.Task{ref("x"): {PID: 7}}}, false},
	} {
		if got := pod.known(&tc.inv); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestDeadPods(t *testing.T) {
	s := newSearch(t)
	mustFind(t, s, "pod")
	pod := func(name string) shimrecord.Pod {
		t.Helper()
		p := shimrecord.Pod(filepath.Join(s.cfg.PodDir(), name))
		unlock, err := p.Make(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		unlock()
		if err := p.SaveState(shimrecord.PodState{ID: name, Namespace: "ns"}); err != nil {
			t.Fatal(err)
		}
		return p
	}
	dead, live, used := pod("dead"), pod("live"), pod("used")
	pod("young")
	lock, err := live.LockShim()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := shimrecord.WritePID(lock, os.Getpid()); err != nil {
		t.Fatal(err)
	}
	if err := used.Join("c", shimrecord.Bundle(shortDir(t))); err != nil {
		t.Fatal(err)
	}
	for _, p := range []shimrecord.Pod{dead, live, used} {
		age(t, string(p))
	}
	mustFind(t, s, "pod", string(dead))
	found := mustFind(t, s, "pod", string(dead)) // the look before has left no trace
	// One that gets a container meanwhile stays.
	bundle := shimrecord.Bundle(shortDir(t))
	if err := dead.Join("late", bundle); err != nil {
		t.Fatal(err)
	}
	if err := found[0].remove(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(string(dead)); err != nil {
		t.Errorf("it was removed: %v", err)
	}
	if err := dead.Leave("late"); err != nil {
		t.Fatal(err)
	}
	age(t, string(dead))
	mustGo(t, s, mustFind(t, s, "pod", string(dead)))
}

// TestWithoutAStack: nothing is found where nothing was, and nothing is made by the search.
func TestWithoutAStack(t *testing.T) {
	s := newSearch(t)
	r := Find(context.Background(), s.cfg)
	if len(r.Found) > 0 || r.Blind == nil || r.Err != nil {
		t.Errorf("%+v", r)
	}
	for _, dir := range []string{s.cfg.StateDir, s.cfg.RunDir} {
		if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
			t.Errorf("%s has %v, %v", dir, entries, err)
		}
	}
}
