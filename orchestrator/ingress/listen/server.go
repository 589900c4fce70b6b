package listen

import (
	"context"
	"errors"
	"log"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	// maxHeader is what a request's header may take, in bytes.
	maxHeader = 64 << 10
	// idle is how long a connection may be without a request. Load balancers have ten minutes, and want to be the first to close.
	idle = 620 * time.Second
	// An HTTP/2 connection that says nothing is asked whether it is alive.
	pingAfter   = 30 * time.Second
	pingTimeout = 15 * time.Second
	maxStreams  = 1000
	// window is how much of an upload may be on its way in a stream, in bytes.
	window = 1 << 20
)

// Server serves HTTP/1.1 and HTTP/2, by TLS and without, on a port that it can hand over.
type Server struct {
	http  http.Server
	l     *Listener
	hello time.Duration

	mu      sync.Mutex
	fresh   map[net.Conn]struct{} // whose first request hasn't come yet
	changed chan struct{}         // closed when there is one less
}

// NewServer makes a server of what comes in by l, which is its own from then on.
func NewServer(l *net.TCPListener, o Options, handler http.Handler, errorLog *log.Logger) *Server {
	s := &Server{hello: o.Hello, fresh: map[net.Conn]struct{}{}, changed: make(chan struct{})}
	s.http = http.Server{
		Handler:                      handler,
		ReadHeaderTimeout:            s.hello,
		IdleTimeout:                  idle,
		MaxHeaderBytes:               maxHeader,
		DisableGeneralOptionsHandler: true, // OPTIONS * is for the sandbox's server to answer
		ErrorLog:                     errorLog,
		ConnState:                    s.note,
		Protocols:                    new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          maxStreams,
			MaxReceiveBufferPerStream:     window,
			MaxReceiveBufferPerConnection: 4 * window,
			SendPingTimeout:               pingAfter,
			PingTimeout:                   pingTimeout,
			WriteByteTimeout:              pingTimeout + pingAfter,
		},
	}
	o.Taken = func(c net.Conn) { s.note(c, http.StateNew) } // before the server knows of it
	s.l = Split(l, o)
	s.http.Protocols.SetHTTP1(true)
	s.http.Protocols.SetHTTP2(true)
	s.http.Protocols.SetUnencryptedHTTP2(true)
	return s
}

// Serve returns when the server is closed or nothing can be accepted any more. After Drain has begun it returns nil.
func (s *Server) Serve() error {
	err := s.http.Serve(s.l)
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

func (s *Server) note(c net.Conn, state http.ConnState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if state == http.StateNew {
		s.fresh[c] = struct{}{}
		return
	}
	if _, ok := s.fresh[c]; ok {
		delete(s.fresh, c)
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// Drain takes no more connections, answers what has come by those that there are, and returns when all have ended, or ctx has.
// Upgraded connections are the handler's.
func (s *Server) Drain(ctx context.Context) error {
	stopped := s.l.Stop()
	s.http.SetKeepAlivesEnabled(false)
	// Shutdown would drop a request that it has just read.
	if err := s.served(ctx); err != nil {
		return errors.Join(stopped, err)
	}
	return errors.Join(stopped, s.http.Shutdown(ctx))
}

// served waits until each connection has brought its first request or can't do so in time any more.
func (s *Server) served(ctx context.Context) error {
	late := time.NewTimer(s.hello)
	defer late.Stop()
	for {
		s.mu.Lock()
		n, changed := len(s.fresh), s.changed
		s.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-late.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Close ends all connections that aren't upgraded.
func (s *Server) Close() error { return errors.Join(s.l.Close(), s.http.Close()) }
