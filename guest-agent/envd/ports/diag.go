package ports

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

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
	// Where a struct inet_diag_msg has the family and the local address, and its size.
	family       = 0
	localAddress = 8
	messageSize  = 72
	// answerSize is the most that the kernel puts into one answer to a dump, in bytes.
	answerSize = 32 << 10
	// answerTimeout is for a kernel that owes an answer, which it gives before the request returns.
	answerTimeout = time.Second
)

// diag asks the kernel which sockets listen. Its tables in /proc have those that are connected as well, and to read any of them goes
// through all of the kernel's hash table for these: a hundred times as much work. An idle sandbox does little else than this, so
// the socket isn't the runtime's poller's: there is nothing to wait for, and each wait wakes another thread.
type diag struct {
	fd     int
	seq    uint32 // of the latest request
	answer []byte
}

func newDiag() (_ *diag, err error) {
	d := &diag{answer: make([]byte, answerSize)}
	if d.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG); err != nil {
		return nil, fmt.Errorf("open a socket to ask for sockets: %w", err)
	}
	limit := unix.NsecToTimeval(answerTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(d.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return nil, errors.Join(err, unix.Close(d.fd))
	}
	return d, nil
}

func (d *diag) close() { _ = unix.Close(d.fd) }

// listeners returns the addresses that are listened on.
func (d *diag) listeners() ([]netip.AddrPort, error) {
	var all []netip.AddrPort
	for _, f := range []byte{unix.AF_INET, unix.AF_INET6} {
		var err error
		if all, err = d.dump(all, f); err != nil {
			return nil, fmt.Errorf("ask which sockets listen: %w", err)
		}
	}
	return all, nil
}

// dump appends the addresses of a family.
func (d *diag) dump(all []netip.AddrPort, f byte) ([]netip.AddrPort, error) {
	request := make([]byte, unix.NLMSG_HDRLEN+requestSize)
	binary.NativeEndian.PutUint32(request, uint32(len(request)))
	binary.NativeEndian.PutUint16(request[4:], sockDiag)
	binary.NativeEndian.PutUint16(request[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	d.seq++
	binary.NativeEndian.PutUint32(request[8:], d.seq)
	body := request[unix.NLMSG_HDRLEN:]
	body[0], body[1] = f, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(body[4:], listen)
	if err := unix.Sendto(d.fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	for {
		n, _, err := unix.Recvfrom(d.fd, d.answer, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		messages, err := syscall.ParseNetlinkMessage(d.answer[:n])
		if err != nil {
			return nil, err
		}
		for _, m := range messages {
			if m.Header.Seq != d.seq { // what was left of a request that failed
				continue
			}
			switch m.Header.Type {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				return all, failure(m.Data)
			case sockDiag:
				if a, ok := listensAt(m.Data); ok {
					all = append(all, a)
				}
			}
		}
	}
}

// failure is the error of a message that ends an answer, nil if it has none.
func failure(m []byte) error {
	if len(m) < 4 {
		return nil
	}
	if code := int32(binary.NativeEndian.Uint32(m)); code < 0 {
		return unix.Errno(-code)
	}
	return nil
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
