package snapshotter

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/testfs"
	"github.com/cubesandbox/cube/snapshotter/image"
)

// The environment that makes the test binary a process that is killed at a point of an operation.
const (
	killAt   = "CUBE_TEST_KILL_AT"
	killWhat = "CUBE_TEST_KILL_WHAT"
	killDir  = "CUBE_TEST_KILL_DIR"
)

// killHere does one operation and is killed in it, if the environment says so. It then doesn't return.
func killHere() {
	point := os.Getenv(killAt)
	if point == "" {
		return
	}
	cfg := config.Default()
	cfg.StateDir = os.Getenv(killDir)
	s, err := New(cfg, slog.Default())
	if err != nil {
		slog.Error("open", "err", err)
		os.Exit(1)
	}
	killpoint = func(p string) {
		if p == point {
			unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}
	if err := operations[os.Getenv(killWhat)](context.Background(), s); err != nil {
		slog.Error("operation", "err", err)
	}
	os.Exit(1) // it should have been killed
}

// operations are what is killed. There are the committed snapshots base and, over it, old and the active one ready.
var operations = map[string]func(context.Context, *Snapshotter) error{
	"prepare": func(ctx context.Context, s *Snapshotter) error {
		_, err := s.Prepare(ctx, "new", "base")
		return err
	},
	"prepare empty": func(ctx context.Context, s *Snapshotter) error {
		_, err := s.Prepare(ctx, "new", "")
		return err
	},
	"commit": func(ctx context.Context, s *Snapshotter) error { return s.Commit(ctx, "new", "ready") },
	"remove": func(ctx context.Context, s *Snapshotter) error {
		if err := s.Remove(ctx, "old"); err != nil {
			return err
		}
		return s.Cleanup(ctx)
	},
}

func TestKilled(t *testing.T) {
	for _, tc := range []struct {
		what, at string
		there    []string // the keys afterwards, besides base
	}{
		{"prepare", "created", []string{"old", "ready"}},
		{"prepare", "filled", []string{"old", "ready"}},
		{"prepare", "renamed", []string{"old", "ready"}},
		{"prepare", "registered", []string{"new", "old", "ready"}},
		{"prepare empty", "created", []string{"old", "ready"}},
		{"prepare empty", "filled", []string{"old", "ready"}},
		{"prepare empty", "renamed", []string{"old", "ready"}},
		{"prepare empty", "registered", []string{"new", "old", "ready"}},
		{"commit", "synced", []string{"old", "ready"}},
		{"commit", "committed", []string{"new", "old"}},
		{"remove", "forgotten", []string{"ready"}},
		{"remove", "trashed", []string{"ready"}},
	} {
		t.Run(strings.ReplaceAll(tc.what, " ", "-")+"/"+tc.at, func(t *testing.T) {
			dir := testfs.XFS(t, 512<<20)
			f := open(t, dir)
			f.layer("base", "", 1<<20)
			f.layer("old", "base", 1<<20)
			onHost(t, f.prepare("ready", "base"), func(dir string) { testfs.Random(t, filepath.Join(dir, "ready"), 1<<20) })
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			kill(t, dir, tc.what, tc.at)

			f = open(t, dir)
			f.check(append(tc.there, "base"))
			// Whatever happened, the operation can be done again, and everything removed.
			if err := f.Remove(f.ctx, "new"); err != nil && f.has("new") {
				t.Fatal(err)
			}
			f.prepare("again", "base")
			for _, key := range []string{"again", "ready", "old", "base"} {
				if err := f.Remove(f.ctx, key); err != nil && f.has(key) {
					t.Errorf("remove %s: %v", key, err)
				}
			}
			if err := f.Cleanup(f.ctx); err != nil {
				t.Fatal(err)
			}
			f.check(nil)
		})
	}
}

// kill runs an operation in a process that is killed at the point.
func kill(t *testing.T, dir, what, at string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), killDir+"="+dir, killWhat+"="+what, killAt+"="+at)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("%s was not killed at %s: %v: %s", what, at, err, out)
	}
}

func (f *fixture) has(key string) bool {
	_, err := f.Stat(f.ctx, key)
	return err == nil
}

// check makes sure that there are exactly these snapshots, each with an image that is whole, and no other files.
func (f *fixture) check(keys []string) {
	f.t.Helper()
	want := map[string]bool{}
	for _, key := range keys {
		r, err := f.lookup(f.ctx, key)
		if err != nil {
			f.t.Errorf("%s: %v", key, err)
			continue
		}
		want[r.id+imageExt] = true
		img, err := f.Snapshotter.open(r.id)
		if err != nil {
			f.t.Errorf("%s: %v", key, err)
			continue
		}
		if err := image.CheckClean(img); err != nil {
			f.t.Errorf("%s: %v", key, err)
		}
		img.Close()
		onHost(f.t, []mount.Mount{{Type: "ext4", Source: f.path(r.id), Options: []string{"ro", "loop"}}}, func(dir string) {
			if _, err := os.Stat(filepath.Join(dir, "base")); r.parentID != "" && err != nil {
				f.t.Errorf("%s lacks its parent's file: %v", key, err)
			}
		})
	}
	for _, name := range files(f.t, f.images) {
		if !want[name] {
			f.t.Errorf("image %s is nobody's", name)
		}
	}
	if left := files(f.t, f.tmp); len(left) != 0 {
		f.t.Errorf("left %v", left)
	}
}

// TestPowerCut: what was answered is on disk.
func TestPowerCut(t *testing.T) {
	for name, dir := range map[string]string{"xfs": testfs.XFS(t, 512<<20), "ext4": testfs.Ext4(t, 512<<20)} {
		t.Run(name, func(t *testing.T) {
			f := open(t, dir)
			f.layer("base", "", 1<<20)
			sum := f.checksum("base", "base")
			f.prepare("container", "base")
			f.prepare("gone", "base")
			if err := f.Remove(f.ctx, "gone"); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			testfs.PowerCut(t, dir)
			f = open(t, dir)
			f.check([]string{"base", "container"})
			for _, key := range []string{"base", "container"} {
				if got := f.checksum(key, "base"); got != sum {
					t.Errorf("%s has another content", key)
				}
			}
		})
	}
}

// checksum is that of a file in the snapshot.
func (f *fixture) checksum(key, file string) (sum string) {
	f.t.Helper()
	r, err := f.lookup(f.ctx, key)
	if err != nil {
		f.t.Fatal(err)
	}
	onHost(f.t, []mount.Mount{{Type: "ext4", Source: f.path(r.id), Options: []string{"ro", "loop"}}}, func(dir string) {
		out, err := exec.Command("sha256sum", filepath.Join(dir, file)).Output()
		if err != nil {
			f.t.Fatal(err)
		}
		sum, _, _ = strings.Cut(string(out), " ")
	})
	return sum
}

// TestSweep is what can't come from being killed: files from elsewhere, and an image that somebody deleted.
func TestSweep(t *testing.T) {
	dir := testfs.XFS(t, 512<<20)
	f := open(t, dir)
	f.layer("base", "", 1<<20)
	f.prepare("container", "base")
	r, err := f.lookup(f.ctx, "base")
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{f.path("999"), filepath.Join(f.images, "core"), filepath.Join(f.tmp, "new-123")} {
		if err := os.WriteFile(name, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(f.path(r.id)); err != nil {
		t.Fatal(err)
	}
	f = open(t, dir)
	f.check([]string{"container"})
	if log := f.log.String(); !strings.Contains(log, "snapshot=base") || !strings.Contains(log, "is gone") {
		t.Errorf("the log says %q", log)
	}
	notFound := func(error) bool { return true }
	_, err = f.Prepare(f.ctx, "another", "base")
	wantErr(t, err, notFound, `prepare snapshot "another"`, f.path(r.id), "pull the image again")
	_, err = f.View(f.ctx, "another", "base")
	wantErr(t, err, notFound, "is gone")
	_, err = f.Usage(f.ctx, "container")
	wantErr(t, err, notFound, "is gone")
	for _, key := range []string{"container", "base"} {
		if err := f.Remove(f.ctx, key); err != nil {
			t.Fatal(err)
		}
	}
}
