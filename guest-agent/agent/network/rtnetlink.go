package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// message is one of rtnetlink(7). A library would spare this file, but it is code that an emulated machine has to
// translate anew for each pod: 35 ms more.
type message struct {
	what    string // for errors
	kind    uint16
	flags   uint16
	payload []byte
	fine    unix.Errno // an error that is none
}

var native = binary.NativeEndian

// attr is an attribute, padded.
func attr(kind uint16, value ...byte) []byte {
	b := native.AppendUint16(nil, uint16(unix.SizeofRtAttr+len(value)))
	b = append(native.AppendUint16(b, kind), value...)
	for len(b)%unix.RTA_ALIGNTO != 0 {
		b = append(b, 0)
	}
	return b
}

func number(v uint32) []byte { return native.AppendUint32(nil, v) }

func join(parts ...[]byte) (b []byte) {
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

// setLink changes flags, those of change, and the MTU, unless it is 0, of a device.
func setLink(what string, index, flags, change, mtu uint32) message {
	// struct ifinfomsg: family, padding and type, of no interest; index, flags, change.
	payload := join(number(0), number(index), number(flags), number(change))
	if mtu != 0 {
		payload = append(payload, attr(unix.IFLA_MTU, number(mtu)...)...)
	}
	return message{what: what, kind: unix.RTM_NEWLINK, payload: payload}
}

func addAddress(what string, index uint32, a netip.Prefix) message {
	return message{what: what, kind: unix.RTM_NEWADDR, flags: unix.NLM_F_CREATE | unix.NLM_F_REPLACE, payload: address(index, a)}
}

// deleteAddress deletes an address, if it is there.
func deleteAddress(what string, index uint32, a netip.Prefix) message {
	return message{what: what, kind: unix.RTM_DELADDR, payload: address(index, a), fine: unix.EADDRNOTAVAIL}
}

func address(index uint32, a netip.Prefix) []byte {
	ip := a.Addr().AsSlice()
	return join(
		[]byte{unix.AF_INET, byte(a.Bits()), 0, unix.RT_SCOPE_UNIVERSE}, number(index), // struct ifaddrmsg
		attr(unix.IFA_LOCAL, ip...), attr(unix.IFA_ADDRESS, ip...),
	)
}

// neighbour makes the kernel know a neighbour for good.
func neighbour(what string, index uint32, ip netip.Addr, mac net.HardwareAddr) message {
	state := native.AppendUint16(nil, unix.NUD_PERMANENT)
	return message{what: what, kind: unix.RTM_NEWNEIGH, flags: unix.NLM_F_CREATE | unix.NLM_F_REPLACE, payload: join(
		[]byte{unix.AF_INET, 0, 0, 0}, number(index), state, []byte{0, 0}, // struct ndmsg
		attr(unix.NDA_DST, ip.AsSlice()...), attr(unix.NDA_LLADDR, mac...),
	)}
}

// defaultRoute leads all to a gateway on the device's link, whether the address's prefix has it or not.
func defaultRoute(what string, index uint32, gateway netip.Addr) message {
	return message{what: what, kind: unix.RTM_NEWROUTE, flags: unix.NLM_F_CREATE | unix.NLM_F_REPLACE, payload: join(
		// struct rtmsg: family, lengths of destination and source, TOS, table, protocol, scope, type; flags.
		[]byte{unix.AF_INET, 0, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST},
		number(unix.RTNH_F_ONLINK),
		attr(unix.RTA_OIF, number(index)...), attr(unix.RTA_GATEWAY, gateway.AsSlice()...),
	)}
}

// send has the kernel do what the messages say, one after the other. It goes on after a failure and returns the first.
func send(messages ...message) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var b []byte
	for i, m := range messages {
		// struct nlmsghdr: length, type, flags, sequence number, port.
		b = append(b, number(uint32(unix.SizeofNlMsghdr+len(m.payload)))...)
		b = native.AppendUint16(b, m.kind)
		b = native.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_ACK|m.flags)
		b = join(b, number(uint32(i)), number(0), m.payload)
	}
	if err := unix.Sendto(fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	var first error
	for _, m := range messages {
		errno, err := answer(fd)
		if err != nil {
			return fmt.Errorf("%s: answer of the kernel: %w", m.what, err)
		}
		if errno != 0 && errno != m.fine && first == nil {
			first = fmt.Errorf("%s: %w", m.what, errno)
		}
	}
	return first
}

// answer reads the answer to the next message, which the kernel has given before the call that sent it returned.
func answer(fd int) (unix.Errno, error) {
	var b [unix.SizeofNlMsghdr + 4 + 1024]byte // struct nlmsgerr: the error, and the message that it is about
	n, _, err := unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT)
	if err != nil {
		return 0, err
	}
	if n < unix.SizeofNlMsghdr+4 || native.Uint16(b[4:]) != unix.NLMSG_ERROR {
		return 0, errors.New("it is none")
	}
	return unix.Errno(-int32(native.Uint32(b[unix.SizeofNlMsghdr:]))), nil
}
