package pod

import (
	"context"
	"time"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/shim/stdio"
)

// Exit is how a process ended.
type Exit struct {
	Status uint32
	At     time.Time
}

// Exit statuses of processes whose end the guest didn't report.
const (
	// statusKilled: as if by SIGKILL; it was ended from the host.
	statusKilled = 137
	// statusLost: the machine ended underneath it.
	statusLost = 255
	// statusNotStarted: there never was a process.
	statusNotStarted = 127
)

// process is one process of a container: its init or an exec.
type process struct {
	c      *container
	execID string // "" for init
	stdio  stdio.Config
	spec   []byte // an exec's OCI process, JSON

	// token is held by slow operations that exclude one another: start and delete.
	token chan struct{}
	// done is closed when the exit is known, its output copied and its event published, or when there never will be
	// an exit.
	done chan struct{}

	// Guarded by c.mu.
	state      State
	exit       Exit
	early      *Exit // an exit that came before the start was published
	io         *stdio.IO
	streams    []stdio.Stream // the guest's ends of io
	cols, rows uint32         // an exec's terminal before its start
	// stdinClosed: the input ends as soon as there is one.
	stdinClosed bool
	isDone      bool
}

func newProcess(c *container, execID string, config stdio.Config) *process {
	return &process{
		c:      c,
		execID: execID,
		stdio:  config,
		token:  make(chan struct{}, 1),
		done:   make(chan struct{}),
	}
}

// name is the process in errors.
func (p *process) name() string {
	if p.execID == "" {
		return "container " + p.c.id
	}
	return "exec " + p.execID + " of container " + p.c.id
}

// eventID is the process in TaskExit events: the container's id for its init.
func (p *process) eventID() string {
	if p.execID == "" {
		return p.c.id
	}
	return p.execID
}

// acquire takes the token, which release gives back.
func (p *process) acquire(ctx context.Context) error {
	select {
	case p.token <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *process) release() { <-p.token }

// finish closes done. c.mu is held.
func (p *process) finish() {
	if !p.isDone {
		p.isDone = true
		close(p.done)
	}
}

// attach opens the guest's streams and starts the copying between them and the host's ends, which it takes over.
func (p *process) attach(host *stdio.IO, g *guest.Guest) (_ *api.Stdio, err error) {
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { host.Close(); return nil })
	names := &api.Stdio{Terminal: p.stdio.Terminal}
	open := func(uri string, id *uint32) (stdio.Stream, error) {
		if uri == "" {
			return nil, nil
		}
		st, n, err := g.Open()
		if err != nil {
			return nil, err
		}
		u.Push(st.Close)
		*id = n
		return st, nil
	}
	var st stdio.Streams
	if st.Stdin, err = open(p.stdio.Stdin, &names.Stdin); err != nil {
		return nil, err
	}
	if st.Stdout, err = open(p.stdio.Stdout, &names.Stdout); err != nil {
		return nil, err
	}
	if !p.stdio.Terminal {
		if st.Stderr, err = open(p.stdio.Stderr, &names.Stderr); err != nil {
			return nil, err
		}
	}
	host.Attach(st)
	p.c.mu.Lock()
	p.io = host
	for _, s := range []stdio.Stream{st.Stdin, st.Stdout, st.Stderr} {
		if s != nil {
			p.streams = append(p.streams, s)
		}
	}
	closed := p.stdinClosed
	p.c.mu.Unlock()
	if closed {
		host.CloseStdin()
	}
	return names, nil
}

// closeIO ends the copying, for a process that never ran or that is deleted.
func (p *process) closeIO() {
	p.c.mu.Lock()
	host, streams := p.io, p.streams
	p.c.mu.Unlock()
	if host != nil {
		host.Close()
	}
	for _, s := range streams {
		s.Close() // what the guest still sends is nobody's
	}
}
