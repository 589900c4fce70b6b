package pod

import (
	"context"
	"encoding/json"
	"fmt"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/hooks"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/shim/stdio"
)

// maxProcess bounds an exec's process, JSON.
const maxProcess = 4 << 20

// Start lets a created process run.
func (p *Pod) Start(ctx context.Context, id, execID string) (pid int, err error) {
	t, err := p.process(id, execID)
	if err != nil {
		return 0, err
	}
	if err := t.acquire(ctx); err != nil {
		return 0, err
	}
	defer t.release()
	if err := t.c.starting(t); err != nil {
		return 0, err
	}
	var event any
	if execID == "" {
		err = t.c.startInit(ctx)
		event = &eventsapi.TaskStart{ContainerID: id, Pid: uint32(t.c.vm().PID())}
	} else {
		err = t.c.startExec(ctx, t)
		event = &eventsapi.TaskExecStarted{ContainerID: id, ExecID: execID, Pid: uint32(t.c.vm().PID())}
	}
	if err == nil {
		err = t.c.started(t, event)
	}
	if err != nil {
		t.c.notStarted(t, statusNotStarted)
		return 0, fmt.Errorf("start %s: %w", t.name(), t.c.vm().explain(err))
	}
	if execID == "" {
		t.c.poststart(ctx)
	}
	return t.c.vm().PID(), nil
}

// starting takes a process into the state in which its exit waits for its start.
func (c *container) starting(t *process) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := t.state.check(opStart, t.name()); err != nil {
		return err
	}
	if t.execID != "" {
		if err := c.init.state.check(opExec, c.init.name()); err != nil {
			return err
		}
	}
	t.state = Starting
	return nil
}

// startInit lets the first process go, or go on where it was saved.
func (c *container) startInit(ctx context.Context) error {
	r := &api.ContainerRequest{Id: c.guestID}
	if c.saved == nil {
		_, err := c.vm().guest.StartContainer(ctx, r)
		return err
	}
	err := c.vm().wake(ctx)
	if err == nil && c.saved.Paused {
		_, err = c.vm().guest.ResumeContainer(ctx, r)
	}
	return err
}

func (c *container) startExec(ctx context.Context, t *process) error {
	host, err := stdio.Open(ctx, t.stdio, t.owner())
	if err != nil {
		return err
	}
	names, err := t.attach(host, c.vm().guest)
	if err != nil {
		return err
	}
	c.mu.Lock()
	cols, rows := t.cols, t.rows
	c.mu.Unlock()
	_, err = c.vm().guest.ExecProcess(ctx, &api.ExecProcessRequest{
		Id: c.guestID, ExecId: t.execID, Process: t.spec, Stdio: names, Columns: cols, Rows: rows,
	})
	if err != nil {
		return err
	}
	c.mu.Lock()
	resized := t.cols != cols || t.rows != rows
	cols, rows = t.cols, t.rows
	c.mu.Unlock()
	if resized {
		// An exec that has already ended has no terminal.
		c.vm().guest.ResizePty(ctx, &api.ResizePtyRequest{Id: c.guestID, ExecId: t.execID, Columns: cols, Rows: rows})
	}
	return nil
}

// poststart runs the hooks after init's start. Their failure is logged, not returned: the container runs.
func (c *container) poststart(ctx context.Context) {
	err := hooks.Run(ctx, "poststart", c.hooks.Poststart,
		specs.State{ID: c.id, Status: specs.StateRunning, Pid: c.vm().PID(), Bundle: c.bundle})
	if err != nil {
		c.log.Warn("poststart", "error", err)
	}
}

// Exec adds a process to a running container. It runs after Start.
func (p *Pod) Exec(id, execID string, process []byte, config stdio.Config) error {
	c, err := p.get(id)
	if err != nil {
		return err
	}
	b, err := execSpec(process, config.Terminal)
	if err != nil {
		return fmt.Errorf("exec %s: %w", execID, err)
	}
	t := newProcess(c, execID, config)
	t.spec = b
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.init.state.check(opExec, c.init.name()); err != nil {
		return err
	}
	if c.execs[execID] != nil {
		return errdefs.ErrAlreadyExists.WithMessage(fmt.Sprintf("container %s already has an exec %s", id, execID))
	}
	c.execs[execID] = t
	c.events.Send(&eventsapi.TaskExecAdded{ContainerID: id, ExecID: execID})
	return nil
}

// execSpec checks an exec's process and leaves out what only means something on the host.
func execSpec(b []byte, terminal bool) ([]byte, error) {
	if len(b) > maxProcess {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("the process is larger than %d MiB", maxProcess>>20))
	}
	var s specs.Process
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("it is not an OCI process: %v", err))
	}
	if len(s.Args) == 0 {
		return nil, errdefs.ErrInvalidArgument.WithMessage("it names no command to run")
	}
	s.Terminal = terminal // what containerd's stdio is made for decides
	spec.Process(&s)
	return json.Marshal(s)
}
