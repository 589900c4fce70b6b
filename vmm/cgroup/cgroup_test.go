package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/process"
	"github.com/moby/sys/mountinfo"
)

func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return c
}

func create(t *testing.T, l Limits) *Group {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	name := fmt.Sprintf("test-%d-%s", os.Getpid(), strings.ToLower(t.Name()))
	g, err := Create(ctx(t), name, l, slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Remove(ctx(t), name); err != nil {
			t.Error(err)
		}
		if Exists(name) {
			t.Error("the group is left")
		}
		Prune()
	})
	return g
}

// setting finds a value in whichever hierarchy has the file.
func (g *Group) setting(t *testing.T, names ...string) string {
	t.Helper()
	for _, dir := range g.Dirs() {
		for _, n := range names {
			if b, err := os.ReadFile(filepath.Join(dir, n)); err == nil {
				return strings.TrimSpace(string(b))
			}
		}
	}
	t.Fatalf("none of %v in %v", names, g.Dirs())
	return ""
}

// spawn starts a process and returns when it is in the group.
func spawn(t *testing.T, g *Group, argv ...string) *exec.Cmd {
	t.Helper()
	e, err := g.Entry()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	script := ""
	for i := range e.Files {
		script += fmt.Sprintf("echo 0 >&%d || exit 99; ", i+3)
	}
	cmd := exec.Command("sh", append([]string{"-c", script + `echo; exec "$@" >/dev/null`, "sh"}, argv...)...)
	cmd.ExtraFiles = e.Files
	if e.Into != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(e.Into.Fd())}
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatalf("enter the group: %v", err)
	}
	return cmd
}

func TestLimits(t *testing.T) {
	g := create(t, Limits{CPUs: 1.5, Memory: 64 << 20, PIDs: 20})
	if s := g.setting(t, "memory.max", "memory.limit_in_bytes"); s != "67108864" {
		t.Errorf("memory limit %s", s)
	}
	if s := g.setting(t, "pids.max"); s != "20" {
		t.Errorf("pids limit %s", s)
	}
	if s := g.setting(t, "cpu.max", "cpu.cfs_quota_us"); s != "150000" && s != "150000 100000" {
		t.Errorf("cpu limit %s", s)
	}
}

func TestSetCPUs(t *testing.T) {
	g := create(t, Limits{CPUs: 1, Memory: 64 << 20, PIDs: 20})
	for _, c := range []struct {
		cpus   float64
		v1, v2 string
	}{
		{0.5, "50000", "50000 100000"},
		{2, "200000", "200000 100000"},
		{2, "200000", "200000 100000"},
		{0.0001, "1000", "1000 100000"}, // the kernel's least
		{maxCPUs, "6553600000", "6553600000 100000"},
		{0, "-1", "max 100000"},
		{0.25, "25000", "25000 100000"},
	} {
		if err := g.SetCPUs(c.cpus); err != nil {
			t.Errorf("%v: %v", c.cpus, err)
		}
		if s := g.setting(t, "cpu.max", "cpu.cfs_quota_us"); s != c.v1 && s != c.v2 {
			t.Errorf("%v CPUs: %s", c.cpus, s)
		}
	}
	for _, cpus := range []float64{-1, math.NaN(), math.Inf(1)} {
		if err := g.SetCPUs(cpus); err == nil {
			t.Errorf("%v CPUs were taken", cpus)
		}
	}
	if s := g.setting(t, "cpu.max", "cpu.cfs_quota_us"); s != "25000" && s != "25000 100000" {
		t.Errorf("after bad input: %s", s)
	}
}

// A host without the cpu controller runs machines without a limit, and a group may be gone before its user knows.
func TestSetCPUsWithoutController(t *testing.T) {
	dir := t.TempDir()
	for _, v2 := range []bool{false, true} {
		g := &Group{name: "x", dirs: []string{dir}, v2: v2}
		if err := g.SetCPUs(1); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("files were made: %v, %v", left, err)
	}
}

func TestMemoryHogDies(t *testing.T) {
	g := create(t, Limits{CPUs: 1, Memory: 16 << 20, PIDs: 20})
	cmd := spawn(t, g, "dd", "if=/dev/zero", "of=/dev/null", "bs=64M", "count=1")
	if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Fatalf("a process over its limit ended with: %v", err)
	}
}

func TestRemoveKills(t *testing.T) {
	g := create(t, Limits{Memory: 64 << 20, PIDs: 20})
	cmd := spawn(t, g, "sleep", "60")
	id, err := process.Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if names, err := List(); err != nil || !slices.Contains(names, g.name) {
		t.Fatalf("listed %v, %v", names, err)
	}
	start := time.Now()
	if err := Remove(ctx(t), g.name); err != nil {
		t.Fatal(err)
	}
	if id.Alive() || Exists(g.name) {
		t.Fatalf("alive %v, group %v", id.Alive(), Exists(g.name))
	}
	t.Logf("killed and removed in %s", time.Since(start))
	if err := Remove(ctx(t), g.name); err != nil {
		t.Fatalf("a second time: %v", err)
	}
}

// The removal under cgroup v2 needs no controller, so it runs wherever a v2 hierarchy is mounted.
func TestRemoveV2(t *testing.T) {
	ms, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup2"))
	if err != nil || len(ms) == 0 || os.Geteuid() != 0 {
		t.Skipf("needs root and a cgroup v2 hierarchy: %d mounts, %v", len(ms), err)
	}
	dir := filepath.Join(ms[0].Mountpoint, fmt.Sprintf("cube-test-%d", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skip(err)
	}
	g := &Group{dirs: []string{dir}, v2: true}
	t.Cleanup(func() { _ = g.Remove(ctx(t)) })
	cmd := spawn(t, g, "sleep", "60")
	if pids := g.setting(t, "cgroup.procs"); pids != strconv.Itoa(cmd.Process.Pid) {
		t.Errorf("the group holds %q, want process %d", pids, cmd.Process.Pid)
	}
	if _, err := os.Stat(filepath.Join(dir, "cgroup.kill")); err != nil {
		t.Logf("no cgroup.kill here: %v", err)
	}
	if err := g.Remove(ctx(t)); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Fatal("the process was not killed")
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("the directory is left: %v", err)
	}
}

func TestLeftoverIsReplaced(t *testing.T) {
	g := create(t, Limits{Memory: 64 << 20, PIDs: 20})
	spawn(t, g, "sleep", "60")
	if _, err := Create(ctx(t), g.name, Limits{Memory: 32 << 20, PIDs: 10}, slog.Default()); err != nil {
		t.Fatal(err)
	}
	if s := g.setting(t, "pids.max"); s != "10" {
		t.Fatalf("pids limit %s", s)
	}
}

func TestBadInput(t *testing.T) {
	ok := Limits{Memory: 1 << 20, PIDs: 1}
	for _, name := range []string{"", ".", "..", "a/b", "../x"} {
		if _, err := Create(ctx(t), name, ok, slog.Default()); err == nil {
			t.Errorf("name %q was taken", name)
		}
	}
	for _, l := range []Limits{{}, {Memory: 1}, {PIDs: 1}, {Memory: 1, PIDs: 1, CPUs: -1}, {Memory: 1, PIDs: 1, CPUs: math.NaN()}} {
		if _, err := Create(ctx(t), "x", l, slog.Default()); err == nil {
			t.Errorf("limits %+v were taken", l)
		}
	}
}

func TestMissingControllers(t *testing.T) {
	for _, tc := range []struct {
		memory, pids, cpu bool
		err               error
	}{{true, true, true, nil}, {true, true, false, nil}, {false, true, true, ErrNoController}, {true, false, true, ErrNoController}} {
		if err := require(tc.memory, tc.pids, tc.cpu, slog.Default()); !errors.Is(err, tc.err) {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}
