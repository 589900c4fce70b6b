package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/agent/cgroup"
	"github.com/cubesandbox/cube/guest-agent/agent/crun"
	"github.com/cubesandbox/cube/guest-agent/agent/reap"
	"github.com/cubesandbox/cube/guest-agent/agent/rootfs"
	"github.com/cubesandbox/cube/guest-agent/agent/spec"
	"github.com/cubesandbox/cube/guest-agent/agent/stdio"
	"github.com/cubesandbox/cube/guest-agent/agent/volumes"
	"github.com/cubesandbox/cube/guest-agent/api"
)

// state is where a container is in its life.
type state string

const (
	creating state = "being created"
	created  state = "created"
	starting state = "being started"
	running  state = "running"
	pausing  state = "being paused"
	paused   state = "paused"
	resuming state = "being resumed"
	stopped  state = "stopped"
	deleting state = "being deleted"
)

// Container is one container.
type Container struct {
	m          *Manager
	id         string
	dir        string
	cgroupPath string
	group      cgroup.Group
	root       *rootfs.Root
	volumes    *volumes.Volumes
	stopWatch  context.CancelFunc // ends watchOOM
	settled    chan struct{}      // closed when the creation has succeeded, or failed and all is undone

	oomMu    sync.Mutex // makes counting and reporting of kills one step
	oomKills uint64

	mu       sync.Mutex
	state    state
	init     *process
	execs    map[string]*process // those that run; nil while crun starts one
	launched chan struct{}       // closed, and replaced, when crun has started one or failed to
	exit     *api.Event          // the first process's exit, until it is reported
	ended    chan struct{}       // closed when it has been
}

// PID is the first process's.
func (c *Container) PID() int { return c.init.pid }

// created is called when crun has created the container.
func (c *Container) created(p *process, exit <-chan reap.Exit) {
	ctx, cancel := context.WithCancel(context.Background())
	c.stopWatch = cancel
	c.mu.Lock()
	c.init, c.state = p, created
	c.mu.Unlock()
	p.io.Start()
	go c.awaitExit(p, exit)
	go func() {
		if err := c.group.WatchOOM(ctx, c.reportOOM); err != nil && ctx.Err() == nil {
			slog.Warn("kills for want of memory are only reported with exits", "container", c.id, "error", err)
		}
	}()
}

// enter takes the container from one of the states to another.
func (c *Container) enter(to state, from ...state) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range from {
		if c.state == s {
			c.state = to
			return nil
		}
	}
	return fmt.Errorf("container %s is %s: %w", c.id, c.state, errdefs.ErrFailedPrecondition)
}

// Start lets the first process go.
func (c *Container) Start(ctx context.Context) error {
	if err := c.enter(starting, created); err != nil {
		return err
	}
	err := c.m.Crun.Start(ctx, c.id, c.dir)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state == starting { // it may have ended already
		c.state = running
		if err != nil {
			c.state = created
		}
	}
	return err
}

// Exec is what a further process is made of.
type Exec struct {
	ID            string
	Process       []byte // OCI specs.Process
	Streams       stdio.Streams
	Terminal      bool
	Columns, Rows uint32
}

// Exec starts a further process and returns its pid. It takes the streams, also when it fails. When it fails, no exit
// is reported.
func (c *Container) Exec(ctx context.Context, r Exec) (_ int, err error) {
	io, err := c.m.streams(r.Streams, r.Terminal)
	if err != nil {
		r.Streams.Close()
		return 0, err
	}
	defer func() {
		if err != nil {
			io.Abandon()
		}
	}()
	if err := c.reserveExec(r.ID); err != nil {
		return 0, err
	}
	p, exit, err := c.startExec(ctx, r, io)
	if err != nil {
		c.removeExec(r.ID)
		return 0, err
	}
	c.addExec(p)
	p.io.Start()
	go c.awaitExit(p, exit)
	return p.pid, nil
}

func (c *Container) reserveExec(id string) error {
	if err := checkID("process", id); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != running {
		return fmt.Errorf("container %s is %s: %w", c.id, c.state, errdefs.ErrFailedPrecondition)
	}
	if _, ok := c.execs[id]; ok {
		return fmt.Errorf("process %s: %w", id, errdefs.ErrAlreadyExists)
	}
	c.execs[id] = nil
	return nil
}

func (c *Container) startExec(ctx context.Context, r Exec, io *stdio.Process) (*process, <-chan reap.Exit, error) {
	b, oomScoreAdj, err := spec.Process(r.Process, r.Terminal, r.Columns, r.Rows)
	if err != nil {
		return nil, nil, err
	}
	dir, err := os.MkdirTemp(c.dir, "exec")
	if err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "process.json")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		return nil, nil, err
	}
	started, err := c.m.Crun.Exec(ctx, c.id, file, dir, crun.Process{Files: io.Files(), Terminal: r.Terminal})
	if err != nil {
		return nil, nil, err
	}
	p, err := adopt(r.ID, started, io, r.Terminal)
	if err != nil {
		_ = unix.Kill(started.PID, unix.SIGKILL)
		return nil, nil, err
	}
	if oomScoreAdj != nil {
		file := fmt.Sprintf("/proc/%d/oom_score_adj", p.pid)
		if err := os.WriteFile(file, strconv.AppendInt(nil, int64(*oomScoreAdj), 10), 0); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, os.ErrNotExist) {
			slog.Warn("process keeps its OOM score", "container", c.id, "process", r.ID, "error", err)
		}
	}
	if r.Terminal && r.Columns > 0 && r.Rows > 0 {
		if err := io.Resize(uint16(r.Columns), uint16(r.Rows)); err != nil {
			slog.Warn("terminal keeps its size", "container", c.id, "error", err)
		}
	}
	return p, started.Exit, nil
}

// addExec takes a process that crun has started.
func (c *Container) addExec(p *process) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.execs[p.id] = p
	c.wake()
}

// wake tells a pause that waits for it that a process isn't being started any more. c.mu is held.
func (c *Container) wake() {
	close(c.launched)
	c.launched = make(chan struct{})
}

// removeExec forgets a process. If it was the last one that the first process's exit has waited for, that is reported.
func (c *Container) removeExec(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.execs, id)
	c.wake()
	c.settle()
}

// awaitExit waits for a process's end and reports it: kills for want of memory before, the first process's exit after
// all others'.
func (c *Container) awaitExit(p *process, exit <-chan reap.Exit) {
	e := p.await(exit)
	p.ended()
	c.reportOOM()
	event := &api.Event{
		UnixNanos: e.Time.UnixNano(),
		Event:     &api.Event_Exit{Exit: &api.Exit{Id: c.id, ExecId: p.id, Status: e.Status}},
	}
	if p.id != "" {
		c.m.Events.Add(event)
		c.removeExec(p.id)
		return
	}
	// The kernel kills the others with the first where that is the pid namespace's init; this is for the others, and for
	// what may have been on its way into the container.
	c.ending()
	if err := c.group.Kill(); err != nil {
		slog.Error("container's processes may go on", "container", c.id, "error", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != deleting {
		c.state = stopped
	}
	c.exit = event
	c.settle()
}

// settle reports the first process's exit once no other process is left. c.mu is held.
func (c *Container) settle() {
	if c.exit != nil && len(c.execs) == 0 {
		c.m.Events.Add(c.exit)
		c.exit = nil
		close(c.ended)
	}
}

// reportOOM reports kills for want of memory that haven't been reported.
func (c *Container) reportOOM() {
	c.oomMu.Lock()
	defer c.oomMu.Unlock()
	n, err := c.group.OOMKills()
	if err != nil {
		slog.Error("kills for want of memory aren't reported", "container", c.id, "error", err)
	}
	if n > c.oomKills {
		c.oomKills = n
		c.m.Events.Add(&api.Event{
			UnixNanos: time.Now().UnixNano(),
			Event:     &api.Event_Oom{Oom: &api.OOM{Id: c.id}},
		})
	}
}
