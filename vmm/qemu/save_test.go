package qemu_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/qemu"
)

// savePoints are the steps of a save.
var savePoints = []string{"prepared", "frozen", "stopped", "captured"}

// at has do called once, when a save of the machine comes to that point.
func at(t *testing.T, point string, do func()) {
	t.Helper()
	was := *qemu.Killpoint
	t.Cleanup(func() { *qemu.Killpoint = was })
	*qemu.Killpoint = func(p string, _ *qemu.Machine) {
		if p == point {
			*qemu.Killpoint = was
			do()
		}
	}
}

// calm is a guest without an agent that could be asked.
type calm struct{ frozen, thawn int }

func (c *calm) Freeze(context.Context) error { c.frozen++; return nil }
func (c *calm) Thaw(context.Context) error   { c.thawn++; return nil }

// saveable is a machine from the template that can be saved.
func saveable(t *testing.T, cfg *config.Config, id string) (*qemu.Machine, *testguest.Guest) {
	t.Helper()
	s := restoreSpec(t, cfg, id)
	d, err := memory.Digest(s.Memory, int64(shape.MemoryMiB)<<20)
	if err != nil {
		t.Fatal(err)
	}
	s.Base = &qemu.Base{File: s.Memory, Digests: d}
	s.Root = image(t, t.TempDir(), 8<<20)
	return start(t, cfg, s)
}

// Whatever step a save is called off at, the guest goes on, and can be saved the next time.
func TestSaveCalledOff(t *testing.T) {
	cfg := testguest.Config(t)
	m, g := saveable(t, cfg, "calledoff")
	for _, point := range savePoints[:3] { // after the last one it can't be called off any more
		ctx, cancel := context.WithTimeout(t.Context(), cfg.Timeout(20*time.Second))
		at(t, point, cancel)
		q := &calm{}
		_, err := m.Save(ctx, vmm.SaveRequest{Dir: t.TempDir(), Quiesce: q})
		if !errors.Is(err, context.Canceled) || q.frozen != q.thawn {
			t.Errorf("%s: frozen %d times, thawn %d, %v", point, q.frozen, q.thawn, err)
		}
		g.Must(t, cfg, "ping")
	}
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, vmm.MemoryFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx := within(t, cfg.Timeout(20*time.Second))
	if _, err := m.Save(ctx, vmm.SaveRequest{Dir: full, Quiesce: &calm{}}); !errors.Is(err, os.ErrExist) {
		t.Errorf("into a directory that isn't empty: %v", err)
	}
	fds := descriptors(t, m)
	saved, err := m.Save(ctx, vmm.SaveRequest{Dir: t.TempDir(), Quiesce: &calm{}})
	if err != nil {
		t.Fatal(err)
	}
	if now := descriptors(t, m); now != fds {
		t.Errorf("QEMU has %d descriptors, it had %d", now, fds)
	}
	t.Logf("%d pages written, %d bytes saved, stood still for %s", saved.Memory.Pages, saved.Memory.Bytes, saved.Stopped)
	g.Must(t, cfg, "ping")
	if err := m.AddDisk(ctx, vmm.Disk{Serial: "after", File: image(t, t.TempDir(), 1<<20)}); err != nil {
		t.Error(err)
	}
}

func descriptors(t *testing.T, m *qemu.Machine) int {
	t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", m.PID()))
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// Whatever step QEMU is killed at, the save ends at once and says so.
func TestSaveKilled(t *testing.T) {
	cfg := testguest.Config(t)
	for _, point := range savePoints {
		t.Run(point, func(t *testing.T) {
			m, _ := saveable(t, cfg, "killed-"+point)
			at(t, point, func() { _ = unix.Kill(m.PID(), unix.SIGKILL) })
			began := time.Now()
			_, err := m.Save(within(t, cfg.Timeout(20*time.Second)), vmm.SaveRequest{Dir: t.TempDir(), Quiesce: &calm{}})
			if !errors.Is(err, vmm.ErrGone) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v", err)
			}
			if d := time.Since(began); d > cfg.Timeout(5*time.Second) {
				t.Errorf("took %s", d)
			}
			if death := ended(t, m, cfg.Timeout(5*time.Second)); !death.Killed {
				t.Errorf("got %+v", death)
			}
		})
	}
}

func TestSaveNeedsABase(t *testing.T) {
	cfg := testguest.Config(t)
	m, _ := restored(t, cfg, "baseless")
	if _, err := m.Save(within(t, cfg.Timeout(5*time.Second)), vmm.SaveRequest{Dir: t.TempDir(), Quiesce: &calm{}}); err == nil || !strings.Contains(err.Error(), "of no snapshot") {
		t.Errorf("got %v", err)
	}
}

// A QEMU that doesn't answer doesn't keep a save from ending; and when it answers again, the guest runs.
func TestSaveOfAStuckQEMU(t *testing.T) {
	cfg := testguest.Config(t)
	cfg.TimeoutScale = 0.3
	m, g := saveable(t, cfg, "stuck")
	at(t, "frozen", func() { _ = unix.Kill(m.PID(), unix.SIGSTOP) })
	_, err := m.Save(t.Context(), vmm.SaveRequest{Dir: t.TempDir(), Quiesce: &calm{}})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if err := unix.Kill(m.PID(), unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	g.Must(t, cfg, "ping")
	if _, err := m.Save(t.Context(), vmm.SaveRequest{Dir: t.TempDir(), Quiesce: &calm{}}); err != nil {
		t.Error(err)
	}
}
