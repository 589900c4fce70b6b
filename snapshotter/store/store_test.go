package store

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/reflink"
	"github.com/cubesandbox/cube/internal/testfs"
)

func TestMain(m *testing.M) {
	killHere()
	testfs.Main(m)
}

// host is a machine's state directory.
type host struct {
	t   *testing.T
	cfg *config.Config
	log bytes.Buffer
}

func newHost(t *testing.T, stateDir string, size int64) *host {
	cfg := config.Default()
	cfg.StateDir = stateDir
	cfg.Store.Size = config.Size(size)
	return &host{t: t, cfg: cfg}
}

// ext4Host has a state directory of 4 GiB that can't reflink, as most hosts do.
func ext4Host(t *testing.T, size int64) *host { return newHost(t, testfs.Ext4(t, 4*units.GiB), size) }

func (h *host) ensure() (*Store, error) {
	return Ensure(context.Background(), h.cfg, slog.New(slog.NewTextHandler(&h.log, nil)))
}

// up makes the store and releases it with the test.
func (h *host) up() *Store {
	h.t.Helper()
	s, err := h.ensure()
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		if err := s.Release(); err != nil {
			h.t.Error(err)
		}
	})
	return s
}

// fails checks that the store can't be made, why, and that nothing is left mounted or attached.
func (h *host) fails(parts ...string) {
	h.t.Helper()
	before := attached(h.t)
	_, err := h.ensure()
	wantErr(h.t, err, parts...)
	if after := attached(h.t); after != before {
		h.t.Errorf("loop devices: %s, before %s", after, before)
	}
	if left, err := os.Stat(h.cfg.StoreImage() + ".tmp"); err == nil {
		h.t.Errorf("left %s of %d bytes", left.Name(), left.Size())
	}
}

func wantErr(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
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

func (h *host) status() Status {
	h.t.Helper()
	s, err := Inspect(h.cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	return s
}

// attached are the loop devices with this process's images.
func attached(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	var ours []string
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), strings.ReplaceAll(t.Name(), "/", "_")) {
			ours = append(ours, f+"="+strings.TrimSpace(string(b)))
		}
	}
	return strings.Join(ours, " ")
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func allocated(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

func TestDirectory(t *testing.T) {
	h := newHost(t, testfs.XFS(t, units.GiB), 16*units.GiB)
	if s := h.status(); s.Kind != Directory || s.Ready || !s.Reflink {
		t.Errorf("before: %+v", s)
	}
	h.up()
	h.up()
	if s := h.status(); s.Kind != Directory || !s.Ready || !s.Reflink || s.Size < 900*units.MiB || s.Free <= 0 {
		t.Errorf("after: %+v", s)
	}
	if st, err := os.Stat(h.cfg.StoreDir()); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v, %v", st.Mode(), err)
	}
	if _, err := os.Stat(h.cfg.StoreImage()); err == nil {
		t.Error("there is an image that nobody needs")
	}
}

func TestImage(t *testing.T) {
	h := ext4Host(t, units.GiB)
	if s := h.status(); s.Kind != Image || s.Ready || !s.Reflink {
		t.Errorf("before: %+v", s)
	}
	s := h.up()
	if s := h.status(); s.Kind != Image || !s.Ready || s.Image != h.cfg.StoreImage() || s.Size > units.GiB || s.Size < 800*units.MiB {
		t.Errorf("after: %+v", s)
	}
	dir := h.cfg.StoreDir()
	if ok, err := reflink.Possible(dir); err != nil || !ok {
		t.Fatalf("reflinks: %v, %v", ok, err)
	}
	// One store: files of different directories share blocks.
	for _, sub := range []string{"base", "snapshotter"} {
		write(t, filepath.Join(dir, sub, "file"), strings.Repeat("x", 4096))
	}
	if out, err := exec.Command("cp", "--reflink=always", filepath.Join(dir, "base/file"), filepath.Join(dir, "snapshotter/clone")).CombinedOutput(); err != nil {
		t.Errorf("cp: %v: %s", err, out)
	}
	if n := allocated(t, h.cfg.StoreImage()); n < units.GiB {
		t.Errorf("%d bytes are allocated", n)
	}
	// Deleting gives room to the store, not to the host.
	testfs.Random(t, filepath.Join(dir, "big"), 100<<20)
	if err := os.Remove(filepath.Join(dir, "big")); err != nil {
		t.Fatal(err)
	}
	unix.Sync()
	if n := allocated(t, h.cfg.StoreImage()); n < units.GiB {
		t.Errorf("%d bytes are allocated after deleting", n)
	}

	h.up() // idempotent
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}
	if err := s.Release(); err != nil {
		t.Errorf("second release: %v", err)
	}
	if a := attached(t); strings.Contains(a, "store.xfs") {
		t.Errorf("still attached: %s", a)
	}
	if s := h.status(); s.Kind != Image || s.Ready {
		t.Errorf("released: %+v", s)
	}
	h.up()
	if _, err := os.Stat(filepath.Join(dir, "base/file")); err != nil {
		t.Error(err)
	}
	if h.log.Len() > 0 {
		t.Errorf("log: %s", h.log.String())
	}
}

// TestFillsHoles: an fstrim of all file systems makes the image sparse; the next start allocates it again.
func TestFillsHoles(t *testing.T) {
	h := ext4Host(t, units.GiB)
	s := h.up()
	if out, err := exec.Command("fstrim", h.cfg.StoreDir()).CombinedOutput(); err != nil {
		t.Skipf("this kernel's loop devices don't discard: %s", out)
	}
	if n := allocated(t, h.cfg.StoreImage()); n >= units.GiB {
		t.Fatalf("fstrim left %d bytes", n)
	}
	if err := s.Release(); err != nil { // which waits for discards under way
		t.Fatal(err)
	}
	h.up()
	if n := allocated(t, h.cfg.StoreImage()); n < units.GiB {
		t.Errorf("%d bytes are allocated", n)
	}
}

func TestSizes(t *testing.T) {
	for _, tc := range []struct {
		size config.Size
		free int64
		want int64
		err  string
	}{
		{size: units.GiB, free: 10 * units.GiB, want: units.GiB},
		{size: 16 * units.GiB, free: 100 * units.GiB, want: 16 * units.GiB},
		{size: 16 * units.GiB, free: 16 * units.GiB, want: 8 * units.GiB},
		{size: 16 * units.GiB, free: 2 * units.GiB, want: units.GiB},
		{size: 16 * units.GiB, free: units.GiB, err: "make room"},
		{size: 5 * units.GiB, free: 5 * units.GiB, err: "a store of 5GiB doesn't fit"},
		{size: 512 * units.MiB, free: 5 * units.GiB, err: "at least 1GiB"},
	} {
		cfg := config.Default()
		cfg.Store.Size = tc.size
		got, err := imageSize(cfg, tc.free)
		if tc.err != "" {
			wantErr(t, err, tc.err, "store.size")
		} else if err != nil || got != tc.want {
			t.Errorf("%s of %d: %d, %v", tc.size, tc.free, got, err)
		}
	}
}

func TestDefaultShrinks(t *testing.T) {
	h := ext4Host(t, int64(config.Default().Store.Size))
	s := h.up()
	first := h.status()
	if first.Size < units.GiB || first.Size > 2*units.GiB || !strings.Contains(h.log.String(), "store.size") {
		t.Errorf("%+v, log %s", first, h.log.String())
	}
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}
	h.log.Reset()
	h.up()
	if again := h.status(); again.Size != first.Size || h.log.Len() > 0 {
		t.Errorf("second start: %+v, log %s", again, h.log.String())
	}
}

func TestTooLarge(t *testing.T) {
	h := ext4Host(t, 5*units.GiB)
	h.fails("a store of 5GiB doesn't fit", h.cfg.StateDir, "store.size")
	if _, err := Inspect(h.cfg); err == nil {
		t.Error("Inspect doesn't see it")
	}
}

func TestWithoutImage(t *testing.T) {
	h := ext4Host(t, 0)
	h.up()
	if s := h.status(); s.Kind != Directory || !s.Ready || s.Reflink {
		t.Errorf("%+v", s)
	}
	// With files in it, an image would hide them.
	write(t, filepath.Join(h.cfg.StoreDir(), "snapshotter", "x"), "x")
	h.cfg.Store.Size = units.GiB
	h.fails("store.size = 0", h.cfg.StoreDir())
}

func TestGrows(t *testing.T) {
	h := ext4Host(t, units.GiB)
	s := h.up()
	write(t, filepath.Join(h.cfg.StoreDir(), "file"), "kept")
	before := h.status().Size
	h.cfg.Store.Size = 1536 * units.MiB // while mounted
	h.up()
	if got := h.status().Size; got < before+400*units.MiB {
		t.Errorf("mounted: from %d to %d", before, got)
	}
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}
	h.cfg.Store.Size = 2 * units.GiB
	s = h.up()
	if got := h.status().Size; got < before+900*units.MiB {
		t.Errorf("unmounted: from %d to %d", before, got)
	}
	if n := allocated(t, h.cfg.StoreImage()); n < 2*units.GiB {
		t.Errorf("%d bytes are allocated", n)
	}
	if b, err := os.ReadFile(filepath.Join(h.cfg.StoreDir(), "file")); err != nil || string(b) != "kept" {
		t.Errorf("the file says %q, %v", b, err)
	}
	h.cfg.Store.Size = units.GiB
	h.up()
	if !strings.Contains(h.log.String(), "can't shrink") {
		t.Errorf("log: %s", h.log.String())
	}
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}
	h.cfg.Store.Size = 8 * units.GiB
	h.fails("can't grow to store.size = 8GiB", "make room")
	if n := allocated(t, h.cfg.StoreImage()); n > 2*units.GiB+16*units.MiB {
		t.Errorf("%d bytes are allocated after the refusal", n)
	}
}

// TestFinishesGrowing is a start that was killed between the image and its file system.
func TestFinishesGrowing(t *testing.T) {
	h := ext4Host(t, units.GiB)
	s := h.up()
	before := h.status().Size
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}
	h.cfg.Store.Size = 1536 * units.MiB
	if err := os.Truncate(h.cfg.StoreImage(), int64(h.cfg.Store.Size)); err != nil {
		t.Fatal(err)
	}
	h.up()
	if got := h.status().Size; got < before+400*units.MiB {
		t.Errorf("from %d to %d", before, got)
	}
	if n := allocated(t, h.cfg.StoreImage()); n < int64(h.cfg.Store.Size) {
		t.Errorf("%d bytes are allocated", n)
	}
}

func TestOperatorsMount(t *testing.T) {
	h := ext4Host(t, units.GiB)
	disk := testfs.XFS(t, units.GiB)
	if err := os.MkdirAll(h.cfg.StoreDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	testfs.Mount(t, mount.Mount{Type: "bind", Source: disk, Options: []string{"bind"}}, h.cfg.StoreDir())
	h.up()
	if s := h.status(); s.Kind != Mount || !s.Ready || !s.Reflink {
		t.Errorf("%+v", s)
	}
	write(t, h.cfg.StoreImage(), "")
	h.fails("is mounted from", h.cfg.StoreImage())
}

func TestForeignMountWithoutReflinks(t *testing.T) {
	h := ext4Host(t, units.GiB)
	testfs.Mount(t, mount.Mount{Type: "tmpfs", Source: "tmpfs"}, h.cfg.StoreDir())
	h.fails("mounted from tmpfs", "can't share blocks", "unmount it")
	h.cfg.Store.Size = 0
	h.up()
}

func TestBusy(t *testing.T) {
	h := ext4Host(t, units.GiB)
	s := h.up()
	f, err := os.Create(filepath.Join(h.cfg.StoreDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := s.Release(); !errors.Is(err, ErrBusy) {
		t.Errorf("release: %v", err)
	}
	h.up() // it stays in use
	f.Close()
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}

	elsewhere := filepath.Join(t.TempDir(), "elsewhere")
	testfs.Mount(t, mount.Mount{Type: "xfs", Source: h.cfg.StoreImage(), Options: []string{"loop"}}, elsewhere)
	h.fails("in use by /dev/loop", "umount "+elsewhere)
	if _, err := Inspect(h.cfg); err == nil {
		t.Error("Inspect doesn't see it")
	}
	if err := unix.Unmount(elsewhere, 0); err != nil {
		t.Fatal(err)
	}
	dev, err := mount.SetupLoop(h.cfg.StoreImage(), mount.LoopParams{Autoclear: true})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	h.up() // as when another mount namespace still has it: the same device, not a second one
	m, err := mountedOn(h.cfg.StoreDir())
	if err != nil || m.Source != dev.Name() {
		t.Errorf("mounted %+v, %v; want %s", m, err, dev.Name())
	}
}

func TestDeletedImage(t *testing.T) {
	h := ext4Host(t, units.GiB)
	h.up()
	if err := os.Remove(h.cfg.StoreImage()); err != nil {
		t.Fatal(err)
	}
	h.fails("an image that was deleted", "umount "+h.cfg.StoreDir())
}

func TestBadImages(t *testing.T) {
	h := ext4Host(t, units.GiB)
	write(t, h.cfg.StoreImage(), strings.Repeat("no file system", 1<<16))
	h.fails("mount the store", h.cfg.StoreImage(), "xfs_repair")
	if err := os.Remove(h.cfg.StoreImage()); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(h.cfg.StoreImage(), 0o700); err != nil {
		t.Fatal(err)
	}
	h.fails("is not a file")
}

func TestMissingTools(t *testing.T) {
	h := ext4Host(t, units.GiB)
	t.Setenv("PATH", "")
	h.fails("mkfs.xfs is missing", "install xfsprogs")
}

func TestOneAtATime(t *testing.T) {
	h := ext4Host(t, units.GiB)
	unlock, err := lock(h.cfg)
	if err != nil {
		t.Fatal(err)
	}
	h.fails("another process is setting up", h.cfg.StoreDir())
	unlock()
	h.up()
}

func TestIdleLoops(t *testing.T) {
	dir := testfs.Ext4(t, 64*units.MiB)
	attach := func(name string, autoclear bool) *os.File {
		t.Helper()
		write(t, filepath.Join(dir, name), strings.Repeat("x", 4096))
		dev, err := mount.SetupLoop(filepath.Join(dir, name), mount.LoopParams{Autoclear: autoclear})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { dev.Close() })
		return dev
	}
	attach("used", true)
	idle := attach("idle", false)
	idle.Close()
	want := Loop{Device: idle.Name(), File: filepath.Join(dir, "idle")}
	got, err := IdleLoops(dir)
	if err != nil || len(got) != 1 || got[0] != want {
		t.Fatalf("got %v, %v; want %v", got, err, want)
	}
	if got, err := IdleLoops(dir + "2"); err != nil || len(got) != 0 {
		t.Errorf("of another directory: %v, %v", got, err)
	}
	for range 2 {
		if err := DetachIdle(want); err != nil {
			t.Error(err)
		}
	}
	if got, err := IdleLoops(dir); err != nil || len(got) != 0 {
		t.Errorf("detached: %v, %v", got, err)
	}
}
