package qemu_test

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/internal/testguest"
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
	for _, serial := range []string{"modules", "never", ""} {
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
}
