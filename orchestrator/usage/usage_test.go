package usage

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/reflink"
	"github.com/cubesandbox/cube/internal/testfs"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

func TestMain(m *testing.M) { testfs.Main(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func host(t *testing.T) *config.Config {
	cfg := config.Default()
	cfg.StateDir, cfg.RunDir = testfs.XFS(t, 300<<20), t.TempDir()
	cfg.Artefacts = filepath.Join(cfg.StateDir, "artefacts")
	must(t, os.MkdirAll(cfg.StoreDir(), 0o700))
	return cfg
}

// copyOf makes a file that shares all of another's blocks.
func copyOf(t *testing.T, to, from string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(to), 0o700))
	src, err := os.Open(from)
	must(t, err)
	defer src.Close()
	dst, err := os.Create(to)
	must(t, err)
	defer dst.Close()
	shared, err := reflink.Clone(t.Context(), dst, src)
	must(t, errors.Join(err, dst.Sync()))
	if !shared {
		t.Fatal("nothing is shared")
	}
}

// TestShares: what several have is counted once for their kind, and is nobody's own.
func TestShares(t *testing.T) {
	const mib = 1 << 20
	cfg := host(t)
	base := filepath.Join(cfg.BaseDir(), "b", "memory")
	must(t, os.MkdirAll(filepath.Dir(base), 0o700))
	testfs.Random(t, base, 8*mib)
	copyOf(t, filepath.Join(cfg.SnapshotDir(), "one", "memory"), base)
	copyOf(t, filepath.Join(cfg.SnapshotDir(), "two", "memory"), base)
	extra := filepath.Join(cfg.SnapshotDir(), "one", "disk-a")
	testfs.Random(t, extra, 4*mib)
	copyOf(t, filepath.Join(cfg.SnapshotDir(), "two", "disk-a"), extra)
	testfs.Random(t, filepath.Join(cfg.SnapshotDir(), "two", "state"), 2*mib)
	testfs.Random(t, filepath.Join(cfg.DiskDir(), "..", "unknown"), mib) // nobody's
	u, err := Measure(t.Context(), cfg)
	must(t, err)
	for _, want := range []Kind{
		{Name: "snapshots", Count: 2, Bytes: 14 * mib, Own: 6 * mib, Items: []Item{{Name: "two", Bytes: 14 * mib, Own: 2 * mib}, {Name: "one", Bytes: 12 * mib}}},
		{Name: "base snapshots", Count: 1, Bytes: 8 * mib, Items: []Item{{Name: "b", Bytes: 8 * mib}}},
		{Name: "disks"},
	} {
		n := slices.IndexFunc(u.Kinds, func(k Kind) bool { return k.Name == want.Name })
		if got := u.Kinds[n]; got.Count != want.Count || got.Bytes != want.Bytes || got.Own != want.Own || !slices.Equal(got.Items, want.Items) {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	if u.Store.Size < 200*mib || u.Store.Free <= 0 || u.Store.Full != "" {
		t.Errorf("store: %+v", u.Store)
	}
}

// machine can be saved.
type machine struct{ vmm.Machine }

func (machine) Save(_ context.Context, r vmm.SaveRequest) (*vmm.Saved, error) {
	mem := filepath.Join(r.Dir, vmm.MemoryFile)
	return &vmm.Saved{Platform: vmm.Platform{QEMU: "q", Guest: "g"}, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 1}, Frozen: true}, errors.Join(
		os.WriteFile(filepath.Join(r.Dir, vmm.StateFile), []byte("state"), 0o600), os.WriteFile(mem, nil, 0o600), os.Truncate(mem, 1<<20))
}

// TestPrune: a snapshot goes when its reason has gone, and never one that has none but its name; a look changes nothing.
func TestPrune(t *testing.T) {
	cfg := host(t)
	st := snapshot.New(cfg, slog.New(slog.DiscardHandler))
	for id, purpose := range map[string]saved.Purpose{"named": "", "paused": saved.ForPause, "forsaken": saved.ForPause} {
		p := &saved.Pod{ID: "pod", Namespace: "default", Purpose: purpose, Containers: []saved.Container{}}
		_, err := st.Save(t.Context(), id, machine{}, nil, p.Encode)
		must(t, err)
	}
	must(t, saved.Checkpoint{Snapshot: "paused", Container: "c"}.Write(filepath.Join(cfg.PausedDir(), "default", "c")))
	must(t, os.Mkdir(filepath.Join(cfg.SnapshotDir(), ".tmp-killed"), 0o700))
	names := func() (all []string) {
		entries, err := os.ReadDir(cfg.SnapshotDir())
		must(t, err)
		for _, e := range entries {
			all = append(all, e.Name())
		}
		return all
	}
	before := names()
	for _, dry := range []bool{true, true, false} {
		freed, err := Prune(t.Context(), cfg, Options{DryRun: dry})
		must(t, err)
		var got []string
		for _, i := range freed.Items {
			got = append(got, i.Name)
		}
		if !slices.Equal(got, []string{".tmp-killed", "forsaken"}) {
			t.Errorf("dry: %v, got %v", dry, got)
		}
		if len(freed.Notes) != 1 || !strings.Contains(freed.Notes[0], "cube up") {
			t.Errorf("notes: %q", freed.Notes)
		}
		if dry && !slices.Equal(names(), before) {
			t.Errorf("a dry run has left %v of %v", names(), before)
		}
	}
	if got := names(); !slices.Equal(got, []string{"named", "paused"}) {
		t.Errorf("left: %v", got)
	}
	if freed, err := Prune(t.Context(), cfg, Options{}); err != nil || len(freed.Items) > 0 {
		t.Errorf("again: %+v, %v", freed, err)
	}
}
