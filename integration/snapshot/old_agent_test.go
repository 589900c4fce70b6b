package snapshot

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
)

// revert is a change of one of the agent's sources.
type revert struct{ file, from, to string }

// oldAgent builds an agent of before something was added to it.
func oldAgent(t *testing.T, e revert) (path string) {
	t.Helper()
	root, err := stack.Repository()
	must(t, err)
	source := filepath.Join(root, e.file)
	b, err := os.ReadFile(source)
	must(t, err)
	if n := strings.Count(string(b), e.from); n != 1 {
		t.Fatalf("%s has %q %d times", e.file, e.from, n)
	}
	dir := t.TempDir()
	older, overlay, path := filepath.Join(dir, "older.go"), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "cube-agent")
	must(t, os.WriteFile(older, []byte(strings.Replace(string(b), e.from, e.to, 1)), 0o600))
	b, err = json.Marshal(map[string]map[string]string{"Replace": {source: older}})
	must(t, err)
	must(t, os.WriteFile(overlay, b, 0o600))
	cmd := exec.Command("go", "build", "-overlay", overlay, "-ldflags", "-s -w", "-o", path, "./cmd/cube-agent")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath -buildvcs=false")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

// TestOldAgents: the host speaks what agents spoke before. A container with an agent of before machines could be saved runs, and
// isn't paused; one with an agent of before containers could be given other names is paused, goes on after an upgrade of the
// guest with the agent that it has in its memory, and is cloned and paused again.
func TestOldAgents(t *testing.T) {
	if os.Getenv("CUBE_TEST_LONG") == "" {
		t.Skip("it takes minutes and a stack of its own: CUBE_TEST_LONG=1 runs it")
	}
	root, err := stack.Repository()
	must(t, err)
	ownArtefacts(t)
	must(t, stack.PackGuest(os.Getenv("CUBE_ARTEFACTS"), oldAgent(t, revert{"guest-agent/api/mux/mux.go", "\tversion = 2\n", "\tversion = 1\n"})))
	ownStack(t, func(root string) (*stack.Stack, error) { return stack.Start(root) })
	st := store(t)
	id := s.ID(t, "oldest")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", keeper)
	for _, args := range [][]string{{"pause", id}, {"snapshot", "create", id}, {"clone", id}} {
		if r := s.Cube(args...); r.Err == nil || !strings.Contains(r.Stderr, "agent is too old") || strings.Count(r.Stderr, "\n") != 1 {
			t.Errorf("%v: %+v", args, r)
		}
	}
	s.Eventually(t, time.Minute, "numbers", func() bool { return gapless(t, id) > 0 })
	lasts(t, id)
	connected(t, id)
	cube(t, "rm", "-f", id)

	cube(t, "down")
	must(t, stack.PackGuest(os.Getenv("CUBE_ARTEFACTS"), oldAgent(t, revert{"guest-agent/api/agent_ttrpc.pb.go", `"IdentifyContainer": func`, `"NotYet": func`})))
	cube(t, "up", "-d")
	id = s.ID(t, "old")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", keeper)
	t.Cleanup(func() { s.Cube("rm", "-f", id) }) // unless the test has come to that
	s.Eventually(t, time.Minute, "numbers", func() bool { return gapless(t, id) > 0 })
	before := lasts(t, id)
	cube(t, "pause", id)
	guest := func() string {
		t.Helper()
		info, err := st.Inspect(cube(t, "snapshot", "ls", "-q"))
		must(t, err)
		return info.Platform.Guest
	}
	old := guest()

	cube(t, "down")
	must(t, stack.PackGuest(os.Getenv("CUBE_ARTEFACTS"), filepath.Join(root, "bin", "cube-agent")))
	cube(t, "up", "-d")
	fresh := s.ID(t, "fresh")
	cube(t, "run", "-d", "--name", fresh, stack.Image, "sleep", "1000")
	cube(t, "snapshot", "create", "--name", "fresh", fresh)
	if info, err := st.Inspect("fresh"); err != nil || info.Platform.Guest == old {
		t.Errorf("a new one has guest %s, %v", info.Platform.Guest, err)
	}
	cube(t, "snapshot", "rm", "fresh")
	cube(t, "rm", "-f", fresh)
	cube(t, "prune")
	for range 2 {
		resumes(t, id)
		if after := lasts(t, id); after < before {
			t.Errorf("%d before, %d after", before, after)
		}
		connected(t, id)
		clone := cube(t, "clone", id)
		lasts(t, clone)
		cube(t, "rm", "-f", clone)
		before = lasts(t, id)
		cube(t, "pause", id)
		if g := guest(); g != old {
			t.Errorf("it goes on with guest %s, not %s", g, old)
		}
	}
	resumes(t, id)
	lasts(t, id)
	cube(t, "rm", "-f", id)
	if left, _ := os.ReadDir(s.Config.DiskDir()); len(left) > 0 {
		t.Errorf("disks are left: %v", left)
	}
}
