package record

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/flock"
)

// TestDisks: a machine's directory is empty, whatever was there; whoever sweeps has none that is being made, and is waited for.
func TestDisks(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "disks", "box")
	stray := func() (bool, error) { return true, nil }
	if gone, err := SweepDisks(dir, stray); gone || err != nil {
		t.Errorf("none: %v, %v", gone, err)
	}
	for range 2 {
		must(t, MakeDisks(t.Context(), dir))
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) > 0 {
			t.Errorf("made: %v, %v", entries, err)
		}
		must(t, os.WriteFile(filepath.Join(dir, "disk"), nil, 0o600))
	}
	if gone, err := SweepDisks(dir, func() (bool, error) { return false, nil }); gone || err != nil {
		t.Errorf("somebody's: %v, %v", gone, err)
	}
	unlock, err := flock.LockDir(t.Context(), dir, false)
	must(t, err)
	if gone, err := SweepDisks(dir, stray); gone || !errors.Is(err, flock.ErrLocked) {
		t.Errorf("locked: %v, %v", gone, err)
	}
	unlock()
	gone, err := SweepDisks(dir, func() (bool, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if err := MakeDisks(ctx, dir); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("made amid a sweep: %v", err)
		}
		return true, nil
	})
	if _, left := os.Lstat(dir); !gone || err != nil || !errors.Is(left, fs.ErrNotExist) {
		t.Errorf("a stray: %v, %v, %v", gone, err, left)
	}
}
