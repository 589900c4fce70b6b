package snapshotter

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/testfs"
)

// fixture is a snapshotter on a file system of its own.
type fixture struct {
	*Snapshotter
	t   testing.TB
	ctx context.Context
	cfg *config.Config
	log *bytes.Buffer
}

// open opens the snapshotter of dir's file system. It is closed with the test.
func open(t testing.TB, dir string) *fixture {
	t.Helper()
	f := &fixture{t: t, ctx: context.Background(), cfg: testConfig(t, dir), log: new(bytes.Buffer)}
	s, err := New(f.cfg, slog.New(slog.NewTextHandler(f.log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	f.Snapshotter = s
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f *fixture) prepare(key, parent string, labels ...string) []mount.Mount {
	f.t.Helper()
	m, err := f.Prepare(f.ctx, key, parent, sizeOpt(labels...))
	if err != nil {
		f.t.Fatal(err)
	}
	return m
}

func sizeOpt(size ...string) snapshots.Opt {
	labels := map[string]string{}
	for _, s := range size {
		labels[SizeLabel] = s
	}
	return snapshots.WithLabels(labels)
}

// layer commits a snapshot with a file of n random bytes in it.
func (f *fixture) layer(name, parent string, n int64) {
	f.t.Helper()
	onHost(f.t, f.prepare(name+"-active", parent), func(dir string) { testfs.Random(f.t, filepath.Join(dir, name), n) })
	if err := f.Commit(f.ctx, name, name+"-active"); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) usage(key string) int64 {
	f.t.Helper()
	u, err := f.Usage(f.ctx, key)
	if err != nil {
		f.t.Fatal(err)
	}
	return u.Size
}

// files are the names in one of the snapshotter's directories.
func files(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// wantErr checks an error's class and that it says all of the parts, on one line.
func wantErr(t testing.TB, err error, class func(error) bool, parts ...string) {
	t.Helper()
	if err == nil || !class(err) {
		t.Fatalf("got %v", err)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("%q doesn't say %q", err, p)
		}
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("%q has more than one line", err)
	}
}

// onHost mounts an image as containerd does, and unmounts it after fn.
func onHost(t testing.TB, mounts []mount.Mount, fn func(dir string)) {
	t.Helper()
	dir := t.TempDir()
	if err := mount.All(mounts, dir); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	fn(dir)
}

func mark(t testing.TB, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := guestmark.Set(f); err != nil {
		t.Fatal(err)
	}
}

func TestGuestWritten(t *testing.T) {
	f := open(t, testfs.XFS(t, xfsSize))
	f.layer("image", "", 1<<20)
	m := f.prepare("container", "image")
	if m[0].Type != "ext4" {
		t.Fatalf("a fresh disk has type %s", m[0].Type)
	}
	mark(t, m[0].Source)

	m, err := f.Mounts(f.ctx, "container")
	if err != nil {
		t.Fatal(err)
	}
	if len(m) != 1 || m[0].Type != guestmark.MountType || m[0].Source == "" || m[0].Options[0] != "rw" {
		t.Fatalf("mounts %v", m)
	}
	if err := mount.All(m, t.TempDir()); err == nil {
		t.Fatal("the host mounts what a guest has written")
	}
	wantErr(t, f.Commit(f.ctx, "new", "container"), errdefs.IsFailedPrecondition, `commit snapshot "container"`, guestmark.Refusal)
	if _, err := f.Stat(f.ctx, "container"); err != nil {
		t.Errorf("after the refused commit: %v", err)
	}

	// A commit that an open file outlived: the image is a parent already when the guest writes it.
	mark(t, f.path("1"))
	_, err = f.Prepare(f.ctx, "next", "image")
	wantErr(t, err, errdefs.IsFailedPrecondition, "written by a guest")
	_, err = f.View(f.ctx, "next", "image")
	wantErr(t, err, errdefs.IsFailedPrecondition, "written by a guest")
}

func TestCommitWaitsForTheLastWriter(t *testing.T) {
	f := open(t, testfs.XFS(t, xfsSize))
	m := f.prepare("a", "")
	w, err := os.OpenFile(m[0].Source, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()

	f.cfg.TimeoutScale = 0.01
	wantErr(t, f.Commit(f.ctx, "c", "a"), errdefs.IsFailedPrecondition, "still in use", m[0].Source)
	f.cfg.TimeoutScale = 10
	done := make(chan error, 1)
	go func() { done <- f.Commit(f.ctx, "c", "a") }()
	select {
	case err := <-done:
		t.Fatalf("committed while it can be written: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	w.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestCommitRefuses(t *testing.T) {
	f := open(t, testfs.XFS(t, xfsSize))
	f.layer("image", "", 0)
	f.prepare("a", "")
	wantErr(t, f.Commit(f.ctx, "c", "a", snapshots.WithParent("image")), errdefs.IsFailedPrecondition, "another parent", "parallel")
	wantErr(t, f.Commit(f.ctx, "image", "a"), errdefs.IsAlreadyExists)
	wantErr(t, f.Commit(f.ctx, "c", "none"), errdefs.IsNotFound)
	if _, err := f.View(f.ctx, "v", "image"); err != nil {
		t.Fatal(err)
	}
	wantErr(t, f.Commit(f.ctx, "c", "v"), errdefs.IsFailedPrecondition, "not active")
	_, err := f.Mounts(f.ctx, "image")
	wantErr(t, err, errdefs.IsFailedPrecondition, "is committed")
}

// TestWarnsOnceOfCopies is the host without reflinks.
func TestWarnsOnceOfCopies(t *testing.T) {
	f := open(t, testfs.Ext4(t, 256<<20))
	f.layer("image", "", 1<<20)
	for _, key := range []string{"a", "b", "c"} {
		f.prepare(key, "image")
	}
	if n := strings.Count(f.log.String(), "level=WARN"); n != 1 || !strings.Contains(f.log.String(), "full copy") {
		t.Fatalf("%d warnings: %s", n, f.log)
	}
}

func TestCleanup(t *testing.T) {
	f := open(t, testfs.XFS(t, xfsSize))
	f.layer("image", "", 1<<20)
	f.prepare("container", "image")
	if _, err := f.View(f.ctx, "view", "image"); err != nil {
		t.Fatal(err)
	}
	if got := files(t, f.images); len(got) != 2 {
		t.Fatalf("images %v", got)
	}
	wantErr(t, f.Remove(f.ctx, "image"), errdefs.IsFailedPrecondition)
	for _, key := range []string{"view", "container", "image"} {
		if err := f.Remove(f.ctx, key); err != nil {
			t.Fatal(err)
		}
	}
	wantErr(t, f.Remove(f.ctx, "image"), errdefs.IsNotFound)
	if err := f.Cleanup(f.ctx); err != nil {
		t.Fatal(err)
	}
	if got := append(files(t, f.images), files(t, f.tmp)...); len(got) != 0 {
		t.Fatalf("left %v", got)
	}
}

// TestOneOwner: a second snapshotter on the directory is refused, and the first isn't disturbed.
func TestOneOwner(t *testing.T) {
	f := open(t, testfs.XFS(t, xfsSize))
	busy := filepath.Join(f.tmp, "new-busy")
	if err := os.WriteFile(busy, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := *f.cfg
	cfg.TimeoutScale = 0.1
	_, err := New(&cfg, slog.New(slog.DiscardHandler))
	wantErr(t, err, func(error) bool { return true }, "another process uses "+f.cfg.SnapshotterDir(), "cube down")
	if _, err := os.Stat(busy); err != nil {
		t.Errorf("the refused one cleaned up: %v", err)
	}
	f.prepare("a", "")
}

func TestClosed(t *testing.T) {
	f := open(t, testfs.Ext4(t, 256<<20))
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.Cleanup(f.ctx); err == nil {
		t.Fatal("Cleanup after Close succeeds")
	}
	if _, err := f.Prepare(f.ctx, "a", ""); err == nil {
		t.Fatal("Prepare after Close succeeds")
	}
}
