package ports

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Groups of the kernel's messages about sockets that are gone (linux/sock_diag.h).
const (
	tcpGone  = 1 // SKNLGRP_INET_TCP_DESTROY
	tcp6Gone = 3 // SKNLGRP_INET6_TCP_DESTROY
)

// Where a struct inet_diag_msg (linux/inet_diag.h) has the ports, in the network's order.
const (
	localPort  = 4
	remotePort = 6
)

// unknown stands for ports that may have been closed.
const unknown = 0

// closed tells the ports that are no longer listened on, as soon as the kernel does, so that a program which listens anew on
// all addresses finds its port free. It is closed with ctx. Without inet_diag in the kernel there is an error.
func closed(ctx context.Context) (<-chan uint16, error) {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		return nil, fmt.Errorf("open a socket for sockets' ends: %w", err)
	}
	for _, group := range []uint32{tcpGone, tcp6Gone} {
		if err := c.JoinGroup(group); err != nil {
			c.Close()
			return nil, fmt.Errorf("ask for sockets' ends: %w", err)
		}
	}
	ports := make(chan uint16, 64)
	context.AfterFunc(ctx, func() { c.Close() })
	go func() {
		defer close(ports)
		for {
			messages, err := c.Receive()
			switch {
			case errors.Is(err, syscall.ENOBUFS): // some were lost
				tell(ports, unknown)
			case err != nil:
				return
			}
			for _, m := range messages {
				if port := listener(m.Data); port != unknown {
					tell(ports, port)
				}
			}
		}
	}()
	return ports, nil
}

// tell doesn't wait: when there is no room, a scan is due anyway.
func tell(ports chan<- uint16, port uint16) {
	select {
	case ports <- port:
	default:
	}
}

// listener is the port of a message about a socket that may have listened: it had no other end.
func listener(m []byte) uint16 {
	if len(m) < remotePort+2 || binary.BigEndian.Uint16(m[remotePort:]) != 0 {
		return unknown
	}
	return binary.BigEndian.Uint16(m[localPort:])
}
