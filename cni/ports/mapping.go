package ports

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Bounds of what is open at a time.
const (
	maxConnections  = 512  // of a mapping, by TCP
	maxAssociations = 256  // of a mapping, by UDP: clients, each with a socket
	maxAll          = 4096 // connections and associations of all mappings
)

// dialTimeout bounds how long a sandbox may take to answer a connection, before Config.Timeout.
const dialTimeout = 10 * time.Second

// mapping is a port that a sandbox has. Its methods but serving are Run's to call.
type mapping struct {
	server  *Server
	lease   Lease
	address netip.Addr // the sandbox's
	err     error      // why it isn't bound

	stop    context.CancelFunc // nil: not bound
	ctx     context.Context    // ends with it
	serving sync.WaitGroup
	limit   limit
}

func (m *mapping) bound() bool { return m.stop != nil }

// bind listens at the host's port. The names of errors are Update's.
func (m *mapping) bind(ctx context.Context) error {
	// The sockets are as the kernel has them: MPTCP ones can't be spliced.
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	at := netip.AddrPortFrom(m.lease.HostIP, m.lease.HostPort).String()
	var socket io.Closer
	var serve func()
	switch m.lease.Protocol {
	case TCP:
		l, err := lc.Listen(ctx, "tcp4", at)
		if err != nil {
			return m.bindError(err)
		}
		m.limit = newLimit(maxConnections)
		socket, serve = l, func() { m.serveTCP(l.(*net.TCPListener)) }
	case UDP:
		c, err := lc.ListenPacket(ctx, "udp4", at)
		if err != nil {
			return m.bindError(err)
		}
		r, err := newRelay(m, c.(*net.UDPConn))
		if err != nil {
			return errors.Join(err, c.Close())
		}
		m.limit = newLimit(maxAssociations)
		socket, serve = c, r.serve
	}
	m.ctx, m.stop = context.WithCancel(context.Background())
	context.AfterFunc(m.ctx, func() { _ = socket.Close() })
	m.serving.Go(serve)
	return nil
}

func (m *mapping) bindError(err error) error {
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("port %s of the host is another process's (ss -tulpn tells whose): %w", m.lease.Port, errdefs.ErrConflict)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Errorf("port %s: the host has no such address: %w", m.lease.Port, errdefs.ErrInvalidArgument)
	}
	return fmt.Errorf("listen at port %s of the host: %w", m.lease.Port, err)
}

// cut closes all of it, connections too. When it returns, nothing reaches the sandbox any more.
func (m *mapping) cut() {
	if m.bound() {
		m.stop()
		m.serving.Wait()
	}
	_ = m.lease.File.Close()
}

// ended says whether the sandbox hasn't the port any more, and if so has Run see to it.
func (m *mapping) ended() bool {
	if m.lease.held() {
		return false
	}
	m.server.Changed()
	return true
}

// dial connects to the sandbox, by the gateway device and no other: were that gone, its address would be somebody else's.
func (m *mapping) dial(network string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(m.ctx, m.server.cfg.Timeout(dialTimeout))
	defer cancel()
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), m.server.cfg.Device) }); cerr != nil {
			return cerr
		}
		return err
	}}
	return d.DialContext(ctx, network, netip.AddrPortFrom(m.address, m.lease.ContainerPort).String())
}

// enter takes a place of the mapping's and one of all, for one connection or association.
func (m *mapping) enter() bool {
	if !m.limit.take() {
		return false
	}
	if !m.server.limit.take() {
		m.limit.give()
		return false
	}
	return true
}

func (m *mapping) leave() {
	m.server.limit.give()
	m.limit.give()
}

// limit counts places.
type limit chan struct{}

func newLimit(n int) limit { return make(limit, n) }

func (l limit) take() bool {
	select {
	case l <- struct{}{}:
		return true
	default:
		return false
	}
}

func (l limit) give() { <-l }
