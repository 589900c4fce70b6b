package qemu_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/tsc"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/qemu"
)

func TestMain(m *testing.M) {
	code := m.Run()
	testguest.Remove()
	os.Exit(code)
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
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

// sparse makes an empty image.
func sparse(t testing.TB, size int64) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "image-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f
}

// spec is a machine that boots.
func spec(t testing.TB, cfg *config.Config, id string) *qemu.Spec {
	t.Helper()
	khz, err := tsc.KHz()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cfg.VMDir(), id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	scratch, err := memory.Scratch(256 << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { scratch.Close() })
	guest := cfg.GuestDir()
	return &qemu.Spec{
		ID:      id,
		Dir:     dir,
		QEMU:    cfg.QEMUDir(),
		Shape:   vmm.Shape{VCPUs: 1, MemoryMiB: 256},
		Accel:   accel.TCG,
		Memory:  scratch,
		Share:   true,
		Modules: open(t, filepath.Join(guest, "modules.img")),
		Boot: &qemu.Boot{
			Kernel: open(t, filepath.Join(guest, "vmlinuz")),
			Initrd: open(t, filepath.Join(guest, "initrd.img")),
			TSCKHz: khz,
		},
	}
}

func start(t testing.TB, cfg *config.Config, s *qemu.Spec) (*qemu.Machine, *testguest.Guest) {
	t.Helper()
	began := time.Now()
	m, err := qemu.NewDriver(cfg, slog.Default()).Start(within(t, cfg.Timeout(30*time.Second)), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := m.Stop(ctx); err != nil {
			t.Errorf("stop: %v", err)
		}
		if t.Failed() {
			t.Logf("console:\n%s", m.Console())
		}
	})
	g := testguest.Talk(m.Agent())
	started := time.Since(began)
	g.Must(t, cfg, "ping")
	t.Logf("QEMU started in %s, first answer after %s", started, time.Since(began))
	return m, g
}

func TestBoot(t *testing.T) {
	cfg := testguest.Config(t)
	m, g := start(t, cfg, spec(t, cfg, "boot"))
	t.Log(g.Must(t, cfg, "memory"), g.Must(t, cfg, "disk modules"), g.Must(t, cfg, "cpus"), g.Must(t, cfg, "nics"))
	t.Logf("%s", m.Console())
}

func mustAtoi(t testing.TB, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
