package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/orchestrator/ingress"
)

const (
	// A port that nobody listens at is tried dialAttempts times, with waits of dialWait, twice that and so on between: a server
	// that is being started answers its first request.
	dialAttempts = 5
	dialWait     = 100 * time.Millisecond
	dialTimeout  = 5 * time.Second
	// idleTimeout is shorter than common servers' own (five seconds with Node.js and uvicorn): who closes first can't be
	// surprised by a request.
	idleTimeout = 4 * time.Second
	maxIdle     = 32
	// maxResponseHeader bounds what is read of a response's header, in bytes: the other side may be anybody's program.
	maxResponseHeader = 256 << 10
	// continueTimeout is how long a client that asked for it waits for its server's word to send the body.
	continueTimeout = time.Second
	// copyBuffer is for each response under way, in bytes, readBuffer and writeBuffer for each connection. Requests' bodies are copied in
	// pieces of 32 KiB, of which one has to fit in a writeBuffer with what frames it: otherwise each is two writes, and two packets.
	copyBuffer  = 128 << 10
	readBuffer  = 32 << 10
	writeBuffer = 33 << 10
)

// errOver is why a request ends whose sandbox's machine was restored, rolled back, paused or killed.
var errOver = errors.New("the sandbox's machine has ended")

// life is one epoch of a sandbox: all connections into its machine and all requests on them. When it ends they do, both sides of
// them, and no other life uses its connections.
type life struct {
	// The table's lock guards these.
	route   ingress.Route
	doubted bool

	http1, http2 *http.Transport

	mu      sync.Mutex
	over    bool
	streams map[*stream]struct{}
	conns   map[*conn]struct{}
}

func newLife(r ingress.Route, scale func(time.Duration) time.Duration) *life {
	l := &life{route: r, streams: map[*stream]struct{}{}, conns: map[*conn]struct{}{}}
	dial := func(ctx context.Context, _, address string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, scale(dialTimeout))
		defer cancel()
		return l.dial(ctx, r.Addr, address)
	}
	transport := func(protocols ...func(*http.Protocols, bool)) *http.Transport {
		t := &http.Transport{
			DialContext:            dial,
			Protocols:              new(http.Protocols),
			DisableCompression:     true,
			MaxIdleConnsPerHost:    maxIdle,
			IdleConnTimeout:        idleTimeout,
			MaxResponseHeaderBytes: maxResponseHeader,
			ExpectContinueTimeout:  continueTimeout,
			TLSHandshakeTimeout:    scale(dialTimeout),
			// The certificate of a server in a sandbox is whatever the sandbox has made. That the bytes come from this sandbox is
			// known from the address that is dialled.
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
			ReadBufferSize:  readBuffer,
			WriteBufferSize: writeBuffer,
		}
		for _, p := range protocols {
			p(t.Protocols, true)
		}
		return t
	}
	l.http1 = transport((*http.Protocols).SetHTTP1)
	l.http2 = transport((*http.Protocols).SetUnencryptedHTTP2, (*http.Protocols).SetHTTP2)
	return l
}

// dialError is that of a port that can't be connected to.
type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

// refused says whether the machine itself has said that nobody listens.
func (e *dialError) refused() bool { return errors.Is(e.error, unix.ECONNREFUSED) }

// dial connects to a port of the life's machine, and to nothing else, whatever a request says.
func (l *life) dial(ctx context.Context, addr netip.Addr, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil || to.Addr() != addr || to.Port() == 0 {
		return nil, &dialError{errors.New("refused: " + address + " is not the sandbox's address")}
	}
	for attempt := 1; ; attempt++ {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		if err == nil {
			return l.keep(c.(*net.TCPConn))
		}
		de := &dialError{err}
		if attempt == dialAttempts || !de.refused() {
			return nil, de
		}
		select {
		case <-ctx.Done():
			return nil, de
		case <-time.After(time.Duration(attempt) * dialWait):
		}
	}
}

// conn is a connection into the machine.
type conn struct {
	*net.TCPConn
	life *life
}

func (l *life) keep(tc *net.TCPConn) (net.Conn, error) {
	c := &conn{tc, l}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		_ = tc.Close()
		return nil, errOver
	}
	l.conns[c] = struct{}{}
	return c, nil
}

// Close is of net.Conn.
func (c *conn) Close() error {
	c.life.mu.Lock()
	delete(c.life.conns, c)
	c.life.mu.Unlock()
	return c.TCPConn.Close()
}

// join makes a request part of the life, unless that is over.
func (l *life) join(s *stream) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return false
	}
	l.streams[s] = struct{}{}
	s.life = l
	return true
}

func (l *life) leave(s *stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.streams, s)
}

// end cuts all that the life has.
func (l *life) end() {
	l.mu.Lock()
	l.over = true
	streams, conns := l.streams, l.conns
	l.streams, l.conns = map[*stream]struct{}{}, map[*conn]struct{}{}
	l.mu.Unlock()
	for s := range streams {
		s.cut()
	}
	for c := range conns {
		_ = c.SetLinger(0) // there is nobody who could take what isn't sent yet
		_ = c.TCPConn.Close()
	}
	l.http1.CloseIdleConnections()
	l.http2.CloseIdleConnections()
}
