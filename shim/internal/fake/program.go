package fake

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// process runs one of the programs.
type process struct {
	agent     *Agent
	container string
	execID    string
	args      []string
	stdin     *mux.Stream
	stdout    *mux.Stream
	stderr    *mux.Stream
	size      string
	count     atomic.Int64

	mu     sync.Mutex
	status uint32
	ended  bool
	signal chan struct{}
	once   sync.Once
}

func (a *Agent) newProcess(container, execID string, s *specs.Process, io *api.Stdio) (*process, error) {
	p := &process{agent: a, container: container, execID: execID, args: s.Args, signal: make(chan struct{})}
	for _, st := range []struct {
		id uint32
		to **mux.Stream
	}{{io.GetStdin(), &p.stdin}, {io.GetStdout(), &p.stdout}, {io.GetStderr(), &p.stderr}} {
		if st.id == 0 {
			continue
		}
		taken, err := a.take(st.id)
		if err != nil {
			return nil, err
		}
		*st.to = taken
	}
	return p, nil
}

// take takes a stream that the host has opened.
func (a *Agent) take(id uint32) (*mux.Stream, error) {
	a.mu.Lock()
	session := a.session
	a.mu.Unlock()
	st, err := session.Take(id)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	return st, nil
}

func (p *process) startable() error {
	if programs[p.args[0]] != nil {
		return nil
	}
	p.close()
	return status.Errorf(codes.NotFound, "exec: %q: executable file not found in $PATH", p.args[0])
}

func (p *process) kill(status uint32) {
	p.once.Do(func() {
		p.mu.Lock()
		p.status = status
		p.mu.Unlock()
		close(p.signal)
		p.agent.changed.Broadcast()
		if p.stdin != nil {
			p.stdin.Close()
		}
		if (p.args[0] == "spew" || p.args[0] == "data") && p.stdout != nil {
			p.stdout.Close()
		}
	})
	if p.execID == "" {
		go p.end(status) // also one that was never started
	}
}

func (p *process) over() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended
}

func (p *process) close() {
	for _, st := range []*mux.Stream{p.stdin, p.stdout, p.stderr} {
		if st != nil {
			st.Close()
		}
	}
}

func (p *process) run() {
	if status, ends := programs[p.args[0]](p); ends {
		p.end(status)
	}
}

func (p *process) end(code uint32) {
	if p.signalled() {
		p.mu.Lock()
		code = p.status
		p.mu.Unlock()
	}
	p.close()
	p.tell(code)
}

func (p *process) tell(code uint32) {
	p.mu.Lock()
	if p.ended {
		p.mu.Unlock()
		return
	}
	p.ended = true
	p.mu.Unlock()
	a := p.agent
	if p.execID == "" {
		// A container's processes die with its init.
		a.mu.Lock()
		if c := a.containers[p.container]; c != nil {
			for id, e := range c.processes {
				if id != "" {
					e.kill(137)
				}
			}
		}
		a.mu.Unlock()
	}
	if p.execID != "" && a.LoseExits {
		return
	}
	a.pause()
	a.Emit(&api.Event{
		UnixNanos: time.Now().UnixNano(),
		Event:     &api.Event_Exit{Exit: &api.Exit{Id: p.container, ExecId: p.execID, Status: code}},
	})
}
