// Package listen has TLS and plain connections come in by one port, and serves HTTP on them until another process does. It knows
// nothing of what is served.
package listen

import (
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// recordHandshake is the first byte of a TLS connection (RFC 8446, 5.1), which no plain one begins with.
const recordHandshake = 0x16

// passingDelay is between attempts to accept where the host is short of something.
const passingDelay = 50 * time.Millisecond

// Options bound what clients can take.
type Options struct {
	TLS *tls.Config
	// Hello is how long a client may take for its first byte, for a TLS handshake, and for a request's header.
	Hello time.Duration
	// Taken, if set, is told of each connection before Accept returns it.
	Taken func(net.Conn)
	// Max is how many connections there may be at a time; more wait in the kernel.
	Max int
}

// Listener gives *tls.Conn for what begins as TLS and plain connections for the rest.
type Listener struct {
	net.Listener
	o       Options
	slots   chan struct{}
	ready   chan net.Conn
	stop    chan struct{} // closed when nothing more is to be accepted
	ended   chan struct{} // closed when nothing more is
	closed  chan struct{} // closed when nobody takes connections any more
	stopped sync.Once
	gone    sync.Once
	sorting sync.WaitGroup
	err     error // why accepting has ended; set before ready is closed

	mu     sync.Mutex
	silent map[*conn]struct{} // that have said nothing yet
}

// Split takes the connections of l. It must be closed.
func Split(l *net.TCPListener, o Options) *Listener {
	s := &Listener{Listener: l, o: o, slots: make(chan struct{}, o.Max), ready: make(chan net.Conn), stop: make(chan struct{}), ended: make(chan struct{}), closed: make(chan struct{}), silent: map[*conn]struct{}{}}
	go s.accept(l)
	return s
}

func (s *Listener) accept(l *net.TCPListener) {
	defer func() {
		close(s.ended)
		s.sorting.Wait()
		close(s.ready)
	}()
	for {
		select {
		case s.slots <- struct{}{}:
		case <-s.stop:
			s.err = net.ErrClosed
			return
		}
		c, err := l.AcceptTCP()
		if err != nil {
			<-s.slots
			if !isPassing(err) {
				s.err = err
				return
			}
			select { // until others have given something back
			case <-time.After(passingDelay):
			case <-s.stop:
			}
			continue
		}
		s.sorting.Go(func() { s.sort(&conn{TCPConn: c, slots: s.slots}) })
	}
}

// sort waits for a connection's first byte.
func (s *Listener) sort(c *conn) {
	s.mu.Lock()
	s.silent[c] = struct{}{}
	s.mu.Unlock()
	first, err := c.peek(time.Now().Add(s.o.Hello))
	s.mu.Lock()
	delete(s.silent, c)
	s.mu.Unlock()
	if err != nil {
		_ = c.Close() // it has said nothing
		return
	}
	var out net.Conn = c
	if first == recordHandshake {
		out = tls.Server(c, s.o.TLS)
	}
	if s.o.Taken != nil {
		s.o.Taken(out)
	}
	select {
	case s.ready <- out:
	case <-s.closed:
		_ = c.Close()
	}
}

// Accept is of net.Listener.
func (s *Listener) Accept() (net.Conn, error) {
	select {
	case c, ok := <-s.ready:
		if ok {
			return c, nil
		}
		return nil, s.err
	case <-s.closed:
		return nil, net.ErrClosed
	}
}

// Stop has no more connections accepted, and waits until those that were are taken by Accept or gone. A listener that another
// process has, too, goes on there.
func (s *Listener) Stop() error {
	var err error
	s.stopped.Do(func() {
		close(s.stop)
		err = s.Listener.Close()
	})
	<-s.ended // or one that has just been accepted would be left out
	s.sorting.Wait()
	return err
}

// Close is of net.Listener.
func (s *Listener) Close() error {
	s.gone.Do(func() { close(s.closed) })
	s.mu.Lock()
	for c := range s.silent {
		_ = c.TCPConn.Close() // which ends its wait
	}
	s.mu.Unlock()
	return s.Stop()
}

// isPassing says whether accepting failed for want of what others may give back, or for what the client did.
func isPassing(err error) bool {
	for _, e := range []error{unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.ECONNABORTED} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// conn gives its slot back.
type conn struct {
	*net.TCPConn
	slots chan struct{}
	once  sync.Once
}

// Close is of net.Conn.
func (c *conn) Close() error {
	c.once.Do(func() { <-c.slots })
	return c.TCPConn.Close()
}

// peek waits for the first byte, and leaves it to be read.
func (c *conn) peek(deadline time.Time) (byte, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	if err := c.SetReadDeadline(deadline); err != nil {
		return 0, err
	}
	var b [1]byte
	var n int
	var rerr error
	err = raw.Read(func(fd uintptr) bool {
		n, _, rerr = unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK)
		return rerr != unix.EAGAIN && rerr != unix.EINTR
	})
	switch {
	case err != nil:
		return 0, err
	case rerr != nil:
		return 0, rerr
	case n == 0:
		return 0, net.ErrClosed
	}
	return b[0], c.SetReadDeadline(time.Time{})
}
