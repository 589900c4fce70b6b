package fake

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"path"
	"sync"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// Agent is the agent of one machine.
type Agent struct {
	machine *Machine

	// Jitter makes answers and events come after a random time up to this.
	Jitter time.Duration
	// HoldExec, if set, is waited for before the answer to a successful ExecProcess.
	HoldExec chan struct{}
	// LoseExits: exits of execs aren't told.
	LoseExits bool

	mu         sync.Mutex
	changed    *sync.Cond
	stalled    chan struct{}            // not nil: no call is answered before it is closed,
	stalls     string                   // or only those to this method, if there is one
	held       map[string]chan struct{} // by container: its creation isn't answered before it is closed
	session    *mux.Session
	containers map[string]*container
	events     []*api.Event
	dead       bool
	calls      []string
	identity   *api.ConfigureRequest
	resting    bool // for a save, or since one
	asleep     bool // as of a snapshot: its processes have yet to be run
}

func newAgent(m *Machine) *Agent {
	a := &Agent{machine: m, containers: map[string]*container{}, held: map[string]chan struct{}{}}
	a.changed = sync.NewCond(&a.mu)
	return a
}

func (a *Agent) serve(conn net.Conn) {
	defer conn.Close()
	mux.Serve(conn, func(s *mux.Session) { // ends with the machine
		a.mu.Lock()
		a.session = s
		a.mu.Unlock()
		server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(a.intercept))
		if err != nil {
			panic(err)
		}
		api.RegisterAgentService(server, a)
		l := &oneConn{conn: s.Control(), done: s.Done()}
		server.Serve(context.Background(), l) // ends with the session
		server.Close()
	})
}

// oneConn is a listener with one connection.
type oneConn struct {
	once sync.Once
	conn net.Conn
	done <-chan struct{}
}

func (l *oneConn) Accept() (net.Conn, error) {
	var c net.Conn
	l.once.Do(func() { c = l.conn })
	if c != nil {
		return c, nil
	}
	<-l.done
	return nil, errors.New("session ended")
}
func (l *oneConn) Close() error   { return nil }
func (l *oneConn) Addr() net.Addr { return l.conn.LocalAddr() }

func (a *Agent) intercept(ctx context.Context, u ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, m ttrpc.Method) (any, error) {
	a.mu.Lock()
	a.calls = append(a.calls, info.FullMethod)
	stalled := a.stalled
	if a.stalls != "" && a.stalls != path.Base(info.FullMethod) {
		stalled = nil
	}
	a.mu.Unlock()
	if stalled != nil {
		<-stalled
	}
	a.pause()
	r, err := m(ctx, u)
	a.pause()
	return r, err
}

func (a *Agent) pause() {
	if a.Jitter > 0 {
		time.Sleep(rand.N(a.Jitter))
	}
}

// Stall lets no call be answered until the returned function is called.
func (a *Agent) Stall() (goOn func()) { return a.StallAt("") }

// StallAt is Stall for the calls to one method, "" for all.
func (a *Agent) StallAt(method string) (goOn func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stalled, a.stalls = make(chan struct{}), method
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.goOn()
	}
}

// HoldCreate lets the creation of that container hang until the returned function is called, or the machine ends.
func (a *Agent) HoldCreate(id string) (release func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	held := make(chan struct{})
	a.held[id] = held
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.held[id] == held {
			close(held)
			delete(a.held, id)
		}
	}
}

// goOn lets calls be answered again. a.mu is held.
func (a *Agent) goOn() {
	if a.stalled != nil {
		close(a.stalled)
		a.stalled = nil
	}
}

// Calls are the methods called so far.
func (a *Agent) Calls() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]string(nil), a.calls...)
}

// Identity is what the agent was told last to be.
func (a *Agent) Identity() *api.ConfigureRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.identity
}

// Emit tells of an event.
func (a *Agent) Emit(e *api.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e.Sequence = uint64(len(a.events) + 1)
	a.events = append(a.events, e)
	a.changed.Broadcast()
}

func (a *Agent) die() {
	a.mu.Lock()
	a.dead = true
	for _, c := range a.containers {
		c.kill(0)
	}
	for id, held := range a.held {
		close(held)
		delete(a.held, id)
	}
	a.changed.Broadcast()
	a.goOn()
	a.mu.Unlock()
}

// Configure implements the API.
func (a *Agent) Configure(_ context.Context, r *api.ConfigureRequest) (*api.ConfigureResponse, error) {
	a.mu.Lock()
	a.identity = r
	a.mu.Unlock()
	return &api.ConfigureResponse{AgentVersion: "fake", Kernel: "fake"}, nil
}

// SetTime implements the API.
func (a *Agent) SetTime(context.Context, *api.SetTimeRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, nil
}

// Events implements the API.
func (a *Agent) Events(_ context.Context, r *api.EventsRequest, srv api.Agent_EventsServer) error {
	next := int(r.After)
	for {
		a.mu.Lock()
		for !a.dead && next >= len(a.events) {
			a.changed.Wait()
		}
		if a.dead {
			a.mu.Unlock()
			return nil
		}
		e := a.events[next]
		next++
		a.mu.Unlock()
		a.pause()
		if err := srv.Send(e); err != nil {
			return err
		}
	}
}

// Quiesce implements the API.
func (a *Agent) Quiesce(context.Context, *emptypb.Empty) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, nil
}

// Shutdown implements the API.
func (a *Agent) Shutdown(context.Context, *emptypb.Empty) (*emptypb.Empty, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.containers {
		c.kill(137)
	}
	return &emptypb.Empty{}, nil
}
