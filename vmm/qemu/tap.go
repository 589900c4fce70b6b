package qemu

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm"
)

// tapFlags are those that a tap needs: the state of a saved machine has a card with offloads, which takes the header.
const tapFlags = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR

// Tap takes another descriptor of the tap from QEMU: nothing here keeps one, since the tap's carrier goes with its last.
func (m *Machine) Tap() (*os.File, error) {
	if m.tapFD == 0 {
		return nil, nil
	}
	pidfd, err := unix.PidfdOpen(m.id.PID, 0)
	if err == nil {
		defer unix.Close(pidfd)
		if !m.id.Alive() { // looked at after the open: what is open is QEMU
			err = unix.ESRCH
		}
	}
	fd := -1
	if err == nil {
		fd, err = unix.PidfdGetfd(pidfd, m.tapFD, 0)
	}
	switch {
	case errors.Is(err, unix.ESRCH):
		return nil, vmm.ErrGone
	case err != nil:
		return nil, fmt.Errorf("take the machine's tap: %w", err)
	}
	return os.NewFile(uintptr(fd), "tap"), nil
}

// validTap refuses what a machine can't be restored with, in better words than QEMU's.
func validTap(tap *os.File) error {
	ifr, err := unix.NewIfreq("")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(int(tap.Fd()), unix.TUNGETIFF, ifr); err != nil {
		return fmt.Errorf("%s is no tap for a machine: TUNGETIFF: %w", tap.Name(), err)
	}
	if got := ifr.Uint16(); got&tapFlags != tapFlags {
		return fmt.Errorf("tap %s has the flags %#x, but a machine's has to be made with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR, %#x", ifr.Name(), got, tapFlags)
	}
	return nil
}
