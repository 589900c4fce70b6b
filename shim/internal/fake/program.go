package fake

import (
	"bytes"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// process runs one of these programs, by the first argument:
//
//	exit N           ends with status N
//	echo TEXT N      writes the text and ends with status N
//	spew N           writes N bytes and ends
//	cat              copies its input to its output until the input ends
//	sleep            waits for a signal
//	leave            ends at once, but something else keeps its output open
//	anything else    is not found
type process struct {
	agent     *Agent
	container string
	execID    string
	args      []string
	stdin     *mux.Stream
	stdout    *mux.Stream
	stderr    *mux.Stream
	size      string

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
	switch p.args[0] {
	case "exit", "echo", "spew", "cat", "sleep", "leave":
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
		if p.stdin != nil {
			p.stdin.Close()
		}
		if p.args[0] == "spew" && p.stdout != nil {
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

func (p *process) number(i int) uint32 {
	n, _ := strconv.Atoi(p.args[i])
	return uint32(n)
}

func (p *process) write(r io.Reader) {
	if p.stdout != nil {
		io.Copy(struct{ io.Writer }{p.stdout}, r) // the reader may go
	}
}

func (p *process) run() {
	var code uint32
	switch p.args[0] {
	case "exit":
		code = p.number(1)
	case "echo":
		p.write(strings.NewReader(p.args[1]))
		code = p.number(2)
	case "spew":
		p.write(io.LimitReader(zeros{}, int64(p.number(1))))
	case "cat":
		if p.stdin != nil {
			p.write(p.stdin)
		}
	case "sleep":
		<-p.signal
	case "leave":
		p.tell(0)
		return
	}
	p.end(code)
}

func (p *process) end(code uint32) {
	select {
	case <-p.signal:
		p.mu.Lock()
		code = p.status
		p.mu.Unlock()
	default:
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

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return copy(b, bytes.Repeat([]byte{0}, len(b))), nil }
