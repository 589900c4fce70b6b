package rootfs

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/api"
)

func TestMountRefusesNonsense(t *testing.T) {
	disk := &api.Disk{Serial: "root0", Fstype: "ext4"}
	dir := &api.LayerDir{Path: "x"}
	for name, r := range map[string]*api.Rootfs{
		"nothing":        nil,
		"no disk":        {},
		"two disks":      {Disks: []*api.Disk{disk, disk}},
		"no such type":   {Disks: []*api.Disk{{Serial: "root0", Fstype: "proc"}}},
		"bad serial":     {Disks: []*api.Disk{{Serial: "../x", Fstype: "ext4"}}},
		"many disks":     {Disks: slices.Repeat([]*api.Disk{disk}, maxDisks+1), Overlay: &api.Overlay{Lower: []*api.LayerDir{dir}}},
		"no lower":       {Disks: []*api.Disk{disk}, Overlay: &api.Overlay{}},
		"upper, no work": {Disks: []*api.Disk{disk}, Overlay: &api.Overlay{Lower: []*api.LayerDir{dir}, Upper: dir}},
	} {
		if _, err := Mount(t.Context(), t.TempDir(), r); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// overlay makes an overlay of directories that stand for disks.
func overlay(t *testing.T, o *api.Overlay, disks ...string) (string, error) {
	dir := filepath.Join(t.TempDir(), "rootfs")
	err := mountOverlay(dir, disks, o)
	if err == nil {
		t.Cleanup(func() {
			if err := unix.Unmount(dir, 0); err != nil {
				t.Error(err)
			}
		})
	}
	return dir, err
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestOverlay(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting takes root")
	}
	lower, upper := t.TempDir(), t.TempDir()
	write(t, filepath.Join(lower, "a:b,c/f"), "below")
	write(t, filepath.Join(lower, "base/f"), "base")
	write(t, filepath.Join(lower, "base/g"), "base")
	dir, err := overlay(t, &api.Overlay{
		Lower: []*api.LayerDir{{Disk: 0, Path: "a:b,c"}, {Disk: 0, Path: "/base/"}},
		Upper: &api.LayerDir{Disk: 1, Path: "upper"},
		Work:  &api.LayerDir{Disk: 1, Path: "work"},
	}, lower, upper)
	if err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{"f": "below", "g": "base"} {
		if b, err := os.ReadFile(filepath.Join(dir, file)); string(b) != want || err != nil {
			t.Errorf("%s: %q, %v", file, b, err)
		}
	}
	write(t, filepath.Join(dir, "h"), "new")
	if b, err := os.ReadFile(filepath.Join(upper, "upper/h")); string(b) != "new" || err != nil {
		t.Errorf("in the upper directory: %q, %v", b, err)
	}
}

// Whoever made the image decides what is on the disk; it must not decide what is mounted.
func TestOverlayStaysOnItsDisks(t *testing.T) {
	disk := t.TempDir()
	outside := t.TempDir()
	write(t, filepath.Join(disk, "ok/f"), "")
	if err := os.Symlink(outside, filepath.Join(disk, "link")); err != nil {
		t.Fatal(err)
	}
	ok := []*api.LayerDir{{Path: "ok"}}
	for name, o := range map[string]*api.Overlay{
		"link":          {Lower: []*api.LayerDir{{Path: "link"}}},
		"link below":    {Lower: []*api.LayerDir{{Path: "link/x"}}},
		"parent":        {Lower: []*api.LayerDir{{Path: "../x"}}},
		"file":          {Lower: []*api.LayerDir{{Path: "ok/f"}}},
		"no such disk":  {Lower: []*api.LayerDir{{Disk: 1}}},
		"upper by link": {Lower: ok, Upper: &api.LayerDir{Path: "link/upper"}, Work: &api.LayerDir{Path: "work"}},
		"work outside":  {Lower: ok, Upper: &api.LayerDir{Path: "upper"}, Work: &api.LayerDir{Path: ".."}},
	} {
		if _, err := overlay(t, o, disk); err == nil {
			t.Errorf("%s: mounted", name)
		}
	}
	if entries, err := os.ReadDir(outside); len(entries) != 0 || err != nil {
		t.Errorf("outside of the disk: %v, %v", entries, err)
	}
}

func TestTakes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting takes root")
	}
	dir := t.TempDir()
	write(t, filepath.Join(dir, "etc/there"), "")
	for name, target := range map[string]string{"good": "/etc/there", "dangling": "/etc/absent", "outside": "../../../../../../bin/sh"} {
		if err := os.Symlink(target, filepath.Join(dir, "etc", name)); err != nil {
			t.Fatal(err)
		}
	}
	r := &Root{Path: dir}
	if !r.Takes("/etc/absent") || !r.Takes("/etc/there") {
		t.Error("a root that can be written to takes anything")
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{
		"/etc/there": true, "/etc/good": true, "/etc/absent": false, "/etc/dangling": false, "/etc/outside": false, "/none/there": false,
	} {
		if got := r.Takes(name); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
