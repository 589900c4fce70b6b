package jail

import (
	"context"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cubesandbox/cube/vmm/cgroup"
)

// launcher is cube-jail, built from the tree.
func launcher(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	path := filepath.Join(t.TempDir(), "cube-jail")
	cmd := exec.Command("go", "build", "-o", path, "github.com/cubesandbox/cube/cmd/cube-jail")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build cube-jail: %v: %s", err, out)
	}
	return path
}

// command is a jailed program in a root that holds nothing else: the launcher itself, which in a jail only complains.
func command(t testing.TB, path string) (*Command, *os.File) {
	t.Helper()
	root := t.TempDir()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"proc", "dev"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "program"), b, 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	g, err := cgroup.Create(ctx, "jail-test-"+strconv.Itoa(os.Getpid()), cgroup.Limits{Memory: 64 << 20, PIDs: 50}, slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return &Command{Launcher: path, Name: "test", Root: root, Argv: []string{"/program"}, Output: w, UID: 1 << 20, Cgroup: g}, r
}

// run runs the command to its end and returns its output.
func (c *Command) run(t testing.TB, r *os.File) (output, status string) {
	t.Helper()
	p, err := c.Start(func(int) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	c.Output.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	return strings.TrimSpace(string(b)), p.Status()
}

// The program runs, has no standard input, and can't make a jail itself.
func TestStart(t *testing.T) {
	c, r := command(t, launcher(t))
	if out, status := c.run(t, r); !strings.Contains(out, "is started by cube, not by hand") || status != "exit status 1" {
		t.Errorf("%s: %q", status, out)
	}
}

func TestInsideFails(t *testing.T) {
	path := launcher(t)
	for name, tc := range map[string]struct {
		spoil func(*Command)
		want  string
	}{
		"no such program": {func(c *Command) { c.Argv[0] = "/missing" }, "execute /missing: no such file or directory"},
		"no mount points": {func(c *Command) { _ = os.Remove(filepath.Join(c.Root, "proc")) }, "change the root: mount /"},
		"no such root":    {func(c *Command) { c.Root = "/nonexistent" }, "change the root"},
		"root as uid":     {func(c *Command) { c.UID = 0 }, "not an unprivileged"},
	} {
		t.Run(name, func(t *testing.T) {
			c, r := command(t, path)
			tc.spoil(c)
			if out, status := c.run(t, r); !strings.Contains(out, tc.want) || status != "exit status 1" {
				t.Errorf("%s: %q, want %q", status, out, tc.want)
			}
		})
	}
}

// Nothing happens before the pid is recorded, and nothing after that failed.
func TestStartedFails(t *testing.T) {
	c, _ := command(t, launcher(t))
	var pid int
	_, err := c.Start(func(p int) error {
		pid = p
		return os.ErrPermission
	})
	if err == nil || syscall.Kill(pid, 0) == nil {
		t.Errorf("%v; process %d is alive: %v", err, pid, syscall.Kill(pid, 0))
	}
}

// A set-uid cube-jail must not give anyone root.
func TestSetUIDIsRefused(t *testing.T) {
	path := launcher(t)
	for mode := os.FileMode(0); mode <= 1; mode++ {
		bits := []os.FileMode{os.ModeSetuid, os.ModeSetgid}[mode]
		if err := os.Chmod(path, 0o755|bits); err != nil {
			t.Fatal(err)
		}
		for _, dir := range []string{filepath.Dir(path), filepath.Dir(filepath.Dir(path))} {
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command(path)
		cmd.Stdin = strings.NewReader(`{"parent":` + strconv.Itoa(os.Getpid()) + `,"root":"/srv","uid":65534,"argv":["/bin/sh"],"keep":2,"maxFiles":64}`)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "refused") {
			t.Errorf("%v: %v, %s", bits, err, out)
		}
	}
}

// BenchmarkJail is the whole cost of the jail: start to the program's first instruction, and its end.
func BenchmarkJail(b *testing.B) {
	path := launcher(b)
	c, r := command(b, path)
	go func() { _, _ = io.Copy(io.Discard, r) }()
	for b.Loop() {
		p, err := c.Start(func(int) error { return nil })
		if err != nil {
			b.Fatal(err)
		}
		<-p.Done()
	}
}

// BenchmarkNoJail is the same program without.
func BenchmarkNoJail(b *testing.B) {
	path := launcher(b)
	for b.Loop() {
		_ = exec.Command(path).Run()
	}
}
