package faults

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/orchestrator/health"
)

// readiness asks `cube up`; a zero report is one that isn't there.
func readiness() health.Report {
	ctx, cancel := context.WithTimeout(context.Background(), s.Config.Timeout(5*time.Second))
	defer cancel()
	r, _ := health.Query(ctx, s.Config.ControlSocket())
	return r
}

// containerd is the pid of the stack's containerd, 0 while there is none.
func containerd() int {
	found := s.Processes(filepath.Join(s.Config.RunDir, "containerd.toml"))
	if len(found) != 1 {
		return 0
	}
	return found[0].PID
}

// awaitReady brings the stack back after containerds were killed. cube, the pid of `cube up`, starts the next one, but
// gives up when they end all too often: then the user starts it again.
func awaitReady(t *testing.T, cube int, killed []int) {
	t.Helper()
	s.Eventually(t, 30*time.Second, "another containerd and readiness", func() bool {
		r, pid := readiness(), containerd()
		return pid != 0 && !slices.Contains(killed, pid) && r.PID != 0 && len(r.Missing()) == 0 || !stack.Runs(cube)
	})
	if !stack.Runs(cube) {
		mustUp(t)
	}
}

func mustUp(t *testing.T) {
	t.Helper()
	if r := s.Cube("up", "-d"); r.Err != nil {
		t.Fatal(r.Err)
	}
}

// action lists the processes by which containerd calls the shim's binary for the container.
func action(name, id string) (pids []int) {
	for _, p := range s.Processes("containerd-shim-cube-v2") {
		if argv := strings.Fields(p.Command); slices.Contains(argv, id) && argv[len(argv)-1] == name {
			pids = append(pids, p.PID)
		}
	}
	return pids
}

func number(b []byte) int {
	n, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	return n
}

// left lists what is on the host of containers that are gone.
func left(ids ...string) []string {
	list := append(s.VMLeaks(), stack.CgroupLeaks(ids...)...)
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for _, id := range ids {
		if _, err := os.Lstat(filepath.Join(bundles(), id)); err == nil {
			list = append(list, "bundle: "+id)
		}
		for _, line := range strings.Split(string(mounts), "\n") {
			if strings.Contains(line, filepath.Join(bundles(), id)) {
				list = append(list, "mount: "+line)
			}
		}
	}
	for _, dir := range []string{filepath.Join(s.Config.RunDir, "shim"), filepath.Join(s.Config.StoreDir(), "packed")} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			list = append(list, "file: "+filepath.Join(dir, e.Name()))
		}
	}
	return list
}

// nothingLeft waits until that is the case of these containers, which are gone.
func nothingLeft(t *testing.T, ids ...string) {
	t.Helper()
	var last []string
	defer func() {
		if len(last) > 0 {
			t.Errorf("left behind: %q", last)
		}
	}()
	s.Eventually(t, 15*time.Second, "nothing left", func() bool {
		last = left(ids...)
		return len(last) == 0
	})
}

// remove deletes a container as a user does who wants it gone, whatever has become of it.
func remove(t *testing.T, id string) {
	t.Helper()
	var r stack.Result
	began := time.Now()
	defer func() {
		if r.Err != nil {
			t.Errorf("it can't be deleted: %v", r.Err)
		}
		if took := time.Since(began); took > s.Config.Timeout(10*time.Second) {
			t.Errorf("the deletion took %v", took)
		}
	}()
	s.Eventually(t, 30*time.Second, "container "+id+" can be deleted", func() bool {
		if task := s.Ctr("task", "rm", "-f", id); task.Err != nil && !strings.Contains(task.Stderr, "not found") {
			t.Logf("task rm: %v", task.Err)
		}
		r = s.Ctr("container", "rm", id)
		if strings.Contains(r.Stderr, "not found") {
			r.Err = nil
		}
		return r.Err == nil
	})
}
