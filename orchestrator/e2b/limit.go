package e2b

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"

	"github.com/containerd/errdefs"
)

// surplus is how many connections beyond the most are taken for as long as it needs to tell their clients; more wait in the kernel.
const surplus = 64

// limited is a listener of which only so many connections are open at a time.
type limited struct {
	net.Listener
	most   int
	slots  chan struct{} // has as many as are open
	closed chan struct{}
	once   sync.Once
}

func limit(l net.Listener, most int) *limited {
	return &limited{Listener: l, most: most, slots: make(chan struct{}, most+surplus), closed: make(chan struct{})}
}

// Accept is of net.Listener.
func (l *limited) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	return &connection{Conn: c, surplus: len(l.slots) > l.most, free: sync.OnceFunc(func() { <-l.slots })}, nil
}

// Close is of net.Listener.
func (l *limited) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// connection gives its slot back.
type connection struct {
	net.Conn
	surplus bool
	free    func()
}

// Close is of net.Conn.
func (c *connection) Close() error {
	defer c.free()
	return c.Conn.Close()
}

// CloseWrite lets a client read the last answer that has more to say.
func (c *connection) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

type surplusKey struct{}

// noteSurplus has the requests of a connection know whether that is one too many.
func noteSurplus(ctx context.Context, c net.Conn) context.Context {
	if c, ok := c.(*connection); ok && c.surplus {
		return context.WithValue(ctx, surplusKey{}, true)
	}
	return ctx
}

// tooMany is why a request isn't served, if its connection is one too many.
func (s *Server) tooMany(r *http.Request) error {
	if r.Context().Value(surplusKey{}) == nil {
		return nil
	}
	return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("the API has %d connections open, which is the most it may have: try again, or use one for several requests", s.options.MaxConnections))
}
