package snapshot

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/shim/saved"
)

// TestKilledPause: whatever of a container is killed while it is paused to disk, and when, it is paused or has died like any
// other. Nothing is left but what it goes on from, and what cube prune takes away.
func TestKilledPause(t *testing.T) {
	store(t)
	const shim, machine = "containerd-shim-cube-v2", "-M microvm"
	for _, c := range []struct {
		victim, at string
		long       bool
	}{
		{shim, "save", true},
		{machine, "save", false},
		{shim, "memory", true},
		{machine, "memory", true},
		{shim, "published", false},
		{machine, "published", true},
		{shim, "checkpoint", true},
		{machine, "checkpoint", false},
		{shim, "written", false},
		{machine, "written", true},
	} {
		if c.long && os.Getenv("CUBE_TEST_LONG") == "" {
			continue
		}
		killedPause(t, c.victim, c.at)
	}
}

func killedPause(t *testing.T, victim, at string) {
	t.Helper()
	id := s.ID(t, "amid-"+at)
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", keeper)
	defer func() { s.Cube("rm", "-f", id) }()
	s.Eventually(t, time.Minute, "numbers", func() bool { return gapless(t, id) > 0 })
	paused := saved.PausedOf(s.Config, s.Config.Containerd.Namespace, id)
	saves, checkpoints := watch(t, s.Config.SnapshotDir()), watch(t, string(paused))
	saves.names = nil
	under := begin(t, "pause", id)
	switch at {
	case "save":
		saves.await(".tmp-")
	case "memory":
		watch(t, filepath.Join(s.Config.SnapshotDir(), saves.await(".tmp-"))).await("memory")
	case "published":
		saves.await(id)
	case "checkpoint":
		checkpoints.await("cube-checkpoint.json")
	case "written":
		checkpoints.await("cube-checkpoint.json")
		checkpoints.await("cube-checkpoint.json")
	}
	for _, p := range s.Processes(victim) {
		if strings.Contains(p.Command, id) {
			s.End(t, p.PID, unix.SIGKILL)
		}
	}
	err := under.Wait()
	if err != nil {
		under.failed(t)
	}
	var state string
	s.Eventually(t, time.Minute, "an end", func() bool {
		r := s.Cube("exec", id, "true")
		state = r.Stderr
		return r.Err != nil && (strings.Contains(state, "cube resume") || strings.Contains(state, "isn't running"))
	})
	is := strings.Contains(state, "cube resume")
	t.Logf("%s amid the pause's %s: %v, %s%s", victim, at, err, under.err.String(), state)
	if at == "save" && is || at == "written" && !is || err == nil && !is {
		t.Errorf("paused: %v", is)
	}
	if is {
		s.Eventually(t, time.Minute, "a resume", func() bool { return s.Cube("resume", id).Err == nil })
		s.Eventually(t, time.Minute, "numbers", func() bool { return s.Cube("exec", id, "test", "-s", "/n").Err == nil })
		lasts(t, id)
	} else if r := s.Cube("resume", id); r.Err == nil || !strings.Contains(r.Stderr, "not paused") {
		t.Errorf("resume: %+v", r)
	}
	cube(t, "rm", "-f", id)
	cube(t, "prune")
	if left := cube(t, "snapshot", "ls", "-q"); left != "" {
		t.Errorf("snapshots are left: %s", left)
	}
	(&box{T: t, id: id}).nothingLeft()
	if left, _ := os.ReadDir(s.Config.PausedDir()); len(left) > 0 {
		t.Errorf("paused: %v", left)
	}
}

// TestRemoveAmidPause: a removal by force doesn't wait for a pause that is under way, and nothing is left of it.
func TestRemoveAmidPause(t *testing.T) {
	store(t)
	id := s.ID(t, "removed")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", keeper)
	t.Cleanup(func() { s.Cube("rm", "-f", id) }) // unless the test has come to that
	paused := saved.PausedOf(s.Config, s.Config.Containerd.Namespace, id)
	unlock, err := paused.Lock(t.Context())
	must(t, err)
	defer unlock()
	pause := begin(t, "pause", id)
	s.Eventually(t, time.Minute, "a pause that waits", func() bool { return waiters(t, string(paused)) > 0 })
	remove := begin(t, "rm", "-f", id)
	s.Eventually(t, time.Minute, "no machine", func() bool { return len(s.Processes("-M microvm")) == 0 })
	if _, err := flock.TryLockDir(string(paused)); err == nil {
		t.Error("the lock was taken away")
	}
	unlock()
	if err := remove.Wait(); err != nil {
		t.Errorf("rm -f: %v, %s", err, &remove.err)
	}
	pause.fails(t)
	if got := cube(t, "ps", "-aq"); strings.Contains(got, id) {
		t.Errorf("containers: %s", got)
	}
	(&box{T: t, id: id}).nothingLeft()
	if left, _ := os.ReadDir(s.Config.PausedDir()); len(left) > 0 {
		t.Errorf("paused: %v", left)
	}
}

// waiters is how many processes wait for the lock of a directory, by proc_locks(5).
func waiters(t *testing.T, dir string) (n int) {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(dir, &st))
	text, err := os.ReadFile("/proc/locks")
	must(t, err)
	at := fmt.Sprintf(":%d ", st.Ino)
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "->") && strings.Contains(line, at) {
			n++
		}
	}
	return n
}
