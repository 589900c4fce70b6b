package disks

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestFindBySerial(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"sda/device/vpd_pg80": "\x00\x80\x00\x05root0",
		"sdb/device/vpd_pg80": "\x00\x80\x00\x07modules",
		"sdc/device/vpd_pg80": "\x00\x80",
		"vda/serial":          "root1\n",
		"loop0/size":          "0",
	} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for serial, want := range map[string]string{"root0": "sda", "modules": "sdb", "root1": "vda", "root": "", "oot0": ""} {
		if got, err := find(dir, serial); got != want || err != nil {
			t.Errorf("find %s: %q, %v, want %q", serial, got, err, want)
		}
	}
}

func TestFindGivesUp(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := Find(ctx, "no-such-disk"); !errors.Is(err, ErrNotFound) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestCheck(t *testing.T) {
	for _, serial := range []string{"", "../x", "a b", "UPPER", "123456789012345678901"} {
		if err := Check(serial, "ext4"); err == nil {
			t.Errorf("serial %q passed", serial)
		}
	}
	for fstype, ok := range map[string]bool{"ext4": true, "erofs": true, "proc": false, "": false, "fuse": false} {
		if err := Check("root0", fstype); (err == nil) != ok {
			t.Errorf("file system %q: %v", fstype, err)
		}
	}
}

func TestParseOptions(t *testing.T) {
	flags, data := parseOptions([]string{"ro", "noatime", "loop", "errors=remount-ro", "rw", "nodev", "discard"})
	if flags != unix.MS_NOATIME|unix.MS_NODEV || data != "errors=remount-ro,discard" {
		t.Errorf("flags %#x, data %q", flags, data)
	}
}

func TestExt4Blocks(t *testing.T) {
	mkfs, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		t.Skip("mkfs.ext4 is not installed (package e2fsprogs)")
	}
	for _, blockSize := range []string{"1024", "4096"} {
		image := filepath.Join(t.TempDir(), "image")
		if out, err := exec.Command(mkfs, "-q", "-b", blockSize, image, "8M").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		f, err := os.Open(image)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		blocks, size, err := ext4Blocks(f)
		if err != nil || blocks*size != 8<<20 {
			t.Errorf("%d blocks of %d bytes, %v, want 8 MiB", blocks, size, err)
		}
	}
	f, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, _, err := ext4Blocks(f); err == nil {
		t.Error("zeros passed for a superblock")
	}
}
