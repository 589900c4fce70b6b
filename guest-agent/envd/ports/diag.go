package ports

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	// sockDiag asks for sockets of a family, or tells of one (SOCK_DIAG_BY_FAMILY of linux/sock_diag.h).
	sockDiag = 20
	// listen is the bit of sockets that listen (TCP_LISTEN of linux/tcp_states.h).
	listen = 1 << 10
	// requestSize is that of a struct inet_diag_req_v2 (linux/inet_diag.h): family, protocol, extensions, a byte of padding, the
	// states' bits, and an address that a dump doesn't go by.
	requestSize = 56
	// Where a struct inet_diag_msg has the family, the local address, and that it ends at the least.
	family       = 0
	localAddress = 8
	messageSize  = 72
)

// diag asks the kernel which sockets listen. Its tables in /proc have those that are connected as well, and to read any of them goes
// through all of the kernel's hash table for these: a hundred times as much work.
type diag struct{ c *netlink.Conn }

func newDiag() (*diag, error) {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		return nil, fmt.Errorf("open a socket to ask for sockets: %w", err)
	}
	return &diag{c}, nil
}

func (d *diag) close() { d.c.Close() }

// listeners returns the addresses that are listened on.
func (d *diag) listeners() ([]netip.AddrPort, error) {
	var all []netip.AddrPort
	for _, f := range []byte{unix.AF_INET, unix.AF_INET6} {
		request := make([]byte, requestSize)
		request[0], request[1] = f, unix.IPPROTO_TCP
		binary.NativeEndian.PutUint32(request[4:], listen)
		found, err := d.c.Execute(netlink.Message{Header: netlink.Header{Type: sockDiag, Flags: netlink.Request | netlink.Dump}, Data: request})
		if err != nil {
			return nil, fmt.Errorf("ask which sockets listen: %w", err)
		}
		for _, m := range found {
			if a, ok := listensAt(m.Data); ok {
				all = append(all, a)
			}
		}
	}
	return all, nil
}

// listensAt is the local address of a message about a socket.
func listensAt(m []byte) (netip.AddrPort, bool) {
	if len(m) < messageSize {
		return netip.AddrPort{}, false
	}
	size := 4
	if m[family] == unix.AF_INET6 {
		size = 16
	}
	a, ok := netip.AddrFromSlice(m[localAddress : localAddress+size])
	return netip.AddrPortFrom(a.Unmap(), binary.BigEndian.Uint16(m[localPort:])), ok
}
