package record

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/process"
)

func newConfig(t *testing.T) *config.Config {
	t.Helper()
	cfg := config.Default()
	cfg.RunDir = t.TempDir()
	return cfg
}

func machineDir(t *testing.T, cfg *config.Config, name string) string {
	t.Helper()
	dir := filepath.Join(cfg.VMDir(), name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func isGone(dir string) bool {
	_, err := os.Lstat(dir)
	return errors.Is(err, fs.ErrNotExist)
}

// A crash between any two steps leaves a record that Cleanup can work with.
func TestCleanupAtEveryStep(t *testing.T) {
	cfg := newConfig(t)
	for name, steps := range map[string]func(dir string) error{
		"nothing yet":  func(string) error { return nil },
		"half-written": func(dir string) error { return os.WriteFile(filepath.Join(dir, ".vm.json"), []byte("{"), 0o600) },
		"begun":        func(dir string) error { _, err := New(context.Background(), dir, "x"); return err },
		"never acquired": func(dir string) error {
			r, err := New(context.Background(), dir, "x")
			if err != nil {
				return err
			}
			return r.Update(func(s *State) { s.UID, s.Cgroup = cfg.VM.UIDBase, "test-record-never" })
		},
		"no directory": os.RemoveAll,
	} {
		dir := machineDir(t, cfg, "m")
		if err := steps(dir); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := Cleanup(cfg, dir); err != nil || !isGone(dir) {
				t.Errorf("%s: %v, gone %v", name, err, isGone(dir))
			}
		}
	}
}

func TestCleanupKills(t *testing.T) {
	cfg := newConfig(t)
	dir := machineDir(t, cfg, "m")
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	id, err := process.Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	r, err := New(context.Background(), dir, "x")
	if err != nil {
		t.Fatal(err)
	}
	// A pid that another process has got by now is left alone.
	if err := r.Update(func(s *State) { s.QEMU = process.ID{PID: id.PID, Start: id.Start + 1} }); err != nil {
		t.Fatal(err)
	}
	if err := Cleanup(cfg, dir); err != nil || !id.Alive() {
		t.Fatalf("%v, alive %v", err, id.Alive())
	}
	machineDir(t, cfg, "m")
	if err := r.Update(func(s *State) { s.QEMU = id }); err != nil {
		t.Fatal(err)
	}
	if err := Cleanup(cfg, dir); err != nil || id.Alive() {
		t.Fatalf("%v, alive %v", err, id.Alive())
	}
}

func TestDamagedRecordIsKept(t *testing.T) {
	cfg := newConfig(t)
	dir := machineDir(t, cfg, "m")
	if err := os.WriteFile(filepath.Join(dir, file), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Cleanup(cfg, dir); err == nil || isGone(dir) {
		t.Fatalf("%v, gone %v: what the machine held is unknown", err, isGone(dir))
	}
}
