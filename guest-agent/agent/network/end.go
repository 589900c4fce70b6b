package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// What linux/sock_diag.h and linux/inet_diag.h say.
const (
	sockDiagByFamily = 20
	sockDestroy      = 21
	sockIDSize       = 48 // struct inet_diag_sockid: ports, addresses, device, cookie
	sockIDAt         = 4  // where it is in struct inet_diag_msg
)

// The states of connections, as bits: all but those of sockets that have none, and TIME_WAIT, in which a connection has ended.
const connected = 1<<unix.BPF_TCP_ESTABLISHED | 1<<unix.BPF_TCP_SYN_SENT | 1<<unix.BPF_TCP_SYN_RECV | 1<<unix.BPF_TCP_FIN_WAIT1 |
	1<<unix.BPF_TCP_FIN_WAIT2 | 1<<unix.BPF_TCP_CLOSE_WAIT | 1<<unix.BPF_TCP_LAST_ACK | 1<<unix.BPF_TCP_CLOSING | 1<<unix.BPF_TCP_NEW_SYN_RECV

// connection is one of the guest's.
type connection struct {
	family, state uint8
	id            [sockIDSize]byte
}

// EndConnections ends all TCP connections of the guest's but those within itself. Who has one gets ECONNABORTED from it, at
// once where it waits. The kernel would go on with them otherwise, which takes no process: it sends again what isn't
// acknowledged; and who only waits for the other end would wait for ever.
func EndConnections() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return fmt.Errorf("ask the kernel for its connections: %w", err)
	}
	defer unix.Close(fd)
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		all, err := connections(fd, family)
		if err != nil {
			return fmt.Errorf("list the guest's connections: %w", err)
		}
		for _, c := range all {
			if err := c.end(fd); err != nil {
				return fmt.Errorf("end a connection to %s: %w", c.peer(), err)
			}
		}
	}
	return nil
}

// connections lists those of a family that lead out of the guest.
func connections(fd int, family uint8) (all []connection, err error) {
	if err := ask(fd, sockDiagByFamily, unix.NLM_F_DUMP, connection{family: family}, connected); err != nil {
		return nil, err
	}
	b := make([]byte, 64<<10) // more than the kernel sends at once
	for {
		n, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT) // the kernel has what comes next ready
		if err != nil {
			return nil, err
		}
		for rest := b[:n]; len(rest) > 0; {
			kind, payload, next, err := split(rest)
			if err != nil {
				return nil, err
			}
			rest = next
			switch {
			case kind == unix.NLMSG_DONE:
				return all, nil
			case kind == unix.NLMSG_ERROR && len(payload) >= 4:
				return nil, unix.Errno(-int32(native.Uint32(payload)))
			case kind != sockDiagByFamily || len(payload) < sockIDAt+sockIDSize:
				return nil, fmt.Errorf("a message of type %d", kind)
			}
			c := connection{family: payload[0], state: payload[1], id: [sockIDSize]byte(payload[sockIDAt:])}
			if !c.isInside() {
				all = append(all, c)
			}
		}
	}
}

// split takes the first message of b.
func split(b []byte) (kind uint16, payload, rest []byte, err error) {
	if len(b) < unix.SizeofNlMsghdr {
		return 0, nil, nil, errors.New("half a message")
	}
	size := int64(native.Uint32(b))
	if size < unix.SizeofNlMsghdr || size > int64(len(b)) {
		return 0, nil, nil, fmt.Errorf("a message of %d bytes", size)
	}
	aligned := min((size+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), int64(len(b)))
	return native.Uint16(b[4:]), b[unix.SizeofNlMsghdr:size], b[aligned:], nil
}

// ask sends a struct inet_diag_req_v2.
func ask(fd int, kind, flags uint16, c connection, states uint32) error {
	request := join([]byte{c.family, unix.IPPROTO_TCP, 0, 0}, number(states), c.id[:])
	b := number(uint32(unix.SizeofNlMsghdr + len(request)))
	b = native.AppendUint16(b, kind)
	b = native.AppendUint16(b, unix.NLM_F_REQUEST|flags)
	b = join(b, number(0), number(0), request)
	return unix.Sendto(fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// end ends it, if it hasn't come to its end meanwhile.
func (c connection) end(fd int) error {
	if err := ask(fd, sockDestroy, unix.NLM_F_ACK, c, 0); err != nil {
		return err
	}
	switch errno, err := answer(fd); {
	case err != nil:
		return err
	case errno == 0, errno == unix.ENOENT, errno == unix.ESRCH:
		return nil
	case errno == unix.EOPNOTSUPP && c.state == unix.BPF_TCP_FIN_WAIT2:
		return nil // one that the kernel has kept no more of than of one in TIME_WAIT
	default:
		return errno
	}
}

// address is the one at an offset: of the guest's end at 4, of the other at 20.
func (c connection) address(at int) netip.Addr {
	if c.family == unix.AF_INET {
		return netip.AddrFrom4([4]byte(c.id[at:]))
	}
	return netip.AddrFrom16([16]byte(c.id[at:])).Unmap()
}

func (c connection) peer() netip.AddrPort {
	return netip.AddrPortFrom(c.address(20), binary.BigEndian.Uint16(c.id[2:]))
}

// isInside tells whether both ends are in the guest.
func (c connection) isInside() bool {
	own, peer := c.address(4), c.address(20)
	return peer.IsLoopback() || peer == own
}
