package cli

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/doctor"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/vmm/cgroup"
	"github.com/cubesandbox/cube/vmm/record"
)

// impatient makes the doctor take things of 15 s of age for leftovers, not of a minute.
const impatient = "CUBE_TIMEOUT_SCALE=0.25"

// examine runs the doctor and returns what it finds.
func examine(t *testing.T, args ...string) ([]doctor.Finding, stack.Result) {
	t.Helper()
	cmd := s.Command("cube", append([]string{"doctor", "--json"}, args...)...)
	cmd.Env = append(cmd.Env, impatient)
	r := s.Run(cmd, nil)
	var findings []doctor.Finding
	if err := json.Unmarshal([]byte(r.Stdout), &findings); err != nil {
		t.Fatalf("%v: %+v", err, r)
	}
	return findings, r
}

// has says whether there is a finding of that level whose detail begins with the thing's name.
func has(findings []doctor.Finding, l doctor.Level, kind, name string) bool {
	return slices.ContainsFunc(findings, func(f doctor.Finding) bool {
		return f.Level == l && f.Name == kind && strings.HasPrefix(f.Detail, name+": ")
	})
}

// shim is the pid of a container's shim.
func shim(t *testing.T, id string) int {
	t.Helper()
	for _, p := range s.Processes("containerd-shim-cube-v2") {
		if slices.Contains(strings.Fields(p.Command), id) {
			return p.PID
		}
	}
	t.Fatalf("no shim of %s", id)
	return 0
}

// machineOf is the directory of the machine with that QEMU.
func machineOf(t *testing.T, pid uint32) string {
	t.Helper()
	all, err := record.Machines(s.Config)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if m.State.QEMU.PID == int(pid) {
			return m.Dir
		}
	}
	t.Fatalf("no machine of process %d", pid)
	return ""
}

// age makes files as old as leftovers are.
func age(t *testing.T, patterns ...string) {
	t.Helper()
	old := time.Now().Add(-time.Hour)
	for _, p := range patterns {
		files, err := filepath.Glob(p)
		if err != nil || len(files) == 0 {
			t.Fatalf("no %s: %v", p, err)
		}
		for _, f := range files {
			if err := os.Chtimes(f, old, old); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// group makes the control group of a machine that isn't there.
func group(t *testing.T, cfg *config.Config, id string) string {
	t.Helper()
	name := record.CgroupName(cfg, filepath.Join(cfg.VMDir(), id), id)
	if _, err := cgroup.Create(t.Context(), name, cgroup.Limits{Memory: 64 << 20, PIDs: 10}, slog.Default()); err != nil {
		t.Fatal(err)
	}
	return name
}

// TestDoctorFixes makes orphans of all kinds beside a container that must not feel it.
func TestDoctorFixes(t *testing.T) {
	healthy, orphan, moved, lost := s.ID(t, "healthy"), s.ID(t, "orphan"), s.ID(t, "moved"), s.ID(t, "lost")
	for _, id := range []string{healthy, orphan, moved, lost} {
		ok(t, "run", "-d", "--name", id, stack.Image, "sleep", "1000")
	}
	before := list(t)
	lostShim := shim(t, lost)
	machines := map[string]string{orphan: machineOf(t, before[orphan].PID), moved: machineOf(t, before[moved].PID)}

	// With containerd dead, shims die unseen and bundles disappear.
	kill(t, up(t), unix.SIGKILL)
	kill(t, containerd(t), unix.SIGKILL)
	bundles := filepath.Join(s.Config.RunDir, "containerd/io.containerd.runtime.v2.task", s.Config.Containerd.Namespace)
	aside := filepath.Join(s.Config.RunDir, "containerd", "aside")
	for _, id := range []string{orphan, moved} {
		kill(t, shim(t, id), unix.SIGKILL)
	}
	for _, err := range []error{
		os.RemoveAll(filepath.Join(bundles, orphan)),
		os.RemoveAll(filepath.Join(bundles, lost)),
		os.Rename(filepath.Join(bundles, moved), aside),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	ok(t, "up", "-d")
	if err := os.Rename(aside, filepath.Join(bundles, moved)); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{orphan, moved, lost} {
		if r := s.Ctr("container", "rm", id); r.Err != nil {
			t.Fatal(r.Err)
		}
	}

	// What else a killed stack could leave.
	file := filepath.Join(s.Config.StoreDir(), "forgotten.img")
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(file)
	out, err := exec.Command("losetup", "-f", "--show", file).CombinedOutput()
	if err != nil {
		t.Fatalf("losetup: %v: %s", err, out)
	}
	loop := strings.TrimSpace(string(out))
	defer exec.Command("losetup", "-d", loop).Run() // fails where all went well
	mounts := sandbox.MountDir(s.Config)
	if err := os.MkdirAll(filepath.Join(mounts, "forgotten"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", filepath.Join(mounts, "forgotten"), "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	base := filepath.Join(s.Config.BaseDir(), ".tmp-forgotten")
	if err := os.Mkdir(base, 0o700); err != nil {
		t.Fatal(err)
	}
	ghost := group(t, s.Config, s.ID(t, "ghost"))
	other := *s.Config
	other.RunDir = "/run/another-stack"
	foreign := group(t, &other, s.ID(t, "foreign"))
	defer func() {
		if err := cgroup.Remove(t.Context(), foreign); err != nil {
			t.Error(err)
		}
	}()
	logs := map[string]string{}
	for _, id := range []string{orphan, healthy} {
		logs[id] = sandbox.LogPath(s.Config, id)
		age(t, logs[id])
	}
	age(t, mounts, filepath.Join(s.Config.PodDir(), "*"), filepath.Join(bundles, "*"), filepath.Join(s.Config.RunDir, "shim/*"))

	var findings []doctor.Finding
	var r stack.Result
	s.Eventually(t, time.Minute, "a shim old enough", func() bool {
		findings, r = examine(t)
		return has(findings, doctor.Left, "shim", fmt.Sprint(lostShim))
	})
	want := []struct{ kind, name string }{
		{"machine", machines[orphan]}, {"machine", machines[moved]}, {"bundle", filepath.Join(bundles, moved)},
		{"shim", fmt.Sprint(lostShim)}, {"cgroup", ghost}, {"loop device", loop}, {"mount", mounts},
		{"base snapshot", base}, {"log", logs[orphan]},
	}
	for _, w := range want {
		if !has(findings, doctor.Left, w.kind, w.name) {
			t.Errorf("not found: %s %s", w.kind, w.name)
		}
	}
	if doctor.Count(findings, doctor.Fail) > 0 || r.Code != 1 || !strings.Contains(r.Stderr, "things are left that nobody owns") {
		t.Errorf("%+v", r)
	}
	for _, w := range []struct{ kind, least string }{{"socket", "two dead shims'"}, {"pod", "the orphan's"}} {
		if !slices.ContainsFunc(findings, func(f doctor.Finding) bool { return f.Level == doctor.Left && f.Name == w.kind }) {
			t.Errorf("no %s found, there is at least %s", w.kind, w.least)
		}
	}
	if strings.Contains(r.Stdout, healthy) || strings.Contains(r.Stdout, foreign) {
		t.Errorf("what has an owner is called a leftover: %s", r.Stdout)
	}

	for _, f := range findings {
		if f.Level == doctor.Left {
			t.Logf("%s %s: %s", f.Name, f.Detail, f.Remedy)
		}
	}

	fixed, r := examine(t, "--fix")
	for _, w := range want {
		if !has(fixed, doctor.Fixed, w.kind, w.name) {
			t.Errorf("not fixed: %s %s", w.kind, w.name)
		}
	}
	if r.Err != nil || doctor.Count(fixed, doctor.Left) > 0 {
		t.Errorf("after the fix: %+v", r)
	}
	if again, r := examine(t, "--fix"); r.Err != nil || doctor.Count(again, doctor.Fixed) > 0 {
		t.Errorf("a second fix: %+v", r)
	}
	if stack.Runs(lostShim) || stack.Runs(int(before[lost].PID)) || cgroup.Exists(ghost) {
		t.Errorf("lost shim %v, its machine %v, cgroup %v", stack.Runs(lostShim), stack.Runs(int(before[lost].PID)), cgroup.Exists(ghost))
	}

	if !cgroup.Exists(foreign) {
		t.Error("another stack's cgroup was removed")
	}
	if c := list(t)[healthy]; c.PID != before[healthy].PID || ok(t, "exec", healthy, "echo", "well") != "well\n" {
		t.Errorf("it was %+v and is %+v", before[healthy], c)
	}
	ok(t, "rm", "-f", healthy)
	// The ids can be used again.
	ok(t, "run", "--rm", "--name", moved, stack.Image, "true")
	noContainers(t)
}
