package snapshot_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/testfs"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
)

func TestMain(m *testing.M) { testfs.Main(m, testguest.Remove) }

// testRefused: what doesn't fit or is damaged is found before a guest runs.
func (h *host) testRefused(t *testing.T) {
	m := h.fresh(t, "good")
	h.save(t, "good", m)
	if err := stop(m); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(h.cfg.SnapshotDir(), "good")
	flip := func(t *testing.T, name string) (undo func()) {
		t.Helper()
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		at, err := unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
		if err != nil { // nothing but a hole
			at = 0
		}
		b := []byte{0}
		turn := func() {
			if _, err := f.ReadAt(b, at); err != nil {
				t.Fatal(err)
			}
			b[0] ^= 1
			if _, err := f.WriteAt(b, at); err != nil {
				t.Fatal(err)
			}
		}
		turn()
		return func() { turn(); f.Close() }
	}
	move := func(t *testing.T, from, to string) (undo func()) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
		return func() { _ = os.Rename(to, from) }
	}
	for name, tc := range map[string]struct {
		spoil func(*testing.T) (undo func())
		want  string
		is    func(error) bool
	}{
		"a bit of the memory":      {func(t *testing.T) func() { return flip(t, "memory") }, "memory is damaged in its MiB", errdefs.IsDataLoss},
		"a bit of the disk":        {func(t *testing.T) func() { return flip(t, "disk-root") }, "disk-root is damaged in its MiB 0", errdefs.IsDataLoss},
		"a bit of the state":       {func(t *testing.T) func() { return flip(t, "state") }, "state is damaged in its MiB 0", errdefs.IsDataLoss},
		"a bit of the description": {func(t *testing.T) func() { return flip(t, "snapshot.json") }, "snapshot.json", errdefs.IsDataLoss},
		"no QEMU": {func(t *testing.T) func() {
			was := h.cfg.Artefacts
			h.cfg.Artefacts = t.TempDir()
			return func() { h.cfg.Artefacts = was }
		}, "its QEMU (", errdefs.IsFailedPrecondition},
		"no modules": {func(t *testing.T) func() {
			guest := filepath.Dir(h.cfg.GuestDir())
			return move(t, filepath.Join(guest, "test"), filepath.Join(guest, "moved"))
		}, "kernel modules", errdefs.IsFailedPrecondition},
		"too much memory": {func(t *testing.T) func() {
			was := h.cfg.VM.MaxMemory
			h.cfg.VM.MaxMemory = 128 << 20
			return func() { h.cfg.VM.MaxMemory = was }
		}, "256 MiB of memory asked for", func(err error) bool { return errors.As(err, new(*vmm.LimitError)) }},
		"no directory for disks": {func(t *testing.T) func() {
			boxes := filepath.Join(h.cfg.StoreDir(), "boxes", "bad", "disk-root")
			if err := os.MkdirAll(boxes, 0o700); err != nil {
				t.Fatal(err)
			}
			return func() { _ = os.Remove(boxes) }
		}, "make disk root", func(err error) bool { return errors.Is(err, os.ErrExist) }},
	} {
		t.Run(name, func(t *testing.T) {
			undo := tc.spoil(t)
			defer undo()
			dir, diskDir := filepath.Join(h.cfg.VMDir(), "bad"), filepath.Join(h.cfg.StoreDir(), "boxes", "bad")
			if err := errors.Join(os.MkdirAll(dir, 0o700), os.MkdirAll(diskDir, 0o700)); err != nil {
				t.Fatal(err)
			}
			m, err := h.launcher.Launch(t.Context(), vmm.Request{ID: "bad", Dir: dir, DiskDir: diskDir, Snapshot: "good"})
			if err == nil {
				_ = stop(m)
				t.Fatal("a guest runs")
			}
			if !tc.is(err) || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v, want %q", err, tc.want)
			}
			if users, err := h.store.Users("good"); err != nil || len(users) != 0 {
				t.Errorf("users %v, %v", users, err)
			}
		})
	}
	// All is as it was.
	h.must(t, vmm.Request{ID: "fine", Snapshot: "good"}).Must(t, h.cfg, "ping")
	if _, err := h.store.Delete("good"); err != nil {
		t.Error(err)
	}
}
