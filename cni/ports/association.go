package ports

import (
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxDatagram is what a datagram can be, in bytes.
const maxDatagram = 1 << 16

// buffers hold what arrives while it is passed on, so that those who wait for it need none.
var buffers = sync.Pool{New: func() any { return new([maxDatagram]byte) }}

// association is a client's socket, by which the sandbox knows it.
type association struct {
	conn net.Conn
	raw  syscall.RawConn
}

// newAssociation takes what dialling has returned.
func newAssociation(c net.Conn, err error) (*association, error) {
	if err != nil {
		return nil, err
	}
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &association{conn: c, raw: raw}, nil
}

// postpone has receive wait that long, from here on.
func (a *association) postpone(idle time.Duration) { _ = a.conn.SetReadDeadline(time.Now().Add(idle)) }

// send sends a datagram, or drops it where the sandbox takes none for the moment: others would wait.
func (a *association) send(b []byte) {
	_ = a.raw.Write(func(fd uintptr) bool {
		_ = unix.Send(int(fd), b, unix.MSG_DONTWAIT)
		return true
	})
}

// receive waits for a datagram and passes it on.
func (a *association) receive(pass func([]byte) error) error {
	var b *[maxDatagram]byte
	var n int
	var rerr error
	if err := a.raw.Read(func(fd uintptr) bool {
		b = buffers.Get().(*[maxDatagram]byte)
		n, rerr = unix.Read(int(fd), b[:])
		if rerr == unix.EAGAIN {
			buffers.Put(b)
			return false
		}
		return true
	}); err != nil {
		return err
	}
	defer buffers.Put(b)
	if rerr != nil {
		return rerr
	}
	return pass(b[:n])
}
