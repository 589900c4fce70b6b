// Package testguest is a real guest for the VM layer's tests: the installed kernel and initramfs with a PID 1 of its own,
// so that a test needs neither the agent nor a container. Tests skip where nothing is installed.
package testguest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cavaliergopher/cpio"

	"github.com/cubesandbox/cube/internal/config"
)

// answerTimeout is how long the guest may take for a line, on a host at scale 1.
const answerTimeout = 60 * time.Second

var built struct {
	sync.Once
	dir string
	err error
}

// Config is a configuration with directories of the test's own, the installed QEMU, a cube-jail built from the tree, and
// a guest image with the test's PID 1. It skips the test where that isn't possible.
func Config(t testing.TB) *config.Config {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	host, err := config.Load("")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{host.QEMUDir(), filepath.Join(host.GuestDir(), "vmlinuz")} {
		if _, err := os.Stat(f); err != nil {
			t.Skipf("needs the set-up's artefacts (make build): %v", err)
		}
	}
	built.Do(func() { built.dir, built.err = build(host) })
	if built.err != nil {
		t.Fatal(built.err)
	}
	dir := t.TempDir()
	cfg := *host
	cfg.StateDir = filepath.Join(dir, "state")
	cfg.RunDir = filepath.Join(dir, "run")
	cfg.BinDir = built.dir
	cfg.Artefacts = built.dir
	for _, d := range []string{cfg.StateDir, cfg.VMDir()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return &cfg
}

// Remove deletes what Config has built. For TestMain, after the tests.
func Remove() {
	if built.dir != "" {
		_ = os.RemoveAll(built.dir)
	}
}

// build makes a directory with cube-jail and artefacts.
func build(host *config.Config) (dir string, err error) {
	if dir, err = os.MkdirTemp("", "cube-testguest-"); err != nil {
		return "", err
	}
	for out, pkg := range map[string]string{
		"cube-jail": "github.com/cubesandbox/cube/cmd/cube-jail",
		"init":      "github.com/cubesandbox/cube/vmm/internal/testguest/init",
	} {
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(dir, out), pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build %s: %w: %s", pkg, err, out)
		}
	}
	guest := filepath.Join(dir, "guest", "test")
	if err := errors.Join(
		os.MkdirAll(guest, 0o755),
		os.Symlink("test", filepath.Join(dir, "guest", "current")),
		os.Symlink(filepath.Dir(host.QEMUDir()), filepath.Join(dir, "qemu")),
		os.Symlink(filepath.Join(host.GuestDir(), "vmlinuz"), filepath.Join(guest, "vmlinuz")),
		os.Symlink(filepath.Join(host.GuestDir(), "modules.img"), filepath.Join(guest, "modules.img")),
	); err != nil {
		return "", err
	}
	return dir, initramfs(filepath.Join(guest, "initrd.img"), filepath.Join(host.GuestDir(), "initrd.img"), filepath.Join(dir, "init"))
}

// initramfs appends an archive with another /init; of two files of a name the kernel keeps the later.
func initramfs(path, base, init string) (err error) {
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	in, err := os.Open(base)
	if err != nil {
		return err
	}
	defer in.Close()
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	b, err := os.ReadFile(init)
	if err != nil {
		return err
	}
	w := cpio.NewWriter(out)
	if err := w.WriteHeader(&cpio.Header{Name: "init", Mode: cpio.TypeReg | 0o755, Size: int64(len(b))}); err != nil {
		return err
	}
	if _, err := w.Write(b); err != nil {
		return err
	}
	return w.Close()
}

// Guest talks to the PID 1 behind an agent channel.
type Guest struct {
	conn net.Conn
	r    *bufio.Reader
	n    int
}

// Talk takes the channel over.
func Talk(conn net.Conn) *Guest { return &Guest{conn: conn, r: bufio.NewReader(conn)} }

// Do gives a command and returns the answer.
func (g *Guest) Do(cfg *config.Config, format string, args ...any) (string, error) {
	g.n++
	if err := g.conn.SetDeadline(time.Now().Add(cfg.Timeout(answerTimeout))); err != nil {
		return "", err
	}
	line := fmt.Sprintf(format, args...)
	if _, err := fmt.Fprintf(g.conn, "%d %s\n", g.n, line); err != nil {
		return "", fmt.Errorf("%s: %w", line, err)
	}
	for {
		answer, err := g.r.ReadString('\n')
		if err != nil {
			return "", fmt.Errorf("%s: %w", line, err)
		}
		if rest, ok := strings.CutPrefix(answer, fmt.Sprintf("%d ", g.n)); ok {
			verdict, text, _ := strings.Cut(strings.TrimSuffix(rest, "\n"), " ")
			if verdict != "ok" {
				return "", fmt.Errorf("%s: the guest says: %s", line, text)
			}
			return text, nil
		}
	}
}

// Must is Do for a test that can't go on without.
func (g *Guest) Must(t testing.TB, cfg *config.Config, format string, args ...any) string {
	t.Helper()
	s, err := g.Do(cfg, format, args...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
