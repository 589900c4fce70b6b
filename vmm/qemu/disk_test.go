package qemu_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
	"github.com/cubesandbox/cube/vmm/record"
)

func TestDisks(t *testing.T) {
	cfg := testguest.Config(t)
	m, g := restored(t, cfg, "disks")
	ctx := within(t, cfg.Timeout(time.Minute))
	rw := image(t, t.TempDir(), 8<<20)
	if err := m.AddDisk(ctx, vmm.Disk{Serial: "root-0", File: rw}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if s := g.Must(t, cfg, "disk root-0"); s != "8388608 rw" {
		t.Errorf("the guest sees %s", s)
	}
	t.Logf("the guest has the disk %s after AddDisk", time.Since(began))
	g.Must(t, cfg, "write root-0 hello")
	if b := make([]byte, 5); mustReadAt(t, rw, b) && string(b) != "hello" {
		t.Errorf("the image holds %q", b)
	}

	// A read-only disk from a file that could be written to.
	ro := image(t, t.TempDir(), 4<<20)
	if _, err := ro.WriteAt([]byte("layer"), 0); err != nil {
		t.Fatal(err)
	}
	if err := m.AddDisk(ctx, vmm.Disk{Serial: "layer-1", File: ro, ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	if s := g.Must(t, cfg, "disk layer-1"); s != "4194304 ro" {
		t.Errorf("the guest sees %s", s)
	}
	if s := g.Must(t, cfg, "read layer-1"); s != "layer" {
		t.Errorf("the guest reads %q", s)
	}
	if _, err := g.Do(cfg, "write layer-1 x"); err == nil {
		t.Error("the guest writes to a read-only disk")
	}

	if err := m.RemoveDisk(ctx, "root-0"); err != nil {
		t.Fatal(err)
	}
	g.Must(t, cfg, "nodisk root-0")
	if err := m.RemoveDisk(ctx, "root-0"); !errors.Is(err, vmm.ErrNoDisk) {
		t.Errorf("removed twice: %v", err)
	}
	// The serial, the address and the image are free again.
	if err := m.AddDisk(ctx, vmm.Disk{Serial: "root-0", File: rw}); err != nil {
		t.Fatal(err)
	}
	if s := g.Must(t, cfg, "read root-0"); s != "hello" {
		t.Errorf("the guest reads %q", s)
	}
}

func mustReadAt(t *testing.T, f *os.File, b []byte) bool {
	t.Helper()
	if _, err := f.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	return true
}

func TestDiskRefused(t *testing.T) {
	cfg := testguest.Config(t)
	m, _ := restored(t, cfg, "refused")
	ctx := within(t, cfg.Timeout(time.Minute))
	rw := image(t, t.TempDir(), 1<<20)
	if err := m.AddDisk(ctx, vmm.Disk{Serial: "taken", File: rw}); err != nil {
		t.Fatal(err)
	}
	readable, err := os.Open(rw.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer readable.Close()
	other := image(t, t.TempDir(), 1<<20)
	for name, d := range map[string]vmm.Disk{
		"the same serial":       {Serial: "taken", File: other},
		"the root's serial":     {Serial: "root", File: other},
		"the modules' serial":   {Serial: "modules", File: other},
		"a long serial":         {Serial: strings.Repeat("x", 21), File: other},
		"an empty serial":       {Serial: "", File: other},
		"an odd serial":         {Serial: `a",b`, File: other},
		"the same image":        {Serial: "again", File: rw},
		"a file without rights": {Serial: "readable", File: readable},
	} {
		if err := m.AddDisk(ctx, d); err == nil {
			t.Errorf("%s was taken", name)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: not one line: %v", name, err)
		}
	}
	// Nothing of the refused ones is left.
	if err := m.AddDisk(ctx, vmm.Disk{Serial: "again", File: other}); err != nil {
		t.Error(err)
	}
	for _, serial := range []string{"modules", "root", "never", ""} {
		if err := m.RemoveDisk(ctx, serial); !errors.Is(err, vmm.ErrNoDisk) {
			t.Errorf("remove %q: %v", serial, err)
		}
	}
	// QEMU's lock keeps a second machine off the image.
	m2, _ := restored(t, cfg, "second")
	if err := m2.AddDisk(ctx, vmm.Disk{Serial: "taken", File: rw}); err == nil || !strings.Contains(err.Error(), "lock") {
		t.Errorf("an image in two machines: %v", err)
	}
}

// The first disk is there from the start and is the image, although the guest was saved without.
func TestRoot(t *testing.T) {
	cfg := testguest.Config(t)
	f := image(t, t.TempDir(), 8<<20)
	if _, err := f.WriteAt([]byte("distribution"), 0); err != nil {
		t.Fatal(err)
	}
	s := restoreSpec(t, cfg, "root")
	s.Root = f
	m, g := start(t, cfg, s)
	if got, want := g.Must(t, cfg, "disk root"), fmt.Sprint(int64(vmm.RootBytes), " rw"); got != want {
		t.Errorf("the guest sees %s, want %s", got, want)
	}
	if got := g.Must(t, cfg, "read root"); got != "distribution" {
		t.Errorf("the guest reads %q", got)
	}
	g.Must(t, cfg, "write root changed")
	if b := make([]byte, 7); mustReadAt(t, f, b) && string(b) != "changed" {
		t.Errorf("the image holds %q", b)
	}
	if _, err := g.Do(cfg, "fill root 9"); err == nil {
		t.Error("the guest writes beyond the end of the image")
	}
	if info, err := f.Stat(); err != nil || info.Size() != 8<<20 {
		t.Errorf("the image has %v bytes now, %v", info.Size(), err)
	}
	g.Must(t, cfg, "fill root 8")
	full := allocated(t, f)
	g.Must(t, cfg, "trim root 8")
	if empty := allocated(t, f); full < 8<<20 || empty > 1<<20 {
		t.Errorf("%d bytes allocated after writing, %d after trimming", full, empty)
	}
	g.Must(t, cfg, "write root changed")
	ctx := within(t, cfg.Timeout(30*time.Second))
	if err := m.AddDisk(ctx, vmm.Disk{Serial: "second", File: image(t, t.TempDir(), 1<<20)}); err != nil {
		t.Fatal(err)
	}
	if s := g.Must(t, cfg, "disk second"); s != "1048576 rw" {
		t.Errorf("the guest sees %s", s)
	}
	if err := m.RemoveDisk(ctx, vmm.RootSerial); err != nil {
		t.Fatal(err)
	}
	g.Must(t, cfg, "nodisk root")
	other := restoreSpec(t, cfg, "other-root")
	other.Root = f // free again
	_, g2 := start(t, cfg, other)
	if got := g2.Must(t, cfg, "read root"); got != "changed" {
		t.Errorf("the second machine reads %q", got)
	}
}

// A file system on a root that is much smaller than the guest takes it to be.
func TestRootFileSystem(t *testing.T) {
	cfg := testguest.Config(t)
	tree := t.TempDir()
	if err := os.WriteFile(filepath.Join(tree, "in"), []byte("bookworm"), 0o644); err != nil {
		t.Fatal(err)
	}
	f := image(t, t.TempDir(), 32<<20)
	if out, err := exec.Command("mke2fs", "-q", "-t", "ext4", "-d", tree, f.Name()).CombinedOutput(); err != nil {
		t.Fatalf("mke2fs: %v: %s", err, out)
	}
	s := restoreSpec(t, cfg, "rootfs")
	s.Root = f
	m, g := start(t, cfg, s)
	if got := g.Must(t, cfg, "ext4 root"); got != "bookworm" {
		t.Errorf("the guest reads %q", got)
	}
	if err := m.Stop(gone()); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("e2fsck", "-fn", f.Name()).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v: %s", err, out)
	}
	if out, err := exec.Command("debugfs", "-R", "cat /out", f.Name()).Output(); err != nil || string(out) != "bookworm" {
		t.Errorf("the guest wrote %q, %v", out, err)
	}
}

// What the guest trims, the store gets back.
func TestTrim(t *testing.T) {
	cfg := testguest.Config(t)
	m, g := restored(t, cfg, "trim")
	f := image(t, t.TempDir(), 16<<20)
	if err := m.AddDisk(within(t, cfg.Timeout(10*time.Second)), vmm.Disk{Serial: "d", File: f}); err != nil {
		t.Fatal(err)
	}
	g.Must(t, cfg, "fill d 8")
	full := allocated(t, f)
	g.Must(t, cfg, "trim d 8")
	if empty := allocated(t, f); full < 8<<20 || empty > full-7<<20 {
		t.Errorf("%d bytes allocated after writing, %d after trimming", full, empty)
	}
}

func allocated(t *testing.T, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := errors.Join(f.Sync(), unix.Fstat(int(f.Fd()), &st)); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// A full store stops the guest, which goes on when there is space, and loses nothing.
func TestFullStore(t *testing.T) {
	cfg := testguest.Config(t)
	m, g := restored(t, cfg, "full")
	store := t.TempDir()
	if err := unix.Mount("tmpfs", store, "tmpfs", 0, "size=8m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(store, unix.MNT_DETACH) })
	ballast := image(t, store, 0)
	if _, err := ballast.Write(bytes.Repeat([]byte{1}, 6<<20)); err != nil {
		t.Fatal(err)
	}
	f := image(t, store, 16<<20)
	if err := m.AddDisk(within(t, cfg.Timeout(10*time.Second)), vmm.Disk{Serial: "d", File: f}); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		_, err := g.Do(cfg, "fill d 4")
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("4 MiB went into 2: %v", err)
	case <-time.After(2500 * time.Millisecond): // more than one attempt to go on
	}
	full := func() bool {
		all, err := record.Machines(cfg)
		return err == nil && slices.ContainsFunc(all, func(r record.Machine) bool { return r.State.QEMU.PID == m.PID() && r.Full })
	}
	if !full() {
		t.Error("nobody is told that it waits")
	}
	if err := ballast.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4<<20)
	if mustReadAt(t, f, b); !bytes.Equal(b, bytes.Repeat([]byte{0xa5}, 4<<20)) {
		t.Error("something is lost")
	}
	for deadline := time.Now().Add(cfg.Timeout(10 * time.Second)); full(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it is still said to wait")
		}
	}
}
