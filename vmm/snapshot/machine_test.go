package snapshot_test

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/testfs"
	"github.com/cubesandbox/cube/vmm"
)

// counts are a counting guest's: in memory and on the disk, when that in memory is above than.
func (m *machine) counts(t testing.TB, cfg *config.Config, than uint64) (memory, disk uint64) {
	t.Helper()
	if _, err := fmt.Sscan(m.Must(t, cfg, "counted %d", than), &memory, &disk); err != nil {
		t.Fatal(err)
	}
	return memory, disk
}

// onDisk is the count in an image.
func onDisk(t testing.TB, path string) uint64 {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [8]byte
	if _, err := f.ReadAt(b[:], 0); err != nil {
		t.Fatal(err)
	}
	return binary.BigEndian.Uint64(b[:])
}

// TestMachines is the life of snapshots with real machines, where files can share blocks and where they can't.
func TestMachines(t *testing.T) {
	for name, make := range map[string]func(testing.TB, int64) string{"xfs": testfs.XFS, "ext4": testfs.Ext4} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, make(t, 3<<30))
			t.Run("clones", h.testClones)
			if name == "xfs" {
				t.Run("twins", h.testTwins)
				t.Run("disks", h.testDisks)
				t.Run("agent", h.testAgent)
				t.Run("full", h.testFull)
				t.Run("killed", h.testKilled)
				t.Run("refused", h.testRefused)
				t.Run("sealed", h.testSealed)
			}
			if err := h.store.Sweep(); err != nil {
				t.Error(err)
			}
			if left, _ := filepath.Glob(filepath.Join(h.cfg.SnapshotDir(), ".*")); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// A counter in memory and on the disk goes on in the parent and in three clones at once, which diverge; and so does the
// clone of a clone.
func (h *host) testClones(t *testing.T) {
	parent := h.fresh(t, "parent")
	parent.Must(t, h.cfg, "fill root 20")
	parent.Must(t, h.cfg, "count root")
	parent.Must(t, h.cfg, "remember parent")
	before, _ := parent.counts(t, h.cfg, 0)
	info := h.save(t, "counting", parent)
	after, _ := parent.counts(t, h.cfg, before)
	saved := onDisk(t, filepath.Join(h.cfg.SnapshotDir(), "counting", "disk-root"))
	if saved < before || saved > after || !info.Frozen || info.Parent != "" {
		t.Errorf("%d is saved, the parent counted from %d to %d; %+v", saved, before, after, info.Shape)
	}
	if marked, err := guestmark.IsSet(filepath.Join(h.cfg.SnapshotDir(), "counting", "disk-root")); err != nil || !marked {
		t.Errorf("the host could mount the saved disk: %v", err)
	}
	if err := stop(parent); err != nil {
		t.Fatal(err)
	}
	var clones [3]*machine
	var wg sync.WaitGroup
	for i := range clones {
		wg.Go(func() {
			m, err := h.launch(t, vmm.Request{ID: fmt.Sprint("clone-", i), Snapshot: "counting"})
			if err != nil {
				t.Error(err)
				return
			}
			clones[i] = m
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	if users, err := h.store.Users("counting"); err != nil || len(users) != 3 || users[1].Name != "clone-1" || users[1].PID != os.Getpid() {
		t.Errorf("users %v, %v", users, err)
	}
	for i, c := range clones {
		if s := c.Must(t, h.cfg, "recall"); s != "parent" {
			t.Errorf("clone %d recalls %q", i, s)
		}
		c.Must(t, h.cfg, "remember clone-%d", i)
		if m, d := c.counts(t, h.cfg, saved); d < saved {
			t.Errorf("clone %d counts %d, on the disk %d, after %d", i, m, d, saved)
		}
	}
	for i, c := range clones {
		if s, want := c.Must(t, h.cfg, "recall"), fmt.Sprint("clone-", i); s != want {
			t.Errorf("clone %d recalls %q", i, s)
		}
	}
	if again := onDisk(t, filepath.Join(h.cfg.SnapshotDir(), "counting", "disk-root")); again != saved {
		t.Errorf("the snapshot's disk counts %d, it was %d", again, saved)
	}
	child := h.save(t, "child", clones[2])
	f, err := os.Open(filepath.Join(h.cfg.SnapshotDir(), "child", "disk-root"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := child.Disks[0].File.Digests.Check(f, child.Disks[0].File.Size); err != nil { // they are in part its parent's
		t.Error(err)
	}
	if child.Parent != "counting" || child.Platform != info.Platform {
		t.Errorf("%+v", child)
	}
	for _, c := range clones {
		if err := stop(c); err != nil {
			t.Fatal(err)
		}
	}
	// Gone with its users, while its child lives.
	if users, err := h.store.Delete("counting"); err != nil || len(users) != 0 {
		t.Errorf("users of the deleted: %v, %v", users, err)
	}
	grandchild := h.must(t, vmm.Request{ID: "grandchild", Snapshot: "child"})
	if s := grandchild.Must(t, h.cfg, "recall"); s != "clone-2" {
		t.Errorf("the grandchild recalls %q", s)
	}
	grandchild.counts(t, h.cfg, saved)
	// A snapshot in use is deleted at once, and used on.
	users, err := h.store.Delete("child")
	if err != nil || len(users) != 1 || users[0].Name != "grandchild" {
		t.Errorf("users of the deleted: %v, %v", users, err)
	}
	if _, err := h.launch(t, vmm.Request{ID: "late", Snapshot: "child"}); err == nil || !strings.Contains(err.Error(), "no snapshot child") {
		t.Errorf("a deleted snapshot: %v", err)
	}
	if left, err := h.store.Lingering(); err != nil || len(left["child"]) != 1 || len(left) != 1 {
		t.Errorf("deleted but used: %v, %v", left, err)
	}
	h.save(t, "orphan", grandchild) // its parent's files are still there for it
	if err := stop(grandchild); err != nil {
		t.Fatal(err)
	}
	if left, err := h.store.Lingering(); err != nil || len(left) != 0 {
		t.Errorf("deleted but used: %v, %v", left, err)
	}
	if err := stop(h.must(t, vmm.Request{ID: "adopted", Snapshot: "orphan"})); err != nil {
		t.Error(err)
	}
	if _, err := h.store.Delete("orphan"); err != nil {
		t.Error(err)
	}
}

// Two memories that are kept equal all the time are equal in each of many snapshots.
func (h *host) testTwins(t *testing.T) {
	m := h.fresh(t, "twins")
	m.Must(t, h.cfg, "twins 8")
	written := m.twinned(t, h.cfg, 0)
	n := 4
	if os.Getenv("CUBE_TEST_LONG") != "" {
		n = 100
	}
	for i := range n {
		id := fmt.Sprint("twins-", i)
		h.save(t, id, m)
		c := h.must(t, vmm.Request{ID: id, Snapshot: id})
		c.twinned(t, h.cfg, c.twinned(t, h.cfg, written))
		if err := stop(c); err != nil {
			t.Fatal(err)
		}
		if _, err := h.store.Delete(id); err != nil {
			t.Error(err)
		}
		written = m.twinned(t, h.cfg, 0)
	}
}

// twinned is how often the twins were written to, when that is more often than than.
func (m *machine) twinned(t testing.TB, cfg *config.Config, than int64) (written int64) {
	t.Helper()
	var differed int64
	if _, err := fmt.Sscan(m.Must(t, cfg, "twinned %d", than), &written, &differed); err != nil {
		t.Fatal(err)
	}
	if differed != 0 {
		t.Errorf("found different %d times of %d", differed, written)
	}
	return written
}
