package ports

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"
)

const (
	// maxConnections bounds the connections of a port.
	maxConnections = 1024
	dialTimeout    = 5 * time.Second
)

// relay takes connections to a port of the network's address to where a program listens.
type relay struct {
	listener net.Listener
	target   atomic.Pointer[netip.AddrPort]
}

func newRelay(ctx context.Context, at, target netip.AddrPort) (*relay, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", at.String())
	if err != nil {
		return nil, err
	}
	r := &relay{listener: netutil.LimitListener(l, maxConnections)}
	r.target.Store(&target)
	go r.serve(ctx)
	return r, nil
}

// close takes no more connections. Those that there are go on.
func (r *relay) close() { r.listener.Close() }

func (r *relay) serve(ctx context.Context) {
	for {
		c, err := r.listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			if err := join(ctx, c, *r.target.Load()); err != nil {
				slog.Debug("a connection wasn't relayed", "error", err)
			}
		}()
	}
}

// halfCloser is a connection whose directions end one by one.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// join copies both ways until both have ended.
func join(ctx context.Context, c net.Conn, target netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	there, err := (&net.Dialer{}).DialContext(ctx, "tcp", target.String())
	if err != nil {
		return err
	}
	defer there.Close()
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{c, there}, {there, c}} {
		both.Go(func() {
			_, err := io.Copy(way[1], way[0])
			half, ok := way[1].(halfCloser)
			if err != nil || !ok || half.CloseWrite() != nil {
				c.Close()
				there.Close()
			}
		})
	}
	both.Wait()
	return nil
}
