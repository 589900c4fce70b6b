package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// What golang.org/x/sys/unix has not of linux/sock_diag.h and linux/inet_diag.h.
const (
	sockDestroy   = 21
	diagBytecode  = 1 // the attribute with the filter
	diagTarget    = 8 // INET_DIAG_BC_D_COND: the filter's only instruction
	diagSocketLen = 48
	diagRequest   = 8 + diagSocketLen  // struct inet_diag_req_v2
	diagMessage   = 24 + diagSocketLen // struct inet_diag_msg
)

// breakSockets breaks off what sockets of the host have with a sandbox: who uses one is told at once (ECONNABORTED). Where the
// kernel can't (CONFIG_INET_DIAG_DESTROY), they find out by waiting: what they send goes nowhere.
func (s *session) breakSockets(with netip.Addr) error {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		return fmt.Errorf("look for the host's connections to %s: %w", with, err)
	}
	defer c.Close()
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} { // the latter's have IPv4 addresses, too
		for _, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			if err := breakOff(c, family, protocol, with); err != nil {
				return fmt.Errorf("break off the host's connections to %s: %w", with, err)
			}
		}
	}
	return nil
}

func breakOff(c *netlink.Conn, family, protocol byte, with netip.Addr) error {
	found, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.SOCK_DIAG_BY_FAMILY, Flags: netlink.Request | netlink.Dump},
		Data:   append(request(family, protocol, ^uint32(0), make([]byte, diagSocketLen)), only(with)...),
	})
	if errors.Is(err, unix.ENOENT) {
		return nil // the kernel can't list such sockets
	} else if err != nil {
		return err
	}
	for _, m := range found {
		if len(m.Data) < diagMessage {
			return fmt.Errorf("the kernel tells of a socket in %d bytes: %w", len(m.Data), errors.ErrUnsupported)
		}
		_, err := c.Execute(netlink.Message{
			Header: netlink.Header{Type: sockDestroy, Flags: netlink.Request | netlink.Acknowledge},
			Data:   request(family, protocol, 1<<m.Data[1], m.Data[4:4+diagSocketLen]),
		})
		switch {
		case errors.Is(err, unix.EOPNOTSUPP):
			return nil
		case err != nil && !errors.Is(err, unix.ENOENT): // it has ended by itself
			return err
		}
	}
	return nil
}

// request is for sockets in any of the states, by their ends.
func request(family, protocol byte, states uint32, socket []byte) []byte {
	b := make([]byte, 0, diagRequest)
	b = append(b, family, protocol, 0, 0)
	b = binary.NativeEndian.AppendUint32(b, states)
	return append(b, socket...)
}

// only is the attribute that has the kernel list what is connected to an address: struct inet_diag_bc_op, which rejects by
// jumping behind the end, then struct inet_diag_hostcond.
func only(with netip.Addr) []byte {
	const op, cond = 4, 12
	b := make([]byte, 0, unix.SizeofNlAttr+op+cond)
	b = binary.NativeEndian.AppendUint16(b, unix.SizeofNlAttr+op+cond)
	b = binary.NativeEndian.AppendUint16(b, diagBytecode)
	b = append(b, diagTarget, op+cond)
	b = binary.NativeEndian.AppendUint16(b, op+cond+4)
	b = append(b, unix.AF_INET, 32, 0, 0)
	b = binary.NativeEndian.AppendUint32(b, ^uint32(0)) // any port
	return append(b, with.AsSlice()...)
}
