package snapshot_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/testfs"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/base"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

var shape = vmm.Shape{VCPUs: 1, MemoryMiB: 256}

// host is a host with real machines, whose store is on a file system of the test's own.
type host struct {
	cfg      *config.Config
	launcher *base.Launcher
	store    *snapshot.Store
}

func newHost(t testing.TB, store string) *host {
	t.Helper()
	cfg := testguest.Config(t)
	cfg.StateDir = filepath.Join(store, "state")
	settle := func(ctx context.Context, agent net.Conn) error {
		stop := context.AfterFunc(ctx, func() { agent.Close() })
		defer stop()
		_, err := testguest.Talk(agent).Do(cfg, "ping")
		return err
	}
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	return &host{cfg: cfg, launcher: base.NewLauncher(cfg, settle, log), store: snapshot.New(cfg, log)}
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// machine is one with its guest.
type machine struct {
	vmm.Machine
	*testguest.Guest
	disks string
}

// launch makes a machine of the request's kind, which ends with the test.
func (h *host) launch(t testing.TB, r vmm.Request) (*machine, error) {
	t.Helper()
	r.Dir = filepath.Join(h.cfg.VMDir(), r.ID)
	r.DiskDir = filepath.Join(h.cfg.StoreDir(), "boxes", r.ID)
	if err := errors.Join(os.MkdirAll(r.Dir, 0o700), os.MkdirAll(r.DiskDir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if r.Snapshot == "" && r.Shape.VCPUs == 0 {
		r.Shape = shape
	}
	m, err := h.launcher.Launch(within(t, h.cfg.Timeout(3*time.Minute)), r)
	if err != nil {
		if left, _ := filepath.Glob(r.DiskDir + "/*"); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
		if _, err := os.Stat(r.Dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left", r.Dir)
		}
		return nil, err
	}
	t.Cleanup(func() {
		if err := stop(m); err != nil {
			t.Errorf("stop %s: %v", r.ID, err)
		}
		if t.Failed() {
			t.Logf("console of %s:\n%s", r.ID, m.Console())
		}
	})
	return &machine{m, testguest.Talk(m.Agent()), r.DiskDir}, nil
}

func (h *host) must(t testing.TB, r vmm.Request) *machine {
	t.Helper()
	m, err := h.launch(t, r)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// fresh is a machine with a root disk that is large and nearly empty.
func (h *host) fresh(t testing.TB, id string) *machine {
	t.Helper()
	return h.must(t, vmm.Request{ID: id, Root: h.image(t, id, 1<<30)})
}

func (h *host) image(t testing.TB, name string, size int64) *os.File {
	t.Helper()
	if err := os.MkdirAll(h.cfg.StoreDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(h.cfg.StoreDir(), name+".img"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f
}

func (h *host) save(t testing.TB, id string, m *machine) *snapshot.Info {
	t.Helper()
	info, err := h.store.Save(within(t, h.cfg.Timeout(time.Minute)), id, m.Machine, &rest{})
	if err != nil {
		t.Fatal(err)
	}
	return info
}

func stop(m vmm.Machine) error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return m.Stop(ctx)
}

// rest is a guest's agent that does what it is asked, as far as its fields don't say otherwise.
type rest struct {
	freeze        func(ctx context.Context) error
	frozen, thawn int
}

func (r *rest) Freeze(ctx context.Context) error {
	r.frozen++
	if r.freeze != nil {
		return r.freeze(ctx)
	}
	return nil
}

func (r *rest) Thaw(context.Context) error {
	r.thawn++
	return nil
}

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
	// At most two guests at once run here.
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

// Disks come back where the guest has them, plugged in or not; the machine's own stay apart.
func (h *host) testDisks(t *testing.T) {
	m := h.must(t, vmm.Request{ID: "bare"}) // its root is a placeholder
	ctx := within(t, h.cfg.Timeout(time.Minute))
	add := func(serial string, readOnly bool) {
		t.Helper()
		f := h.image(t, serial, 8<<20)
		if _, err := f.WriteAt([]byte("content-of-"+serial), 0); err != nil {
			t.Fatal(err)
		}
		if err := m.AddDisk(ctx, vmm.Disk{Serial: serial, File: f, ReadOnly: readOnly}); err != nil {
			t.Fatal(err)
		}
		m.Must(t, h.cfg, "disk %s", serial)
	}
	for _, serial := range []string{"one", "two", "three"} {
		add(serial, serial == "three")
	}
	if err := m.RemoveDisk(ctx, "one"); err != nil { // leaves a gap
		t.Fatal(err)
	}
	m.Must(t, h.cfg, "nodisk one")
	m.Must(t, h.cfg, "write two changed")
	info := h.save(t, "disks", m)
	if len(info.Disks) != 3 || !info.Disks[0].Placeholder || info.Disks[1].Serial != "two" || !info.Disks[2].ReadOnly {
		t.Errorf("disks %+v", info.Disks)
	}
	m.Must(t, h.cfg, "write two since")
	if err := stop(m); err != nil {
		t.Fatal(err)
	}
	m = h.must(t, vmm.Request{ID: "again", Snapshot: "disks"})
	for serial, want := range map[string]string{"two": "changed", "three": "content-of-three"} {
		if got := m.Must(t, h.cfg, "read %s", serial); got != want {
			t.Errorf("disk %s has %q, want %q", serial, got, want)
		}
	}
	if _, err := m.Do(h.cfg, "write three x"); err == nil {
		t.Error("the guest writes to a read-only disk")
	}
	add("four", false)
	if got := m.Must(t, h.cfg, "read four"); got != "content-of-four" {
		t.Errorf("disk four has %q", got)
	}
	if err := m.RemoveDisk(ctx, "two"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(m.disks, "disk-three")); err != nil {
		t.Error(err)
	}
	if _, err := h.store.Delete("disks"); err != nil {
		t.Error(err)
	}
	// A root that was there and is removed.
	if err := stop(m); err != nil {
		t.Fatal(err)
	}
	m = h.fresh(t, "rooted")
	if err := m.RemoveDisk(ctx, vmm.RootSerial); err != nil {
		t.Fatal(err)
	}
	m.Must(t, h.cfg, "nodisk root")
	if info := h.save(t, "rootless", m); len(info.Disks) != 0 {
		t.Errorf("disks %+v", info.Disks)
	}
	if err := stop(m); err != nil {
		t.Fatal(err)
	}
	m = h.must(t, vmm.Request{ID: "rootless", Snapshot: "rootless"})
	m.Must(t, h.cfg, "nodisk root")
	if _, err := h.store.Delete("rootless"); err != nil {
		t.Error(err)
	}
}

// An agent that doesn't answer delays a save; one that refuses ends it; the guest goes on in any case.
func (h *host) testAgent(t *testing.T) {
	m := h.fresh(t, "agent")
	m.Must(t, h.cfg, "count root")
	ctx := within(t, h.cfg.Timeout(time.Minute))
	stalled := &rest{freeze: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }}
	info, err := h.store.Save(ctx, "stalled", m.Machine, stalled)
	if err != nil || info.Frozen || stalled.thawn != 1 {
		t.Errorf("a stalled agent: %+v, thawn %d times, %v", info, stalled.thawn, err)
	}
	if _, err := h.store.Delete("stalled"); err != nil {
		t.Error(err)
	}
	refuses := &rest{freeze: func(context.Context) error { return errors.New("/data is the host's") }}
	if _, err := h.store.Save(ctx, "refused", m.Machine, refuses); err == nil || !strings.Contains(err.Error(), "/data is the host's") || refuses.thawn != 1 {
		t.Errorf("an agent that refuses: thawn %d times, %v", refuses.thawn, err)
	}
	hasty, cancel := context.WithCancel(ctx)
	off := &rest{freeze: func(ctx context.Context) error { cancel(); return nil }}
	if _, err := h.store.Save(hasty, "off", m.Machine, off); !errors.Is(err, context.Canceled) || off.thawn != 1 {
		t.Errorf("called off: thawn %d times, %v", off.thawn, err)
	}
	if err := m.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := h.store.Save(ctx, "paused", m.Machine, &rest{}); err == nil || !strings.Contains(err.Error(), "resume it first") {
		t.Errorf("a paused machine: %v", err)
	}
	if err := m.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	if all, err := h.store.List(); err != nil || len(all) != 0 {
		t.Errorf("snapshots %v, %v", all, err)
	}
	// What changes the machine waits for the save, and comes about.
	var wg sync.WaitGroup
	slow := &rest{freeze: func(context.Context) error {
		for name, change := range map[string]func() error{
			"add": func() error {
				return m.AddDisk(ctx, vmm.Disk{Serial: "meanwhile", File: h.image(t, "meanwhile", 1<<20)})
			},
			"pause":  func() error { return m.Pause(ctx) },
			"second": func() error { _, err := h.store.Save(ctx, "second", m.Machine, &rest{}); return err },
		} {
			wg.Go(func() {
				if err := change(); err != nil && !strings.Contains(err.Error(), "resume it first") {
					t.Errorf("%s: %v", name, err)
				}
			})
		}
		return nil
	}}
	if info, err := h.store.Save(ctx, "slow", m.Machine, slow); err != nil || len(info.Disks) != 1 {
		t.Errorf("%v", err)
	}
	wg.Wait()
	if err := m.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	m.Must(t, h.cfg, "disk meanwhile")
	first, _ := m.counts(t, h.cfg, 0)
	m.counts(t, h.cfg, first)
	for _, id := range []string{"slow", "second"} {
		_, _ = h.store.Delete(id) // the second one is there or not
	}
}

// A machine that is killed while it is saved leaves no snapshot, and nothing else.
func (h *host) testKilled(t *testing.T) {
	m := h.fresh(t, "killed")
	dies := &rest{freeze: func(context.Context) error { return unix.Kill(m.PID(), unix.SIGKILL) }}
	_, err := h.store.Save(within(t, h.cfg.Timeout(time.Minute)), "killed", m.Machine, dies)
	if !errors.Is(err, vmm.ErrGone) {
		t.Errorf("got %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(h.cfg.SnapshotDir(), "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if left, _ := filepath.Glob(filepath.Join(h.cfg.SnapshotDir(), ".*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// witness keeps what the driver says of a save.
type witness struct {
	vmm.Machine
	saved *vmm.Saved
}

func (w *witness) Save(ctx context.Context, r vmm.SaveRequest) (_ *vmm.Saved, err error) {
	w.saved, err = w.Machine.Save(ctx, r)
	return w.saved, err
}
