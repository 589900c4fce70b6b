package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// loopSetCapacity makes a loop device see its file's new size. From linux/loop.h.
const loopSetCapacity = 0x4c07

// openLoop opens a loop device. Anything else is an error.
func openLoop(dev string) (*os.File, error) {
	if !strings.HasPrefix(dev, "/dev/loop") {
		return nil, fmt.Errorf("%s is not a loop device", dev)
	}
	return os.Open(dev)
}

// backedBy tells whether the loop device's file is this one, whatever it is called.
func backedBy(dev *os.File, file string) bool {
	info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
	if err != nil {
		return false // free
	}
	var st unix.Stat_t
	return unix.Stat(file, &st) == nil && st.Ino == info.Inode && st.Dev == info.Device
}

// backingGone tells whether the loop device's file has no name any more.
func backingGone(dev string) (bool, error) {
	b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(dev), "loop/backing_file"))
	return strings.HasSuffix(strings.TrimSpace(string(b)), "(deleted)"), err
}

// loopDevices lists the loop devices that have a file.
func loopDevices() (devs []string) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file") // the pattern is well-formed
	for _, f := range files {
		devs = append(devs, "/dev/"+filepath.Base(filepath.Dir(filepath.Dir(f))))
	}
	return devs
}

func mountsOf(dev string) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Source != dev, false })
}

// Loop is a loop device and its file.
type Loop struct{ Device, File string }

// IdleLoops lists the loop devices with files below dir that are mounted nowhere and won't go by themselves. (One that
// does, goes with its last user: as long as it is there, it is in use, if only in another mount namespace.)
func IdleLoops(dir string) ([]Loop, error) {
	var idle []Loop
	for _, dev := range loopDevices() {
		b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(dev), "loop/backing_file"))
		file := strings.TrimSuffix(strings.TrimSpace(string(b)), " (deleted)")
		if err != nil || !strings.HasPrefix(file, dir+"/") {
			continue // detached meanwhile, or not ours
		}
		f, err := openLoop(dev)
		if err != nil {
			continue
		}
		info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
		f.Close()
		if err != nil || info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0 {
			continue
		}
		mounts, err := mountsOf(dev)
		if err != nil {
			return nil, fmt.Errorf("look for mounts of %s: %w", dev, err)
		}
		if len(mounts) == 0 {
			idle = append(idle, Loop{Device: dev, File: file})
		}
	}
	return idle, nil
}

// DetachIdle takes the file from the device, unless the device has another one by now. One in use keeps it until its
// last user is gone.
func DetachIdle(l Loop) error {
	idle, err := IdleLoops(filepath.Dir(l.File))
	if err != nil {
		return err
	}
	if !slices.Contains(idle, l) {
		return nil
	}
	if err := mount.DetachLoopDevice(l.Device); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", l.Device, err)
	}
	return nil
}

// deviceOf is the loop device that already has the image, "" for none. One that is mounted where this process can see it
// is an error. One that isn't, is held by a mount namespace that was copied while the store was mounted (a service's, a
// container's); another device on the same file would mount XFS twice.
func deviceOf(l layout) (dev string, err error) {
	if !l.exists {
		return "", nil
	}
	for _, dev := range loopDevices() {
		f, err := openLoop(dev)
		if err != nil {
			continue // detached meanwhile
		}
		ours := backedBy(f, l.image)
		f.Close()
		if !ours {
			continue
		}
		mounts, err := mountsOf(dev)
		if err != nil {
			return "", err
		}
		if len(mounts) > 0 {
			return "", fmt.Errorf("the store's image %s is in use by %s: run umount %s", l.image, dev, mounts[0].Mountpoint)
		}
		return dev, nil
	}
	return "", nil
}

// mountImage mounts the image: through dev if it is attached to that, otherwise through a loop device that goes with the
// mount. It is mounted without discard, so that its blocks stay allocated. They are cached once, as direct I/O bypasses
// the outer file system's cache.
func mountImage(l layout, dev string) error {
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		return fmt.Errorf("mount the store: %w: load the kernel module loop, or set store.size = 0", err)
	}
	m := mount.Mount{Type: "xfs", Source: l.image, Options: []string{"loop", "direct-io", "noatime", "nodev", "nosuid", "noexec"}}
	if dev != "" {
		m.Source, m.Options = dev, m.Options[2:]
	}
	err := m.Mount(l.dir)
	switch {
	case errors.Is(err, unix.ENODEV):
		return fmt.Errorf("mount the store: the kernel has no XFS: load the module xfs, or set store.size = 0")
	case err != nil:
		return fmt.Errorf("mount the store %s: %w: repair it with xfs_repair, or move it away to start with an empty one", l.image, err)
	}
	return nil
}
