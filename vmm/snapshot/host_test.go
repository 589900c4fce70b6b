package snapshot_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/testfs"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
)

func TestMain(m *testing.M) { testfs.Main(m, testguest.Remove) }

// testRefused: what doesn't fit or is damaged is found before a guest runs.
func (h *host) testRefused(t *testing.T) {
	m := h.fresh(t, "good")
	h.save(t, "good", m)
	if err := stop(m); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(h.cfg.SnapshotDir(), "good")
	flip := func(t *testing.T, name string) (undo func()) {
		t.Helper()
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		at, err := unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
		if err != nil { // nothing but a hole
			at = 0
		}
		b := []byte{0}
		turn := func() {
			if _, err := f.ReadAt(b, at); err != nil {
				t.Fatal(err)
			}
			b[0] ^= 1
			if _, err := f.WriteAt(b, at); err != nil {
				t.Fatal(err)
			}
		}
		turn()
		return func() { turn(); f.Close() }
	}
	move := func(t *testing.T, from, to string) (undo func()) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
		return func() { _ = os.Rename(to, from) }
	}
	for name, tc := range map[string]struct {
		spoil func(*testing.T) (undo func())
		want  string
		is    func(error) bool
	}{
		"a bit of the memory":      {func(t *testing.T) func() { return flip(t, "memory") }, "memory is damaged in its MiB", errdefs.IsDataLoss},
		"a bit of the disk":        {func(t *testing.T) func() { return flip(t, "disk-root") }, "disk-root is damaged in its MiB 0", errdefs.IsDataLoss},
		"a bit of the state":       {func(t *testing.T) func() { return flip(t, "state") }, "state is damaged in its MiB 0", errdefs.IsDataLoss},
		"a bit of the description": {func(t *testing.T) func() { return flip(t, "snapshot.json") }, "snapshot.json", errdefs.IsDataLoss},
		"no QEMU": {func(t *testing.T) func() {
			was := h.cfg.Artefacts
			h.cfg.Artefacts = t.TempDir()
			return func() { h.cfg.Artefacts = was }
		}, "its QEMU (", errdefs.IsFailedPrecondition},
		"no modules": {func(t *testing.T) func() {
			guest := filepath.Dir(h.cfg.GuestDir())
			return move(t, filepath.Join(guest, "test"), filepath.Join(guest, "moved"))
		}, "kernel modules", errdefs.IsFailedPrecondition},
		"too much memory": {func(t *testing.T) func() {
			was := h.cfg.VM.MaxMemory
			h.cfg.VM.MaxMemory = 128 << 20
			return func() { h.cfg.VM.MaxMemory = was }
		}, "256 MiB of memory asked for", func(err error) bool { return errors.As(err, new(*vmm.LimitError)) }},
		"no directory for disks": {func(t *testing.T) func() {
			boxes := filepath.Join(h.cfg.StoreDir(), "boxes", "bad", "disk-root")
			if err := os.MkdirAll(boxes, 0o700); err != nil {
				t.Fatal(err)
			}
			return func() { _ = os.Remove(boxes) }
		}, "make disk root", func(err error) bool { return errors.Is(err, os.ErrExist) }},
	} {
		t.Run(name, func(t *testing.T) {
			undo := tc.spoil(t)
			defer undo()
			dir, diskDir := filepath.Join(h.cfg.VMDir(), "bad"), filepath.Join(h.cfg.StoreDir(), "boxes", "bad")
			if err := errors.Join(os.MkdirAll(dir, 0o700), os.MkdirAll(diskDir, 0o700)); err != nil {
				t.Fatal(err)
			}
			m, err := h.launcher.Launch(t.Context(), vmm.Request{ID: "bad", Dir: dir, DiskDir: diskDir, Snapshot: "good"})
			if err == nil {
				_ = stop(m)
				t.Fatal("a guest runs")
			}
			if !tc.is(err) || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v, want %q", err, tc.want)
			}
			if users, err := h.store.Users("good"); err != nil || len(users) != 0 {
				t.Errorf("users %v, %v", users, err)
			}
		})
	}
	// All is as it was.
	h.must(t, vmm.Request{ID: "fine", Snapshot: "good"}).Must(t, h.cfg, "ping")
	if _, err := h.store.Delete("good"); err != nil {
		t.Error(err)
	}
}

// testSealed: with QEMU's uid and through its descriptors nothing of a snapshot can be changed.
func (h *host) testSealed(t *testing.T) {
	m := h.fresh(t, "template")
	h.save(t, "template", m)
	if err := stop(m); err != nil {
		t.Fatal(err)
	}
	clone := h.must(t, vmm.Request{ID: "sealed", Snapshot: "template"})
	clone.Must(t, h.cfg, "ping")
	h.save(t, "again", clone) // leaves QEMU with nothing of it
	fds, err := filepath.Glob("/proc/" + strconv.Itoa(clone.PID()) + "/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	memories := map[uint64]bool{}
	for _, fd := range fds {
		target, _ := os.Readlink(fd)
		if strings.HasPrefix(target, h.cfg.SnapshotDir()) {
			// The state, from which it was restored, for reading.
			flags, err := os.ReadFile("/proc/" + strconv.Itoa(clone.PID()) + "/fdinfo/" + filepath.Base(fd))
			if err != nil || filepath.Base(target) != "state" || !strings.Contains(string(flags), "flags:\t0100000") {
				t.Errorf("QEMU has %s: %s, %v", target, flags, err)
			}
		}
		if !strings.HasPrefix(target, "/memfd:guest memory") {
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat(fd, &st); err != nil {
			t.Fatal(err)
		}
		memories[st.Ino] = true
		asQEMU(t, fd)
	}
	if len(memories) != 1 {
		t.Errorf("QEMU has %d memory files", len(memories))
	}
	for _, id := range []string{"template", "again"} {
		if _, err := h.store.Delete(id); err != nil {
			t.Error(err)
		}
	}
}

// asQEMU tries all that would change the memory.
func asQEMU(t *testing.T, fd string) {
	t.Helper()
	for _, mode := range []int{os.O_RDWR, os.O_WRONLY, os.O_RDONLY} {
		f, err := os.OpenFile(fd, mode, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for name, try := range map[string]func() error{
			"write":    func() error { _, err := f.WriteAt([]byte("x"), 0); return err },
			"truncate": func() error { return f.Truncate(0) },
			"punch": func() error {
				return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096)
			},
			"map": func() error {
				_, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
				return err
			},
			"unseal": func() error { _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, 0); return err },
		} {
			if err := try(); err == nil {
				t.Errorf("%s with mode %d works", name, mode)
			}
		}
	}
}
