package pod

import (
	"context"
	"math/rand/v2"
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
	number uint64 // random
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
	early      *Exit  // an exit that came before the start was published
	wired      *wire  // nil before there is a process in the guest
	cols, rows uint32 // an exec's terminal before its start
	// stdinClosed: the input ends as soon as there is one.
	stdinClosed bool
	isDone      bool
}

func newProcess(c *container, execID string, config stdio.Config) *process {
	return &process{
		c:      c,
		execID: execID,
		number: rand.Uint64(),
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

// wire is a process's stdio: the host's ends, and the guest's, with the copying between them.
type wire struct {
	process *process
	host    *stdio.IO
	streams []stdio.Stream
}

// wire opens the guest's streams and starts the copying between them and the host's ends, which it takes over.
func (p *process) wire(host *stdio.IO, g *guest.Guest) (_ *wire, _ *api.Stdio, err error) {
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { host.Close(); return nil })
	w := &wire{process: p, host: host}
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
		w.streams = append(w.streams, st)
		return st, nil
	}
	var st stdio.Streams
	if st.Stdin, err = open(p.stdio.Stdin, &names.Stdin); err != nil {
		return nil, nil, err
	}
	if st.Stdout, err = open(p.stdio.Stdout, &names.Stdout); err != nil {
		return nil, nil, err
	}
	if !p.stdio.Terminal {
		if st.Stderr, err = open(p.stdio.Stderr, &names.Stderr); err != nil {
			return nil, nil, err
		}
	}
	host.Attach(st)
	return w, names, nil
}

// close ends the copying.
func (w *wire) close() {
	w.host.Close()
	for _, s := range w.streams {
		s.Close() // what the guest still sends is nobody's
	}
}

// take makes the wire the process's.
func (p *process) take(w *wire) {
	p.c.mu.Lock()
	p.wired = w
	closed := p.stdinClosed
	p.c.mu.Unlock()
	if closed {
		w.host.CloseStdin()
	}
}

// attach wires the process.
func (p *process) attach(host *stdio.IO, g *guest.Guest) (*api.Stdio, error) {
	w, names, err := p.wire(host, g)
	if err != nil {
		return nil, err
	}
	p.take(w)
	return names, nil
}

// owner is whom its stdio is for.
func (p *process) owner() stdio.Owner {
	o := stdio.Owner{ID: p.execID, Namespace: p.c.state.Namespace, Log: p.c.log, Timeout: p.c.timeout}
	if p.execID == "" {
		o.ID = p.c.id
	}
	return o
}

// closeIO ends the copying, for a process that never ran or that is deleted, or whose machine has been replaced.
func (p *process) closeIO() {
	p.c.mu.Lock()
	w := p.wired
	p.c.mu.Unlock()
	if w != nil {
		w.close()
	}
}
