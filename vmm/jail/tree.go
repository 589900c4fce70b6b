package jail

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Tree is a detached mount that is put into the jail (see OpenTree).
type Tree struct {
	File *os.File
	Path string // below the root, without a leading slash
}

// OpenTree makes a detached mount of a file or directory, and, if recursive, of what is mounted below it. Symbolic links in
// the path are followed. What is mounted or unmounted at the path later is of no consequence. In the tree no symbolic link is
// followed, and no set-uid bit, no device node and, if it is to be read-only, no write counts.
func OpenTree(path string, readOnly, recursive bool) (_ *os.File, err error) {
	var below uint
	if recursive {
		below = unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|below)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSYMFOLLOW, Propagation: unix.MS_PRIVATE}
	if readOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		return nil, errors.Join(&os.PathError{Op: "mount_setattr", Path: path, Err: err}, f.Close())
	}
	return f, nil
}
