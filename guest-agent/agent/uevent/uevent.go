// Package uevent waits for devices by the kernel's uevents.
package uevent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// maxMessage is more than a uevent has (UEVENT_BUFFER_SIZE is 2 KiB, include/linux/kobject.h).
const maxMessage = 8 << 10

// kernelGroup is the multicast group of the kernel's own messages (not udev's).
const kernelGroup = 1

// Until calls check at once, and again after each event of the subsystem, until it answers true or fails, or ctx ends.
// Nothing that happens after the call begins is missed.
func Until(ctx context.Context, subsystem string, check func() (bool, error)) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return fmt.Errorf("listen for uevents: %w", err)
	}
	f := os.NewFile(uintptr(fd), "uevents")
	defer f.Close()
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelGroup}); err != nil {
		return fmt.Errorf("listen for uevents: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	want := []byte("\x00SUBSYSTEM=" + subsystem + "\x00")
	b := make([]byte, maxMessage)
	for {
		if ok, err := check(); ok || err != nil {
			return err
		}
		for n := 0; !bytes.Contains(b[:n], want); {
			n, err = f.Read(b)
			switch {
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case errors.Is(err, unix.ENOBUFS): // some were lost: look again
				n = copy(b, want)
			case err != nil:
				return fmt.Errorf("read uevents: %w", err)
			}
		}
	}
}
