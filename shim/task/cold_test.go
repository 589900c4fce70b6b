package task

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm"
)

// pausedToDisk is a container that counts, paused to disk and deleted, and what it goes on from. With cold only its disk is kept.
func (h *harness) pausedToDisk(cold bool) saved.Paused {
	h.Helper()
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	c.counts("1")
	h.must(h.pod.PauseToDisk(h.Context(), cid, cold))
	h.must(second(h.delete("")))
	cfg, err := config.Load("")
	h.must(err)
	return saved.PausedOf(cfg, "testing", cid)
}

// resumed is another pod of the same container.
func (h *harness) resumed() *teller {
	h.Helper()
	dir := record.Pod(filepath.Join(h.runDir, "pods", "resumed"))
	h.must(os.MkdirAll(string(dir), 0o700))
	return &teller{harness: h, Service: h.serve(cid, dir, nowhere{}), id: cid}
}

// TestColdStart: a paused container whose machine can't be restored here begins anew with a copy of the disk that it had, and
// says why; its checkpoint is whole as long as nobody ends it.
func TestColdStart(t *testing.T) {
	h := newHarness(t)
	h.launcher.RootImage = bytes.Repeat([]byte("disk"), 1<<10)
	paused := h.pausedToDisk(false)
	var disk []byte
	h.launcher.Disks = func(d vmm.Disk) (err error) {
		if _, err := d.File.WriteAt([]byte("DISK"), 0); err != nil { // it is the container's own
			return err
		}
		disk, err = io.ReadAll(io.NewSectionReader(d.File, 0, 1<<20))
		return err
	}
	h.launcher.Unfit = errdefs.ErrFailedPrecondition.WithMessage("its QEMU is gone")
	c := h.resumed()
	for range 2 { // another time from the same checkpoint
		h.must(c.try(func(r *taskapi.CreateTaskRequest) { r.Checkpoint = string(paused) }))
		c.begin()
		c.counts("1")
		// The one that was prepared is larger.
		if want := append([]byte("DISK"), h.launcher.RootImage[4:]...); !bytes.HasPrefix(disk, want) || len(disk) == len(want) {
			t.Errorf("the root has %d bytes: %.20q", len(disk), disk)
		}
		m := h.launcher.Last()
		if calls := m.Guest.Calls(); m.Snapshot != "" || !slices.Contains(calls, "/cube.agent.v1.Agent/CreateContainer") {
			t.Errorf("of snapshot %q, calls %q", m.Snapshot, calls)
		}
		cp, err := paused.Checkpoint()
		h.must(err)
		u, err := c.pod.Usage()
		if err != nil || u.Cold != "its QEMU is gone" || u.Snapshot != cp.Snapshot {
			t.Errorf("usage %+v, %v", u, err)
		}
		c.end()
	}
}

// TestColdAsSaid: a checkpoint says that the container begins anew although its machine can be restored.
func TestColdAsSaid(t *testing.T) {
	h := newHarness(t)
	h.launcher.RootImage = bytes.Repeat([]byte("disk"), 1<<10)
	paused := h.pausedToDisk(false)
	h.launcher.Disks = func(vmm.Disk) error { return nil }
	cp, err := paused.Checkpoint()
	h.must(err)
	for _, cold := range []bool{true, false} { // that an attempt before was to be cold says nothing of the next one
		cp.Cold = cold
		h.must(paused.Write(cp))
		c := h.resumed()
		h.must(c.try(func(r *taskapi.CreateTaskRequest) { r.Checkpoint = string(paused) }))
		c.begin()
		u, err := c.pod.Usage()
		if restored := h.launcher.Last().Snapshot != ""; err != nil || restored == cold || (u.Cold == "") == cold {
			t.Errorf("cold %v: restored %v, usage %+v, %v", cold, restored, u, err)
		}
		c.end()
	}
}

// TestColdPause: of a container whose memory isn't wanted only the disk is kept, and it begins anew with that. One that has no
// disk of its own runs on.
func TestColdPause(t *testing.T) {
	h := newHarness(t)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	c.counts("1")
	if err := h.pod.PauseToDisk(t.Context(), cid, true); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a cold pause without a disk: %v", err)
	}
	c.counts("2")
	c.end()

	h = newHarness(t)
	h.launcher.RootImage = bytes.Repeat([]byte("disk"), 1<<10)
	paused := h.pausedToDisk(true)
	cp, err := paused.Checkpoint()
	h.must(err)
	if !cp.Cold {
		t.Error("the checkpoint has it go on with its memory")
	}
	cfg, err := config.Load("")
	h.must(err)
	for _, name := range []string{vmm.MemoryFile, vmm.StateFile} {
		if _, err := os.Stat(filepath.Join(cfg.SnapshotDir(), cp.Snapshot, name)); !os.IsNotExist(err) {
			t.Errorf("%s was saved: %v", name, err)
		}
	}
	r := h.resumed()
	h.must(r.try(func(r *taskapi.CreateTaskRequest) { r.Checkpoint = string(paused) }))
	r.begin()
	r.counts("1")
	r.end()
}

// TestSavedDisks: the disk of a container that runs on is saved without its memory, and others begin with a copy of it, as many as
// want to.
func TestSavedDisks(t *testing.T) {
	h := newHarness(t)
	h.launcher.RootImage = bytes.Repeat([]byte("disk"), 1<<10)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	c.counts("1")
	info, err := h.pod.SaveDisks(t.Context(), "layer", "")
	h.must(err)
	if !info.DisksOnly() || !info.Frozen {
		t.Errorf("saved: %+v", info)
	}
	c.counts("2")
	c.end()
	var size int64
	h.launcher.Disks = func(d vmm.Disk) error {
		st, err := d.File.Stat()
		size = st.Size()
		return err
	}
	for i := range 2 {
		dir := t.TempDir()
		h.must(saved.Checkpoint{Snapshot: "layer", Container: cid, Cold: true}.Write(dir))
		other := &teller{harness: h, Service: h.clone(fmt.Sprint("other", i)), id: cid}
		h.must(other.try(func(r *taskapi.CreateTaskRequest) { r.Checkpoint = dir }))
		other.begin()
		other.counts("1")
		if m := h.launcher.Last(); m.Snapshot != "" || size <= 4<<10 {
			t.Errorf("of snapshot %q, with a disk of %d bytes", m.Snapshot, size)
		}
		other.end()
	}
}

// TestNoColdStart: what can't come back even from its disk stays paused, and says why in a line.
func TestNoColdStart(t *testing.T) {
	h := newHarness(t)
	paused := h.pausedToDisk(false) // its machine has no disk that is kept
	gone := errdefs.ErrFailedPrecondition.WithMessage("its QEMU is gone")
	for _, c := range []struct {
		what, want string
		unfit      error
		is         func(error) bool
	}{
		{"no disk", "its snapshot has no writable root", gone, errdefs.IsFailedPrecondition},
		// It would ask for as much again: there is nothing to lose its memory for.
		{"too large a machine", "512 MiB of memory asked for, but 64 to 256 are possible here", &vmm.LimitError{What: "MiB of memory", Asked: 512, Min: 64, Max: 256}, errdefs.IsInvalidArgument},
	} {
		before := len(h.launcher.All())
		h.launcher.Unfit = c.unfit
		err := h.resumed().try(func(r *taskapi.CreateTaskRequest) { r.Checkpoint = string(paused) })
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", c.what, err)
		}
		if !c.is(errgrpc.ToNative(err)) {
			t.Errorf("%s: class of %v", c.what, err)
		}
		if n := len(h.launcher.All()); n != before {
			t.Errorf("%s: %d machines were made", c.what, n-before)
		}
		if _, err := paused.Checkpoint(); err != nil {
			t.Errorf("%s: the checkpoint: %v", c.what, err)
		}
	}
	h.launcher.Unfit = nil
	c := h.resumed()
	h.must(c.try(func(r *taskapi.CreateTaskRequest) { r.Checkpoint = string(paused) }))
	c.begin()
	c.counts("2")
	c.end()
}

// TestUnfitCheckpoint: a checkpoint that isn't of a pause is not started cold when its machine can't be restored here.
func TestUnfitCheckpoint(t *testing.T) {
	h := newHarness(t)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	dir := c.checkpoint()
	c.end()
	before := len(h.launcher.All())
	h.launcher.Unfit = errdefs.ErrFailedPrecondition.WithMessage("its QEMU is gone")
	other := &teller{harness: h, Service: h.clone("other"), id: cid}
	err := other.try(func(r *taskapi.CreateTaskRequest) { r.Checkpoint = dir })
	refused(t, "a checkpoint that can't be restored", err)
	if err != nil && !strings.Contains(err.Error(), "its QEMU is gone") {
		t.Errorf("no reason: %v", err)
	}
	if n := len(h.launcher.All()); n != before {
		t.Errorf("%d machines were made", n-before)
	}
}
