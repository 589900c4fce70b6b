package pod

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync/atomic"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/shim/share"
)

// shares are the files of the host that a container sees: the helper process that serves them, and the streams by which the
// guest reaches it. Nil for a container without any.
type shares struct {
	server  *share.Server
	source  string // of the first of them, for errors
	streams []*mux.Stream
	closing atomic.Bool
}

// serveShares starts the helper. What it holds is in the container's record before it has it.
func (n *creation) serveShares(ctx context.Context) error {
	if len(n.plan.Shares) == 0 {
		return nil
	}
	memory := int64(n.running().Shape().MemoryMiB) << 20
	if r := n.plan.Guest.Linux.Resources; r != nil && r.Memory != nil && r.Memory.Limit != nil && *r.Memory.Limit > 0 {
		memory = *r.Memory.Limit
	}
	s, err := share.Start(ctx, share.Config{
		Host:   n.cfg,
		ID:     n.ID,
		Dir:    n.Bundle,
		Shares: n.plan.Shares,
		Memory: memory,
		Record: func(r share.Record) error {
			n.state.Share = r
			return n.records.SaveState(n.state)
		},
		Log: n.log,
	})
	if err != nil {
		return err
	}
	n.shares = &shares{server: s, source: n.plan.Shares[0].Source}
	return nil
}

// connect gives the guest its streams to the helper, and returns what the agent is to be told of them.
func (s *shares) connect(g *guest.Guest, log *slog.Logger) ([]*api.Share, error) {
	if s == nil {
		return nil, nil
	}
	var list []*api.Share
	for i, conn := range s.server.Conns() {
		st, id, err := g.Open()
		if err != nil {
			return nil, fmt.Errorf("open a stream for shared files: %w", err)
		}
		s.streams = append(s.streams, st)
		list = append(list, &api.Share{Stream: id, File: s.server.Files()[i]})
		go relay(conn.(*net.UnixConn), st) // one end of a socketpair
	}
	go func() {
		<-s.server.Done()
		if !s.closing.Load() {
			log.Error("the helper for shared files has ended: the container sees I/O errors in its bind mounts", "status", s.server.Status())
		}
	}()
	return list, nil
}

// relay copies both ways until both ends have said that nothing more comes, or one is gone. Whoever doesn't read holds up
// whoever writes.
func relay(host *net.UnixConn, st *mux.Stream) {
	there := make(chan struct{})
	go func() {
		defer close(there)
		pass(st, host)
	}()
	pass(host, st)
	<-there
	st.Close() // share closes the host's end
}

// end is one end of a relay.
type end interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// pass copies one way. When that fails, because one of them is gone, nothing may wait for what would have come by it.
func pass(to, from end) {
	if _, err := io.Copy(to, from); err != nil {
		to.Close()
		from.Close()
		return
	}
	to.CloseWrite() // it may be gone
}

// close ends the helper and frees what it held. Of a container that has run, the guest has unmounted before.
func (s *shares) close() error {
	if s == nil {
		return nil
	}
	s.closing.Store(true)
	err := s.server.Close()
	for _, st := range s.streams {
		st.Close()
	}
	return err
}
