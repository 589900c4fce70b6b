// Package guestmark remembers which disk images a guest may have written. The shim sets the mark before QEMU gets an
// image read-write; whoever would mount the image on the host must look for it first and refuse.
package guestmark

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// attr is only visible to CAP_SYS_ADMIN. FICLONE doesn't carry extended attributes over: a clone's maker must Set again.
const attr = "trusted.cube.guest-written"

// Set marks the image, durably.
func Set(f *os.File) error {
	if err := unix.Fsetxattr(int(f.Fd()), attr, []byte("1"), 0); err != nil {
		return fmt.Errorf("mark %s as guest-written: %w", f.Name(), err)
	}
	return f.Sync()
}

// IsSet tells whether the image has the mark.
func IsSet(path string) (bool, error) {
	_, err := unix.Getxattr(path, attr, nil)
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.ENODATA):
		return false, nil
	}
	return false, fmt.Errorf("read the guest-written mark of %s: %w", path, err)
}

// MountType is the type that the snapshotter gives the mount of a marked image instead of ext4. No kernel knows it, so
// that nobody mounts the image on the host by accident; the shim takes it like ext4, for it only attaches the image.
const MountType = "cube-guest-written"

// Refusal ends the error of whoever refuses to read a marked image on the host.
const Refusal = "a guest has written its file system, which the host must not mount: copy what you need out of the " +
	"running container (for example with tar through exec) and build an image from that"
