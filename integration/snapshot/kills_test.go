package snapshot

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/shim/record"
	vmrecord "github.com/cubesandbox/cube/vmm/record"
)

// machines are the QEMUs of a container's pod by its record: its own, and the one that takes its place or had it.
func (b *box) machines() (own, other int) {
	b.Helper()
	pods, err := record.Pods(s.Config.PodDir())
	must(b, err)
	for _, p := range pods {
		state, err := p.State()
		if err != nil || state.ID != b.id {
			continue
		}
		qemu := func(dir string) int {
			vm, err := vmrecord.Read(dir)
			if err != nil {
				return 0 // it isn't there yet, or no more
			}
			return vm.QEMU.PID
		}
		if own = qemu(state.MachineDir); state.Other != nil {
			other = qemu(state.Other.MachineDir)
		}
	}
	return own, other
}

// midway begins a rollback, and returns what comes of it, when the other machine has come that far: its directory is there
// ("machine"), its disks are being made ("disks"), its QEMU runs ("qemu").
func (b *box) midway(ctx context.Context, name, step string) <-chan error {
	b.Helper()
	vms, disks := watch(b.T, s.Config.VMDir()), watch(b.T, s.Config.DiskDir())
	vms.names, disks.names = nil, nil // those that are there already
	shim := b.shim(ctx)
	done := make(chan error, 1)
	go func() {
		_, err := shim.Rollback(ctx, name)
		done <- err
	}()
	if step == "disks" {
		disks.await(b.id)
		return done
	}
	dir := vms.await(b.id)
	if step == "qemu" {
		files := watch(b.T, filepath.Join(s.Config.VMDir(), dir))
		for own, other := b.machines(); own == 0 || other == 0; own, other = b.machines() {
			files.await("") // the record is written anew
		}
	}
	return done
}

// nothingLeft sees that of a container nothing is left on the host but what containerd has of it.
func (b *box) nothingLeft() {
	b.Helper()
	left := func() (left []string) {
		for _, l := range append(s.VMLeaks(), stack.CgroupLeaks(b.id)...) {
			if strings.Contains(l, b.id) {
				left = append(left, l)
			}
		}
		disks, _ := filepath.Glob(filepath.Join(s.Config.DiskDir(), b.id+"*"))
		return append(left, disks...)
	}
	s.Eventually(b, 15*time.Second, "nothing left of "+b.id, func() bool { return len(left()) == 0 })
	if b.Failed() {
		b.Logf("left: %q", left())
	}
}

// TestKilledRollback: whatever is killed, and when, there is the old machine, the other one, or a death with nothing left.
func TestKilledRollback(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	var b *box
	n := 0 // what it has counted to
	for _, c := range []struct {
		victim, step string
		survives     bool
		long         bool
	}{
		{victim: "new", step: "qemu", survives: true},
		{victim: "old", step: "qemu"},
		{victim: "shim", step: "qemu"},
		{victim: "old", step: "machine", long: true},
		{victim: "shim", step: "machine", long: true},
		{victim: "old", step: "disks", long: true},
		{victim: "shim", step: "disks", long: true},
	} {
		if c.long && os.Getenv("CUBE_TEST_LONG") == "" {
			continue
		}
		name := c.victim + "-" + c.step
		if b == nil {
			b = newBox(t, client, ctx, name).run(ctx, "")
			b.counts(1)
			n = 1
		}
		saved, err := b.shim(ctx).Save(ctx, b.id+"-"+name, "")
		must(t, err)
		n++
		b.counts(n)
		old := s.PID(t, b.id)
		done := b.midway(ctx, saved, c.step)
		switch own, _ := b.machines(); {
		case c.victim == "shim":
			b.killShim()
		case c.victim == "old":
			must(t, unix.Kill(old, unix.SIGKILL))
		case own == old:
			t.Fatalf("%s: the record has only the old machine", name)
		default:
			must(t, unix.Kill(own, unix.SIGKILL))
		}
		err = <-done
		t.Logf("%s killed: %v", name, err)
		if c.survives {
			if err == nil || strings.Contains(err.Error(), "\n") || s.PID(t, b.id) != old {
				t.Errorf("%s: %v", name, err)
			}
			n++
			b.counts(n)
			continue
		}
		if err == nil {
			t.Errorf("%s: it was put back", name)
		}
		select {
		case status := <-b.ends:
			if status.ExitCode() == 0 {
				t.Errorf("%s: %v", name, status)
			}
		case <-time.After(s.Config.Timeout(15 * time.Second)):
			t.Fatalf("%s: no exit", name)
		}
		_, _ = b.task.Delete(ctx) // its shim may be gone
		b.task = nil
		b.nothingLeft()
		b = nil
	}
}

// TestKilledMachine: a save ends with the machine, and leaves nothing.
func TestKilledMachine(t *testing.T) {
	st := store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "dies").run(ctx, "")
	b.counts(1)
	shim, w := b.shim(ctx), watch(t, s.Config.SnapshotDir())
	done := make(chan error, 1)
	go func() {
		_, err := shim.Save(ctx, b.id, "")
		done <- err
	}()
	watch(t, filepath.Join(s.Config.SnapshotDir(), w.await(".tmp-"))).await("memory")
	must(t, unix.Kill(s.PID(t, b.id), unix.SIGKILL))
	if err := <-done; err == nil || strings.Contains(err.Error(), "\n") {
		t.Errorf("saved: %v", err)
	}
	if status := <-b.ends; status.ExitCode() != 137 {
		t.Errorf("it ended with %v", status)
	}
	_, err := b.task.Delete(ctx)
	must(t, err)
	b.task = nil
	b.nothingLeft()
	if left, err := st.HalfMade(); err != nil || len(left) > 0 {
		t.Errorf("half made, with nobody to sweep it: %v, %v", left, err)
	}
	if _, err := st.Inspect(b.id); !errdefs.IsNotFound(err) {
		t.Errorf("the snapshot: %v", err)
	}
}
