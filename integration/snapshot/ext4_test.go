package snapshot

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/internal/reflink"
)

// TestExt4: where files can't share blocks, all is the same, with copies.
func TestExt4(t *testing.T) {
	ownStack(t, stack.StartOnExt4)
	if shares, err := reflink.Possible(s.Config.StoreDir()); err != nil || shares {
		t.Fatalf("files share blocks in the store: %v, %v", shares, err)
	}
	t.Run("once", onceEach)
	if os.Getenv("CUBE_TEST_LONG") != "" {
		t.Run("pause", func(t *testing.T) { pauses(t, 5) })
		t.Run("rollback", TestRollback)
		t.Run("clones", TestCloneEight)
		t.Run("output", TestOutput)
		t.Run("mixed", func(t *testing.T) { mixes(t, 15) })
	}
	log, err := os.ReadFile(filepath.Join(s.Config.LogDir(), "cube.log"))
	must(t, err)
	if n := strings.Count(string(log), "can't share blocks"); n != 1 {
		t.Errorf("the log tells of copies %d times", n)
	}
}

// onceEach pauses, resumes, clones and puts back one container.
func onceEach(t *testing.T) {
	store(t)
	id := s.ID(t, "once")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", keeper)
	t.Cleanup(func() { cube(t, "rm", "-f", id) })
	s.Eventually(t, time.Minute, "numbers", func() bool { return gapless(t, id) > 0 })
	before := lasts(t, id)
	began := time.Now()
	cube(t, "pause", id)
	paused := time.Since(began)
	isPaused(t, id)
	began = time.Now()
	resumes(t, id)
	t.Logf("paused in %v, resumed in %v", paused.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
	name := cube(t, "snapshot", "create", id)
	at := lasts(t, id)
	if at < before {
		t.Errorf("%d before the pause, %d after", before, at)
	}
	clones := strings.Fields(cube(t, "clone", "-n", "2", id))
	t.Cleanup(func() { cube(t, append([]string{"rm", "-f"}, clones...)...) })
	if len(clones) != 2 {
		t.Fatalf("clones %q", clones)
	}
	for _, c := range clones {
		cube(t, "exec", c, "sh", "-c", "echo "+c+" >/mine")
	}
	for _, c := range clones {
		if n := lasts(t, c); n < at {
			t.Errorf("%s is at %d, after %d", c, n, at)
		}
		if got := cube(t, "exec", c, "cat", "/mine"); got != c {
			t.Errorf("the disk of %s has %q", c, got)
		}
	}
	cube(t, "exec", id, "touch", "/later")
	cube(t, "rollback", id, name)
	if lasts(t, id); s.Cube("exec", id, "ls", "/later").Err == nil {
		t.Error("what was written since is still there")
	}
}
