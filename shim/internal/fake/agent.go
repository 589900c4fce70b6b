package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
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

	mu        sync.Mutex
	changed   *sync.Cond
	frozen    chan struct{} // not nil: no call is answered before it is closed
	session   *mux.Session
	processes map[string]*process // by exec id; "" is init
	events    []*api.Event
	dead      bool
	calls     []string
	Spec      *specs.Spec // of the container
	Identity  *api.ConfigureRequest
}

func newAgent(m *Machine) *Agent {
	a := &Agent{machine: m, processes: map[string]*process{}}
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
	frozen := a.frozen
	a.mu.Unlock()
	if frozen != nil {
		<-frozen
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

// Freeze lets no call be answered until the returned function is called.
func (a *Agent) Freeze() (thaw func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.frozen = make(chan struct{})
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.thaw()
	}
}

// thaw lets calls be answered again. a.mu is held.
func (a *Agent) thaw() {
	if a.frozen != nil {
		close(a.frozen)
		a.frozen = nil
	}
}

// Calls are the methods called so far.
func (a *Agent) Calls() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]string(nil), a.calls...)
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
	for _, p := range a.processes {
		p.kill(0)
	}
	a.changed.Broadcast()
	a.thaw()
	a.mu.Unlock()
}

// Configure implements the API.
func (a *Agent) Configure(_ context.Context, r *api.ConfigureRequest) (*api.ConfigureResponse, error) {
	a.mu.Lock()
	a.Identity = r
	a.mu.Unlock()
	return &api.ConfigureResponse{AgentVersion: "fake", Kernel: "fake"}, nil
}

// SetTime implements the API.
func (a *Agent) SetTime(context.Context, *api.SetTimeRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, nil
}

// CreateContainer implements the API.
func (a *Agent) CreateContainer(_ context.Context, r *api.CreateContainerRequest) (*api.ProcessResponse, error) {
	var s specs.Spec
	if err := json.Unmarshal(r.Spec, &s); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	for _, d := range r.Rootfs.Disks {
		if !a.machine.hasDisk(d.Serial) {
			return nil, status.Errorf(codes.NotFound, "no disk %s", d.Serial)
		}
	}
	p, err := a.newProcess(r.Id, "", s.Process, r.Stdio)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.Spec = &s
	a.processes[""] = p
	return &api.ProcessResponse{Pid: 1}, nil
}

// StartContainer implements the API.
func (a *Agent) StartContainer(_ context.Context, r *api.ContainerRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	p := a.processes[""]
	a.mu.Unlock()
	if p == nil || p.container != r.Id {
		return nil, status.Error(codes.NotFound, "no such container")
	}
	if err := p.startable(); err != nil {
		return nil, err
	}
	go p.run()
	return &emptypb.Empty{}, nil
}

// ExecProcess implements the API.
func (a *Agent) ExecProcess(_ context.Context, r *api.ExecProcessRequest) (*api.ProcessResponse, error) {
	var s specs.Process
	if err := json.Unmarshal(r.Process, &s); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	p, err := a.newProcess(r.Id, r.ExecId, &s, r.Stdio)
	if err != nil {
		return nil, err
	}
	if err := p.startable(); err != nil {
		return nil, err
	}
	a.mu.Lock()
	if init := a.processes[""]; init == nil || init.over() {
		a.mu.Unlock()
		return nil, status.Error(codes.FailedPrecondition, "the container has stopped")
	}
	a.processes[r.ExecId] = p
	a.mu.Unlock()
	go p.run()
	if a.HoldExec != nil {
		<-a.HoldExec
	}
	return &api.ProcessResponse{Pid: 2}, nil
}

// SignalProcess implements the API.
func (a *Agent) SignalProcess(_ context.Context, r *api.SignalProcessRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	p := a.processes[r.ExecId]
	if p == nil || p.over() {
		return nil, status.Error(codes.NotFound, "process already finished")
	}
	p.kill(128 + r.Signal)
	return &emptypb.Empty{}, nil
}

// ResizePty implements the API.
func (a *Agent) ResizePty(_ context.Context, r *api.ResizePtyRequest) (*emptypb.Empty, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	p := a.processes[r.ExecId]
	if p == nil {
		return nil, status.Error(codes.NotFound, "no such process")
	}
	p.size = fmt.Sprintf("%dx%d", r.Columns, r.Rows)
	return &emptypb.Empty{}, nil
}

// Size is the size that a process's terminal was given.
func (a *Agent) Size(execID string) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if p := a.processes[execID]; p != nil {
		return p.size
	}
	return ""
}

// ListPids implements the API.
func (a *Agent) ListPids(context.Context, *api.ContainerRequest) (*api.ListPidsResponse, error) {
	return &api.ListPidsResponse{Pids: []uint32{1}}, nil
}

// Stats implements the API.
func (a *Agent) Stats(context.Context, *api.ContainerRequest) (*api.StatsResponse, error) {
	b, err := proto.Marshal(&stats.Metrics{Memory: &stats.MemoryStat{Usage: 4096}})
	return &api.StatsResponse{Metrics: b}, err
}

// DeleteContainer implements the API.
func (a *Agent) DeleteContainer(context.Context, *api.ContainerRequest) (*emptypb.Empty, error) {
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
	for _, p := range a.processes {
		p.kill(137)
	}
	return &emptypb.Empty{}, nil
}

// PauseContainer implements the API.
func (a *Agent) PauseContainer(context.Context, *api.ContainerRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, nil
}

// ResumeContainer implements the API.
func (a *Agent) ResumeContainer(context.Context, *api.ContainerRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, nil
}

// UpdateContainer implements the API.
func (a *Agent) UpdateContainer(context.Context, *api.UpdateContainerRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, nil
}
