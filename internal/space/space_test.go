package space

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/testfs"
)

func TestMain(m *testing.M) { testfs.Main(m) }

func TestCheck(t *testing.T) {
	cfg := config.Default()
	cfg.StateDir = testfs.XFS(t, 300<<20)
	cfg.Store.HighWatermark = 50
	if err := os.Mkdir(cfg.StoreDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Check(cfg); err != nil {
		t.Error(err)
	}
	f, err := os.Create(filepath.Join(cfg.StoreDir(), "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, 160<<20); err != nil {
		t.Fatal(err)
	}
	err = Check(cfg)
	if !errdefs.IsResourceExhausted(err) || strings.Contains(err.Error(), "\n") {
		t.Fatal(err)
	}
	for _, want := range []string{cfg.StoreDir(), "store.high_watermark = 50", "cube df", "cube prune"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q doesn't say %q", err, want)
		}
	}
	if err := f.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if err := Check(cfg); err != nil {
		t.Error(err)
	}
	if err := errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, 160<<20), f.Close(), os.Remove(f.Name())); err != nil {
		t.Fatal(err)
	}
	Settle(cfg.StoreDir())
	if err := Check(cfg); err != nil {
		t.Errorf("what was removed isn't free: %v", err)
	}
	cfg.StateDir = filepath.Join(cfg.StateDir, "none")
	if err := Check(cfg); err != nil {
		t.Error(err)
	}
}
