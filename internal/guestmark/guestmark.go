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
