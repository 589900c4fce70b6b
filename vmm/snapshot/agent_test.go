package snapshot_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm"
)

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
	silent := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	stalled := &rest{freeze: silent, thaw: silent}
	info, err := h.store.Save(ctx, "stalled", m.Machine, stalled, nil)
	if err != nil || info.Frozen || stalled.thawn != 1 {
		t.Errorf("a stalled agent: %+v, thawn %d times, %v", info, stalled.thawn, err)
	}
	if _, err := h.store.Delete("stalled"); err != nil {
		t.Error(err)
	}
	refuses := &rest{freeze: func(context.Context) error { return errors.New("/data is the host's") }}
	if _, err := h.store.Save(ctx, "refused", m.Machine, refuses, nil); err == nil || !strings.Contains(err.Error(), "/data is the host's") || refuses.thawn != 1 {
		t.Errorf("an agent that refuses: thawn %d times, %v", refuses.thawn, err)
	}
	hasty, cancel := context.WithCancel(ctx)
	off := &rest{freeze: func(ctx context.Context) error { cancel(); return nil }}
	if _, err := h.store.Save(hasty, "off", m.Machine, off, nil); !errors.Is(err, context.Canceled) || off.thawn != 1 {
		t.Errorf("called off: thawn %d times, %v", off.thawn, err)
	}
	if err := m.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := h.store.Save(ctx, "paused", m.Machine, &rest{}, nil); err == nil || !strings.Contains(err.Error(), "resume it first") {
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
			"second": func() error { _, err := h.store.Save(ctx, "second", m.Machine, &rest{}, nil); return err },
		} {
			wg.Go(func() {
				if err := change(); err != nil && !strings.Contains(err.Error(), "resume it first") {
					t.Errorf("%s: %v", name, err)
				}
			})
		}
		return nil
	}}
	if info, err := h.store.Save(ctx, "slow", m.Machine, slow, nil); err != nil || len(info.Disks) != 1 {
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
	_, err := h.store.Save(within(t, h.cfg.Timeout(time.Minute)), "killed", m.Machine, dies, nil)
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
