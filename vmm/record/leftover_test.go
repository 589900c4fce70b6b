package record

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/vmm/cgroup"
	"github.com/cubesandbox/cube/vmm/jail"
)

// orphan makes a machine whose owner is gone.
func orphan(t *testing.T, cfg *config.Config, name string) (dir string) {
	t.Helper()
	dir = machineDir(t, cfg, name)
	r, err := New(t.Context(), dir, name)
	if err == nil {
		err = r.Update(func(s *State) { s.Owner.Start++ })
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func leftovers(t *testing.T, cfg *config.Config) map[string]Leftover {
	t.Helper()
	left, err := Leftovers(cfg)
	if err != nil {
		t.Fatal(err)
	}
	byName := make(map[string]Leftover)
	for _, l := range left {
		byName[filepath.Base(l.Dir)] = l
	}
	return byName
}

func TestLeftovers(t *testing.T) {
	cfg := newConfig(t)
	if left := leftovers(t, cfg); len(left) != 0 {
		t.Fatalf("without a directory: %v", left)
	}
	if _, err := New(t.Context(), machineDir(t, cfg, "mine"), "mine"); err != nil {
		t.Fatal(err)
	}
	orphan(t, cfg, "orphan")
	machineDir(t, cfg, "young")
	old := machineDir(t, cfg, "old")
	hourAgo := time.Now().Add(-time.Hour)
	if err := os.Chtimes(old, hourAgo, hourAgo); err != nil {
		t.Fatal(err)
	}
	left := leftovers(t, cfg)
	if len(left) != 2 || left["orphan"].State.ID != "orphan" || left["old"].State.ID != "" || time.Since(left["old"].Since) < time.Hour {
		t.Errorf("got %+v", left)
	}
	all, err := Machines(cfg)
	if err != nil || len(all) != 1 || all[0].State.ID != "mine" {
		t.Errorf("machines %+v, %v", all, err)
	}
	for _, l := range left {
		if err := l.Cleanup(cfg); err != nil || !isGone(l.Dir) {
			t.Errorf("%v, gone %v", err, isGone(l.Dir))
		}
		if err := l.Cleanup(cfg); err != nil {
			t.Errorf("a second time: %v", err)
		}
	}
}

// What is made anew between the look at a leftover and its clean-up is left alone.
func TestLeftoverThatIsMadeAnew(t *testing.T) {
	cfg := newConfig(t)
	for name, remake := range map[string]func(dir string) error{
		"directory": func(string) error { return nil },
		"record":    func(dir string) error { _, err := New(t.Context(), dir, "m"); return err },
	} {
		dir := orphan(t, cfg, "m")
		l := leftovers(t, cfg)["m"]
		if err := Cleanup(cfg, dir); err != nil {
			t.Fatal(err)
		}
		machineDir(t, cfg, "m")
		if err := remake(dir); err != nil {
			t.Fatal(err)
		}
		if err := l.Cleanup(cfg); err != nil || isGone(dir) {
			t.Errorf("%s: %v, gone %v", name, err, isGone(dir))
		}
		if err := Cleanup(cfg, dir); err != nil {
			t.Fatal(err)
		}
	}
}

// A machine isn't begun while leftovers are removed.
func TestLockedWhileCleaning(t *testing.T) {
	cfg := newConfig(t)
	dir := machineDir(t, cfg, "m")
	unlock, err := flock.LockDir(t.Context(), cfg.VMDir(), false)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := New(ctx, dir, "m"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a record was begun: %v", err)
	}
	unlock()
	if _, err := New(t.Context(), dir, "m"); err != nil {
		t.Error(err)
	}
}

func TestOrphanGroups(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	cfg, other := newConfig(t), newConfig(t)
	makeGroup := func(cfg *config.Config, name string) string {
		t.Helper()
		group := CgroupName(cfg, filepath.Join(cfg.VMDir(), name), fmt.Sprintf("test-%d-%s", os.Getpid(), name))
		if _, err := cgroup.Create(t.Context(), group, cgroup.Limits{Memory: 64 << 20, PIDs: 20}, slog.Default()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := cgroup.Remove(context.Background(), group); err != nil {
				t.Error(err)
			}
			cgroup.Prune()
		})
		return group
	}
	machineDir(t, cfg, "owned")
	owned, left, others := makeGroup(cfg, "owned"), makeGroup(cfg, "left"), makeGroup(other, "left")
	// A helper's isn't for a machine, but for something that this process has taken a uid for.
	helpers := makeGroup(cfg, "helper")
	if _, err := jail.NewUIDs(cfg).Take(filepath.Join(cfg.VMDir(), "helper"), func(uint32) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if got, err := OrphanGroups(cfg); err != nil || !slices.Equal(got, []string{left}) {
		t.Errorf("got %v, %v; want %s", got, err, left)
	}
	for _, name := range []string{owned, left, others, helpers} {
		if err := RemoveOrphanGroup(t.Context(), cfg, name); err != nil {
			t.Error(err)
		}
	}
	for name, want := range map[string]bool{owned: true, helpers: true, left: false, others: true} {
		if cgroup.Exists(name) != want {
			t.Errorf("%s exists: %v", name, !want)
		}
	}
}
