// Package disks finds plugged-in disks by serial and mounts them. It knows nothing of containers.
package disks

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/uevent"
)

// ErrNotFound says that no disk of that serial is plugged in.
var ErrNotFound = errors.New("no such disk")

// Block is where the kernel lists block devices.
const block = "/sys/block"

// serials are what the host may call a disk: what QEMU's devices take.
var serials = regexp.MustCompile(`^[a-z0-9-]{1,20}$`)

// Check says what is wrong with a disk's description.
func Check(serial, fstype string) error {
	switch {
	case !serials.MatchString(serial):
		return fmt.Errorf("%q is no serial of a disk", serial)
	case !fileSystems[fstype]:
		return fmt.Errorf("the file system of disk %q can't be %q", serial, fstype)
	}
	return nil
}

// appearTimeout bounds the wait for a disk. It takes 0.2 s in an emulated guest on an idle host.
const appearTimeout = 30 * time.Second

// Find returns the device node of the disk with that serial. It waits for the disk to appear; when it doesn't, the error
// wraps ErrNotFound.
func Find(ctx context.Context, serial string) (node string, err error) {
	ctx, cancel := context.WithTimeout(ctx, appearTimeout)
	defer cancel()
	err = uevent.Until(ctx, "block", func() (bool, error) {
		name, err := find(block, serial)
		if name == "" || err != nil {
			return false, err
		}
		node = filepath.Join("/dev", name)
		return opens(node)
	})
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w (%w)", ErrNotFound, err)
		}
		return "", fmt.Errorf("find disk %q: %w", serial, err)
	}
	return node, nil
}

// opens tells whether a device is there. The kernel lists it a little earlier than it can be opened (device_add_disk), and
// tells of it later than both.
func opens(node string) (bool, error) {
	f, err := os.Open(node)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, f.Close()
}

// Resize makes the kernel look at the disk again when it doesn't take it to have so many bytes, as after a restore that
// has put another image behind the disk. 0 is any size.
func Resize(node string, bytes uint64) error {
	have, err := size(node)
	if err != nil || bytes == 0 || have == bytes {
		return err
	}
	rescan := filepath.Join(block, filepath.Base(node), "device/rescan")
	if err := os.WriteFile(rescan, []byte("1"), 0); err != nil {
		return fmt.Errorf("look at %s again: %w", node, err)
	}
	if have, err = size(node); err == nil && have != bytes {
		err = fmt.Errorf("%s has %d bytes, not %d", node, have, bytes)
	}
	return err
}

// size is how many bytes the device has.
func size(node string) (uint64, error) {
	b, err := os.ReadFile(filepath.Join(block, filepath.Base(node), "size"))
	if err != nil {
		return 0, err
	}
	sectors, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	const sector = 512 // of this file, whatever the device has (kernel documentation, ABI/stable/sysfs-block)
	return sectors * sector, err
}

// find returns the name of the disk with that serial below dir, "" when there is none.
func find(dir, serial string) (string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		for _, read := range []func(string) (string, error){scsiSerial, virtioSerial} {
			// A disk without a serial, or one that is just going: look at the next.
			if s, err := read(filepath.Join(dir, e.Name())); err == nil && s == serial {
				return e.Name(), nil
			}
		}
	}
	return "", nil
}

// scsiSerial reads the unit serial number page (SPC-4 7.8.15: a header of 4 bytes, then the serial).
func scsiSerial(dir string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, "device/vpd_pg80"))
	if err != nil {
		return "", err
	}
	if len(b) < 4 {
		return "", fmt.Errorf("%s: short serial number page", dir)
	}
	return strings.TrimSpace(string(b[4:])), nil
}

func virtioSerial(dir string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, "serial"))
	return strings.TrimSpace(string(b)), err
}
