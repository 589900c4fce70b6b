package qemu

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// tapFlags are those that a tap needs: the state of a saved machine has a card with offloads, which takes the header.
const tapFlags = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR

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
