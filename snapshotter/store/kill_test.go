package store

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
)

// The environment that makes the test binary a process that is killed while it makes the store.
const (
	killAt  = "CUBE_TEST_KILL_AT"
	killDir = "CUBE_TEST_KILL_DIR"
)

func killHere() {
	point := os.Getenv(killAt)
	if point == "" {
		return
	}
	killpoint = func(p string) {
		if p == point {
			unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}
	cfg := config.Default()
	cfg.StateDir = os.Getenv(killDir)
	cfg.Store.Size = units.GiB
	_, err := Ensure(context.Background(), cfg, slog.Default())
	slog.Error("not killed", "err", err)
	os.Exit(1)
}

func TestKilled(t *testing.T) {
	for _, at := range []string{"allocated", "formatted", "renamed", "mounted"} {
		t.Run(at, func(t *testing.T) {
			h := ext4Host(t, units.GiB)
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), killAt+"="+at, killDir+"="+h.cfg.StateDir)
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("not killed: %v: %s", err, out)
			}
			h.up()
			if s := h.status(); !s.Ready || s.Size < 800*units.MiB {
				t.Errorf("%+v", s)
			}
			if _, err := os.Stat(h.cfg.StoreImage() + ".tmp"); err == nil {
				t.Error("the half-made image is left")
			}
		})
	}
}
