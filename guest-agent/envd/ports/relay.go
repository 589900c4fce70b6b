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

	"github.com/cubesandbox/cube/guest-agent/envd/accept"
)

const (
	// maxConnections bounds the connections of a port.
	maxConnections = 1024
	dialTimeout    = 5 * time.Second
)

// relay takes connections to a port of the network's address to where a program listens.
type relay struct {
	listener *accept.Listener
	target   atomic.Pointer[netip.AddrPort]
	ended    atomic.Bool // it takes no more connections
}

func newRelay(ctx context.Context, at, target netip.AddrPort) (*relay, error) {
	l, err := accept.Listen(ctx, at.String(), maxConnections)
	if err != nil {
		return nil, err
	}
	r := &relay{listener: l}
	r.target.Store(&target)
	go r.serve(ctx)
	return r, nil
}

// close takes no more connections. Those that there are go on.
func (r *relay) close() { r.listener.Close() }

func (r *relay) serve(ctx context.Context) {
	for {
		c, err := r.listener.Accept()
		if err != nil { // closed, or there are no more descriptors
			r.close()
			r.ended.Store(true)
			return
		}
		go func() {
			defer c.Close()
			if err := join(ctx, c.(*accept.Conn), *r.target.Load()); err != nil {
				slog.Debug("a connection wasn't relayed", "error", err)
			}
		}()
	}
}

// stream is a connection whose directions end one by one.
type stream interface {
	net.Conn
	CloseWrite() error
}

// join copies both ways until both have ended.
func join(ctx context.Context, c stream, target netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	dialled, err := (&net.Dialer{}).DialContext(ctx, "tcp", target.String())
	if err != nil {
		return err
	}
	there := dialled.(*net.TCPConn)
	defer there.Close()
	var both sync.WaitGroup
	for _, way := range [][2]stream{{c, there}, {there, c}} {
		both.Go(func() {
			if _, err := io.Copy(way[1], way[0]); err != nil || way[1].CloseWrite() != nil {
				c.Close()
				there.Close()
			}
		})
	}
	both.Wait()
	return nil
}
