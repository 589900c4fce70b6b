// Package accept bounds how many connections of a listener there are at a time. They stay TCP's, so that the kernel sends
// files into them itself and their directions end one by one.
package accept

import (
	"context"
	"net"
	"sync"
)

// Listener hands out connections of which each has room until it is closed.
type Listener struct {
	*net.TCPListener
	room   chan struct{}
	closed chan struct{}
	close  func() error
}

// Listen listens on a TCP address. Of more connections than most, the kernel has some wait.
func Listen(ctx context.Context, address string, most int) (*Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	tcp, closed := l.(*net.TCPListener), make(chan struct{})
	return &Listener{TCPListener: tcp, room: make(chan struct{}, most), closed: closed, close: sync.OnceValue(func() error {
		close(closed)
		return tcp.Close()
	})}, nil
}

// Accept waits for room and for a connection. After Close it is net.ErrClosed.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case l.room <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.AcceptTCP()
	if err != nil {
		<-l.room
		return nil, err
	}
	return &Conn{TCPConn: c, leave: sync.OnceFunc(func() { <-l.room })}, nil
}

// Close ends the listening. Connections go on.
func (l *Listener) Close() error { return l.close() }

// Conn is a connection that has room.
type Conn struct {
	*net.TCPConn
	leave func()
}

// Close ends the connection, in whose place there can be another one.
func (c *Conn) Close() error {
	defer c.leave()
	return c.TCPConn.Close()
}
