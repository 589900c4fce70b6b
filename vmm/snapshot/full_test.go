package snapshot_test

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A save that the store has no space for leaves nothing, and the machine goes on; there is one when there is space.
func (h *host) testFull(t *testing.T) {
	m := h.fresh(t, "full")
	m.Must(t, h.cfg, "remember before")
	m.Must(t, h.cfg, "hog 64")
	ballast := h.image(t, "ballast", 0)
	var st unix.Statfs_t
	if err := unix.Statfs(h.cfg.StoreDir(), &st); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fallocate(int(ballast.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-(24<<20)); err != nil {
		t.Fatal(err)
	}
	ctx := within(t, h.cfg.Timeout(time.Minute))
	if _, err := h.store.Save(ctx, "full", m.Machine, &rest{}, nil); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("got %v", err)
	}
	for _, pattern := range []string{"*", ".*"} {
		if left, _ := filepath.Glob(filepath.Join(h.cfg.SnapshotDir(), pattern)); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
	if s := m.Must(t, h.cfg, "recall"); s != "before" {
		t.Errorf("the machine recalls %q", s)
	}
	if err := ballast.Truncate(0); err != nil {
		t.Fatal(err)
	}
	h.save(t, "full", m)
	if _, err := h.store.Delete("full"); err != nil {
		t.Error(err)
	}
}
