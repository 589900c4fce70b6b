package disks

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// options are the mount options that are flags of mount(2); all others are the file system's.
var options = map[string]struct {
	flag  uintptr
	clear bool
}{
	"rw": {unix.MS_RDONLY, true}, "ro": {unix.MS_RDONLY, false},
	"noatime": {unix.MS_NOATIME, false}, "relatime": {unix.MS_RELATIME, false}, "strictatime": {unix.MS_STRICTATIME, false},
	"nodiratime": {unix.MS_NODIRATIME, false}, "lazytime": {unix.MS_LAZYTIME, false},
	"nodev": {unix.MS_NODEV, false}, "dev": {unix.MS_NODEV, true},
	"nosuid": {unix.MS_NOSUID, false}, "suid": {unix.MS_NOSUID, true},
	"noexec": {unix.MS_NOEXEC, false}, "exec": {unix.MS_NOEXEC, true},
	"sync": {unix.MS_SYNCHRONOUS, false}, "dirsync": {unix.MS_DIRSYNC, false},
	"loop": {0, false}, // the host's: how it would have mounted the file that is the disk
}

// fileSystems are those that a disk may have.
var fileSystems = map[string]bool{"ext4": true, "erofs": true, "xfs": true, "squashfs": true}

// Mount mounts the device, whose description has been checked, at dir, which it makes, and grows the file system when the
// device has become larger.
func Mount(node, dir, fstype string, opts []string) error {
	flags, data := parseOptions(opts)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := unix.Mount(node, dir, fstype, flags, data); err != nil {
		_ = os.Remove(dir)
		return fmt.Errorf("mount %s as %s: %w", node, fstype, err)
	}
	if fstype == "ext4" && flags&unix.MS_RDONLY == 0 {
		if err := growExt4(node, dir); err != nil {
			_ = Unmount(dir)
			return fmt.Errorf("grow the file system of %s: %w", node, err)
		}
	}
	return nil
}

func parseOptions(opts []string) (flags uintptr, data string) {
	var rest []string
	for _, o := range opts {
		known, ok := options[o]
		switch {
		case !ok:
			rest = append(rest, o)
		case known.clear:
			flags &^= known.flag
		default:
			flags |= known.flag
		}
	}
	return flags, strings.Join(rest, ",")
}

// Unmount unmounts dir, which writes everything back to the disk, and removes it. It is not an error when dir isn't
// there.
func Unmount(dir string) error {
	err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW)
	switch err {
	case unix.ENOENT:
		return nil
	case nil, unix.EINVAL: // EINVAL: not mounted
		return os.Remove(dir)
	}
	return fmt.Errorf("unmount %s: %w", dir, err)
}
