// Package hostile is an agent that breaks one rule, the one that its mode names, and keeps all others: what a machine
// whose guest has been taken over may do to its host. Tests put it behind machines of their own process and into real
// ones. It runs no containers; it says that it does.
package hostile

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/ttrpc"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// Modes. Silent and Die are followed by a method's name.
const (
	// Silent never answers that method.
	Silent = "silent-"
	// Die ends the machine when that method is called.
	Die = "die-"
	// Garbage sends random bytes instead of frames once a container is to be created.
	Garbage = "garbage"
	// HugeFrame sends the header of a frame that is longer than frames are, and its content, without end.
	HugeFrame = "huge-frame"
	// HugeMessage answers with a message of 4 GiB.
	HugeMessage = "huge-message"
	// Stray sends answers to calls that nobody has made.
	Stray = "stray"
	// WrongID gives each answer the number of another call.
	WrongID = "wrong-id"
	// WrongType sends each answer as what it isn't.
	WrongType = "wrong-type"
	// Twice sends each answer two times.
	Twice = "twice"
	// Torn sends answers that don't parse.
	Torn = "torn"
	// Text refuses to create a container, with half a megabyte of control characters.
	Text = "text"
	// Metrics answers Stats with as much that means nothing.
	Metrics = "metrics"
	// Undead says that it has sent each signal, and no process ever ends.
	Undead = "undead"
	// Events tells of exits and kills that there are none of, with numbers that go back and forth, without end.
	Events = "events"
	// Restless ends each stream of events after one event.
	Restless = "restless"
	// Output writes to the standard output of what it starts, without end and after its exit, and while it says that all
	// stands still.
	Output = "output"
	// Deaf reads nothing any more once a container is to be created.
	Deaf = "deaf"
	// Unheld never answers when it is to hold the channel.
	Unheld = "unheld"
	// Miscount says that it has received other bytes than it was sent when it holds the channel.
	Miscount = "miscount"
	// Chatter goes on sending when it has said that it holds the channel.
	Chatter = "chatter"
)

// mark is what comes before the mode in the id of a sandbox.
const mark = "-mode-"

// ID is the id of a sandbox whose agent is in that mode.
func ID(prefix, mode string) string { return prefix + mark + mode }

// Agent is one machine's.
type Agent struct {
	// Mode is what it does; "" is what the id says that Configure gives it.
	Mode string
	// Die ends the machine.
	Die func()
}

// Serve plays the agent until the channel ends. ctx lets go what a mode holds up.
func (a *Agent) Serve(ctx context.Context, channel io.ReadWriter) error {
	c := &wire{ReadWriter: channel, released: ctx.Done()}
	return mux.Serve(c, func(s *mux.Session) {
		v := &service{Agent: a, wire: c, session: s, boxes: map[string]*box{}, begun: make(chan struct{}), exits: make(chan *api.Event, maxBoxes)}
		v.setMode(a.Mode)
		server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(v.intercept))
		if err != nil {
			return
		}
		api.RegisterAgentService(server, v)
		_ = server.Serve(context.Background(), &listener{conn: &control{Conn: s.Control(), service: v}, session: s})
		_ = server.Close()
	})
}

// setMode takes the mode, or what an id says of it.
func (s *service) setMode(mode string) {
	if _, after, ok := strings.Cut(mode, mark); ok {
		mode = after
	}
	s.wire.mode.Store(&mode)
}

// wire is the channel; all sessions have the same.
type wire struct {
	io.ReadWriter
	released <-chan struct{}
	mode     atomic.Pointer[string]
	deaf     atomic.Bool
	mu       sync.Mutex // a write at a time
}

func (w *wire) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if held := len(b) - len(heldHeader) - heldSize; held >= 0 && bytes.HasPrefix(b[held:], heldHeader) {
		if _, err := w.ReadWriter.Write(w.spoilHeld(b, held)); err != nil {
			return 0, err
		}
		return len(b), nil
	}
	return w.ReadWriter.Write(b)
}

func (w *wire) is(mode string) bool {
	m := w.mode.Load()
	return m != nil && *m == mode
}

// Read drops what comes while deaf.
func (w *wire) Read(b []byte) (int, error) {
	n, err := w.ReadWriter.Read(b)
	if w.deaf.Load() {
		<-w.released
		return 0, io.EOF
	}
	return n, err
}

// listener hands out the session's one connection.
type listener struct {
	conn    net.Conn
	session *mux.Session
	once    sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	var c net.Conn
	l.once.Do(func() { c = l.conn })
	if c != nil {
		return c, nil
	}
	<-l.session.Done()
	return nil, net.ErrClosed
}

func (l *listener) Close() error   { return nil }
func (l *listener) Addr() net.Addr { return l.conn.LocalAddr() }
