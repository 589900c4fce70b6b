package qemu_test

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/tsc"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/cgroup"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/qemu"
	"github.com/cubesandbox/cube/vmm/record"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(ownerEnv); dir != "" {
		os.Exit(owner(dir))
	}
	code := m.Run()
	testguest.Remove()
	if template.state != nil {
		_ = os.Remove(template.state.Name())
	}
	os.Exit(code)
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// gone is a context that is over: Stop doesn't wait for the guest.
func gone() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func open(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// image makes an empty raw image.
func image(t testing.TB, dir string, size int64) *os.File {
	t.Helper()
	f, err := os.CreateTemp(dir, "image-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f
}

// shape of all machines here: one with much that its kernel leaves free.
var shape = vmm.Shape{VCPUs: 1, MemoryMiB: 512}

// spec is a machine without a guest yet.
func spec(t testing.TB, cfg *config.Config, id string) *qemu.Spec {
	t.Helper()
	dir := filepath.Join(cfg.VMDir(), id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return &qemu.Spec{
		ID:      id,
		Dir:     dir,
		QEMU:    cfg.QEMUDir(),
		Shape:   shape,
		Accel:   accel.TCG,
		Modules: open(t, filepath.Join(cfg.GuestDir(), "modules.img")),
	}
}

// bootSpec is a machine that boots.
func bootSpec(t testing.TB, cfg *config.Config, id string) *qemu.Spec {
	t.Helper()
	khz, err := tsc.KHz()
	if err != nil {
		t.Fatal(err)
	}
	s := spec(t, cfg, id)
	s.Share = true
	if s.Memory, err = memory.Scratch(int64(shape.MemoryMiB) << 20); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Memory.Close() })
	s.Boot = &qemu.Boot{
		Kernel: open(t, filepath.Join(cfg.GuestDir(), "vmlinuz")),
		Initrd: open(t, filepath.Join(cfg.GuestDir(), "initrd.img")),
		TSCKHz: khz,
	}
	return s
}

// template is a saved machine that most tests restore; booting takes long.
var template struct {
	once          sync.Once
	memory, state *os.File
}

// restoreSpec is a machine that is restored from the template.
func restoreSpec(t testing.TB, cfg *config.Config, id string) *qemu.Spec {
	t.Helper()
	template.once.Do(func() { makeTemplate(t, cfg) })
	if template.state == nil {
		t.Fatal("there is no template: booting has failed")
	}
	s := spec(t, cfg, id)
	s.Memory = template.memory
	s.State = open(t, template.state.Name())
	return s
}

func makeTemplate(t testing.TB, cfg *config.Config) {
	t.Helper()
	s := bootSpec(t, cfg, "template")
	m, g := start(t, cfg, s)
	for command, want := range map[string]string{"cpus": "1", "nics": "2", "disk modules": ""} {
		if got := g.Must(t, cfg, "%s", command); want != "" && got != want {
			t.Errorf("%s: %s, want %s", command, got, want)
		}
	}
	f, err := os.CreateTemp("", "cube-test-state-*")
	if err != nil {
		t.Fatal(err)
	}
	w, err := os.OpenFile(f.Name(), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := m.SaveState(within(t, cfg.Timeout(10*time.Second)), w); err != nil {
		t.Fatal(err)
	}
	if err := m.Stop(gone()); err != nil {
		t.Fatal(err)
	}
	if template.memory, _, err = memory.Seal(s.Memory, int64(shape.MemoryMiB)<<20); err != nil {
		t.Fatal(err)
	}
	template.state = f
}

// start starts the machine and makes sure that in the end nothing of it is left.
func start(t testing.TB, cfg *config.Config, s *qemu.Spec) (*qemu.Machine, *testguest.Guest) {
	t.Helper()
	began := time.Now()
	m, err := qemu.NewDriver(cfg, slog.Default()).Start(within(t, cfg.Timeout(60*time.Second)), s)
	if err != nil {
		t.Fatal(err)
	}
	held, err := record.Read(s.Dir)
	if err != nil {
		t.Error(err)
	}
	t.Cleanup(func() {
		if err := m.Stop(gone()); err != nil {
			t.Errorf("stop: %v", err)
		}
		nothingLeft(t, cfg, s.Dir, held)
		if t.Failed() {
			t.Logf("console:\n%s", m.Console())
		}
	})
	g := testguest.Talk(m.Agent())
	started := time.Since(began)
	g.Must(t, cfg, "ping")
	t.Logf("%s: started in %s, first answer after %s", s.ID, started, time.Since(began))
	return m, g
}

// restored is start for a machine from the template.
func restored(t testing.TB, cfg *config.Config, id string) (*qemu.Machine, *testguest.Guest) {
	t.Helper()
	return start(t, cfg, restoreSpec(t, cfg, id))
}

// nothingLeft checks that what a machine held is free.
func nothingLeft(t testing.TB, cfg *config.Config, dir string, held record.State) {
	t.Helper()
	if held.QEMU.PID == 0 || held.UID == 0 || held.Cgroup == "" {
		t.Errorf("incomplete record %+v", held)
	}
	if held.QEMU.Alive() {
		t.Errorf("QEMU, process %d, is left", held.QEMU.PID)
	}
	if cgroup.Exists(held.Cgroup) {
		t.Errorf("cgroup %s is left", held.Cgroup)
	}
	for _, path := range []string{dir, filepath.Join(cfg.RunDir, "uids", strconv.Itoa(int(held.UID)))} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left (%v)", path, err)
		}
	}
}

// ended waits for a machine's end and returns the reason.
func ended(t testing.TB, m *qemu.Machine, limit time.Duration) *vmm.DeathError {
	t.Helper()
	select {
	case <-m.Done():
	case <-time.After(limit):
		t.Fatalf("the machine has not ended within %s", limit)
	}
	var death *vmm.DeathError
	if !errors.As(m.Err(), &death) || !errors.Is(m.Err(), vmm.ErrGone) {
		t.Fatalf("got %v, want a DeathError", m.Err())
	}
	return death
}

func mustAtoi(t testing.TB, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
