package usage

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/internal/config"
	shimrecord "github.com/cubesandbox/cube/shim/record"
)

// disksOf has Prune look, and tells which disks go.
func disksOf(t *testing.T, cfg *config.Config, dry bool) (names []string, err error) {
	t.Helper()
	freed, err := Prune(t.Context(), cfg, Options{DryRun: dry})
	for _, i := range freed.Items {
		if i.Kind == "disks" {
			names = append(names, i.Name)
		}
	}
	return names, err
}

// TestPruneDisks: disks go that no pod's state names and no process has open, and none where that can't be told.
func TestPruneDisks(t *testing.T) {
	cfg := host(t)
	path := func(name string) string { return filepath.Join(cfg.DiskDir(), name) }
	for _, name := range []string{"own", "other", "open", "stray"} {
		must(t, shimrecord.MakeDisks(t.Context(), path(name)))
		must(t, os.WriteFile(filepath.Join(path(name), "disk"), []byte("x"), 0o600))
	}
	open, err := os.Open(filepath.Join(path("open"), "disk"))
	must(t, err)
	defer open.Close()
	pod := shimrecord.Pod(filepath.Join(cfg.PodDir(), "0123456789abcdef"))
	unlock, err := pod.Make(t.Context())
	must(t, err)
	unlock()
	must(t, os.Mkdir(filepath.Join(cfg.PodDir(), "starting"), 0o700)) // it has no state yet
	must(t, pod.SaveState(shimrecord.PodState{ID: "pod", DiskDir: path("own"), Other: &shimrecord.Other{DiskDir: path("other")}}))
	state := filepath.Join(string(pod), "state.json")
	good, err := os.ReadFile(state)
	must(t, err)

	must(t, os.WriteFile(state, []byte("{"), 0o600))
	if names, err := disksOf(t, cfg, false); err == nil || !strings.Contains(err.Error(), state) || len(names) > 0 {
		t.Errorf("a damaged state: %v, %v", names, err)
	}
	must(t, os.WriteFile(state, good, 0o600))
	for _, dry := range []bool{true, true, false} {
		if names, err := disksOf(t, cfg, dry); err != nil || !slices.Equal(names, []string{"stray"}) {
			t.Errorf("dry: %v, got %v, %v", dry, names, err)
		}
	}
	left, err := entries(cfg.DiskDir())
	if err != nil || len(left) != 3 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestDisksTaken: disks that a pod has been given since they were looked at stay.
func TestDisksTaken(t *testing.T) {
	cfg := host(t)
	dir := filepath.Join(cfg.DiskDir(), "box")
	must(t, shimrecord.MakeDisks(t.Context(), dir))
	p := &plan{cfg: cfg, freed: &Freed{}, tally: &tally{}}
	must(t, p.findDisks())
	if len(p.candidates) != 1 {
		t.Fatalf("candidates: %+v", p.candidates)
	}
	pod := shimrecord.Pod(filepath.Join(cfg.PodDir(), "0123456789abcdef"))
	unlock, err := pod.Make(t.Context())
	must(t, err)
	unlock()
	must(t, pod.SaveState(shimrecord.PodState{ID: "box", DiskDir: dir}))
	must(t, shimrecord.MakeDisks(t.Context(), dir))
	if gone, err := p.candidates[0].remove(t.Context()); gone || err != nil {
		t.Errorf("%v, %v", gone, err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
}
