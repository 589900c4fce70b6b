package snapshot

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/orchestrator/usage"
)

// TestSpaceCommands: a user sees what takes space, and what of it would go; then that goes, and nothing else.
func TestSpaceCommands(t *testing.T) {
	store(t)
	id := s.ID(t, "space")
	cube(t, "run", "-d", "--name", id, stack.Image, "sleep", "1000")
	t.Cleanup(func() { cube(t, "rm", "-f", id) })
	name := cube(t, "snapshot", "create", id)
	var u usage.Usage
	must(t, json.Unmarshal([]byte(cube(t, "df", "--json")), &u))
	n := slices.IndexFunc(u.Kinds, func(k usage.Kind) bool { return k.Name == "snapshots" })
	if n < 0 || u.Kinds[n].Count != 1 || len(u.Kinds[n].Items) != 1 || u.Kinds[n].Items[0].Name != name || u.Store.Free <= 0 {
		t.Errorf("%+v", u)
	}
	if out := cube(t, "df", "-v"); !strings.Contains(out, s.Config.StoreDir()) || !strings.Contains(out, "\n  "+name+" ") {
		t.Errorf("df -v:\n%s", out)
	}

	half := filepath.Join(s.Config.SnapshotDir(), ".tmp-of-a-killed-one")
	must(t, os.Mkdir(half, 0o700))
	must(t, os.WriteFile(filepath.Join(half, "memory"), bytes.Repeat([]byte{1}, 1<<20), 0o600))
	for range 2 {
		r := s.Cube("prune", "--dry-run")
		if r.Err != nil || !strings.Contains(r.Stdout, filepath.Base(half)) || strings.Contains(r.Stdout, name) || !strings.Contains(r.Stderr, "could be freed") {
			t.Errorf("prune --dry-run: %+v", r)
		}
		if _, err := os.Stat(half); err != nil {
			t.Error(err)
		}
	}
	var freed usage.Freed
	must(t, json.Unmarshal([]byte(cube(t, "prune", "--json")), &freed))
	if !slices.ContainsFunc(freed.Items, func(r usage.Removed) bool { return r.Name == filepath.Base(half) && r.Bytes >= 1<<20 }) {
		t.Errorf("freed %+v", freed)
	}
	if _, err := os.Stat(half); err == nil {
		t.Error("what is half-made is still there")
	}
	cube(t, "snapshot", "inspect", name)
	cube(t, "exec", id, "true")
	if out := cube(t, "prune", "--dry-run"); strings.Contains(out, filepath.Base(half)) {
		t.Errorf("it would go again:\n%s", out)
	}
}
