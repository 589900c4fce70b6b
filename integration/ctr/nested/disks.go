package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// device opens a device, whose node it makes where there is none: the kernel looks for a driver when it is opened.
func device(path string, major, minor uint32) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	mode := uint32(unix.S_IFCHR)
	if major == loopMajor {
		mode = unix.S_IFBLK
	}
	if err := unix.Mknod(path, mode|0o600, int(unix.Mkdev(major, minor))); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make %s: %w", path, err)
	}
	return os.OpenFile(path, os.O_RDWR, 0)
}

// Numbers of devices, from the kernel's Documentation/admin-guide/devices.txt.
const (
	miscMajor        = 10
	tunMinor         = 200
	fuseMinor        = 229
	loopControlMinor = 237
	loopMajor        = 7
)

// overlay lays a directory over another, both on the container's disk, and changes a file of the lower one.
func overlay() error {
	dir, err := os.MkdirTemp("/", "overlay")
	if err != nil {
		return err
	}
	at := func(names ...string) string { return filepath.Join(append([]string{dir}, names...)...) }
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(at(d), 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(at("lower", "file"), []byte("below"), 0o644); err != nil {
		return err
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", at("lower"), at("upper"), at("work"))
	if err := unix.Mount("overlay", at("merged"), "overlay", 0, options); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	if err := os.WriteFile(at("merged", "file"), []byte("above"), 0o644); err != nil {
		return err
	}
	for file, want := range map[string]string{at("lower", "file"): "below", at("upper", "file"): "above"} {
		if b, err := os.ReadFile(file); err != nil || string(b) != want {
			return fmt.Errorf("%s has %q (%v), want %q", file, b, err, want)
		}
	}
	return unix.Unmount(at("merged"), 0)
}

// fuse mounts a file system that nobody serves; the kernel asks for a server only when one uses it.
func fuse() error {
	dev, err := device("/dev/fuse", miscMajor, fuseMinor)
	if err != nil {
		return err
	}
	defer dev.Close()
	dir, err := os.MkdirTemp("/", "fuse")
	if err != nil {
		return err
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", dev.Fd())
	if err := unix.Mount("nobody", dir, "fuse", 0, options); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	return unix.Unmount(dir, unix.MNT_DETACH)
}

// loop makes a disk of a file and reads it.
func loop() error {
	content := bytes.Repeat([]byte("loop"), 4096/4)
	const image = "/loop.img"
	if err := os.WriteFile(image, content, 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	control, err := device("/dev/loop-control", miscMajor, loopControlMinor)
	if err != nil {
		return err
	}
	defer control.Close()
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return fmt.Errorf("find a free one: %w", err)
	}
	disk, err := device(fmt.Sprintf("/dev/loop%d", n), loopMajor, uint32(n))
	if err != nil {
		return err
	}
	defer disk.Close()
	if err := unix.IoctlSetInt(int(disk.Fd()), unix.LOOP_SET_FD, int(f.Fd())); err != nil {
		return fmt.Errorf("attach the file: %w", err)
	}
	got := make([]byte, len(content))
	if _, err := disk.ReadAt(got, 0); err != nil || !bytes.Equal(got, content) {
		return fmt.Errorf("the disk doesn't have what the file has (%v)", err)
	}
	return unix.IoctlSetInt(int(disk.Fd()), unix.LOOP_CLR_FD, 0)
}

// tun makes a network card that is a file.
func tun() error {
	const name = "nested0"
	dev, err := device("/dev/net/tun", miscMajor, tunMinor)
	if err != nil {
		return err
	}
	defer dev.Close()
	r, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(int(dev.Fd()), unix.TUNSETIFF, r); err != nil {
		return fmt.Errorf("make a tap: %w", err)
	}
	_, err = netlink.LinkByName(name)
	return err
}
