package snapshot_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// paper is a machine that is nothing but what a save of it leaves.
type paper struct {
	vmm.Machine
	text string
}

const paperMiB = 4

func (p paper) Save(ctx context.Context, r vmm.SaveRequest) (*vmm.Saved, error) {
	if err := r.Quiesce.Freeze(ctx); err != nil {
		return nil, err
	}
	write := func(name string, size int64, at ...int64) error {
		f, err := os.Create(filepath.Join(r.Dir, name))
		if err != nil {
			return err
		}
		for _, off := range at {
			_, e := f.WriteAt([]byte(p.text+name), off)
			err = errors.Join(err, e)
		}
		return errors.Join(err, f.Truncate(size), f.Close())
	}
	err := errors.Join(
		write(vmm.StateFile, 16<<10, 0),
		write(vmm.MemoryFile, paperMiB<<20, 4096, 2<<20),
		write(vmm.DiskFile("root"), 3<<20, 1<<20),
		r.Quiesce.Thaw(ctx))
	return &vmm.Saved{
		Platform: vmm.Platform{Board: 4, QEMU: "q", Guest: "g", Accel: "tcg", CPU: "max", TSCKHz: 2_400_000},
		Shape:    vmm.Shape{VCPUs: 1, MemoryMiB: paperMiB},
		Disks:    []vmm.SavedDisk{{Serial: "root", LUN: 1}, {Serial: "other", LUN: 2}}[:1],
		Frozen:   true,
		Memory:   memory.Written{Chunks: []int64{0, 2}},
	}, err
}

// shelf is a store for paper machines.
type shelf struct {
	*snapshot.Store
	cfg *config.Config
}

func newShelf(t testing.TB) *shelf {
	t.Helper()
	dir := t.TempDir()
	cfg := config.Default()
	cfg.StateDir, cfg.RunDir = filepath.Join(dir, "state"), filepath.Join(dir, "run")
	return &shelf{snapshot.New(cfg, slog.New(slog.DiscardHandler)), cfg}
}

func (s *shelf) save(t testing.TB, id string) *snapshot.Info {
	t.Helper()
	info, err := s.Save(t.Context(), id, paper{text: id}, &rest{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return info
}

func (s *shelf) path(elem ...string) string {
	return filepath.Join(append([]string{s.cfg.SnapshotDir()}, elem...)...)
}

// use opens a snapshot and reads all of it.
func (s *shelf) use(t testing.TB, id string) error {
	t.Helper()
	o, err := s.Open(id, "test")
	if err != nil {
		return err
	}
	held, err := o.Hold(t.Context())
	if err == nil {
		err = held.Release()
	}
	return errors.Join(err, o.Close())
}

func second[T any](_ T, err error) error { return err }

func encode(t testing.TB, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
