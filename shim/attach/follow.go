package attach

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// follow calls changed with each other MTU that a tap has than the one before, the first of which is mtu, until ctx ends. It
// is in the network namespace of the calling thread.
func follow(ctx context.Context, tap string, mtu int, changed func(mtu uint32)) error {
	h, err := netlink.NewHandle()
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	l, err := h.LinkByName(tap)
	if err != nil {
		return fmt.Errorf("look for tap %s: %w", tap, err)
	}
	index := l.Attrs().Index
	events, err := subscribe(index)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = events.Close() })()
	defer events.Close()
	for {
		// By what it is and not by what the event says: there may have been one before, or too many.
		if l, err = h.LinkByIndex(index); err != nil {
			return fmt.Errorf("look at tap %s: %w", tap, err)
		}
		if l.Attrs().MTU != mtu {
			mtu = l.Attrs().MTU
			changed(uint32(mtu))
		}
		if _, err := events.Receive(); ctx.Err() != nil {
			return nil
		} else if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("watch tap %s: %w", tap, err)
		}
	}
}

// subscribe asks for what happens to one device. The kernel wakes the shim up for no other: there is a shim for each tap.
func subscribe(index int) (_ *mdl.Conn, err error) {
	c, err := mdl.Dial(unix.NETLINK_ROUTE, &mdl.Config{Groups: unix.RTMGRP_LINK})
	if err != nil {
		return nil, fmt.Errorf("watch the host's devices: %w", err)
	}
	// ifi_index of struct ifinfomsg, after struct nlmsghdr. Filters load numbers in network order.
	const offset = unix.SizeofNlMsghdr + 4
	want := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, uint32(index)))
	filter, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: offset, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: want, SkipFalse: 1},
		bpf.RetConstant{Val: 1<<32 - 1},
		bpf.RetConstant{Val: 0},
	})
	if err == nil {
		err = c.SetBPF(filter)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch one of the host's devices: %w", err), c.Close())
	}
	return c, nil
}
