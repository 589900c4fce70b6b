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
	v, err := t.start(ctx)
	if err != nil {
		return 0, err
	}
	if execID == "" {
		t.c.poststart(ctx)
	}
	return v.PID(), nil
}

// start is Start with the token, and returns the machine that the process is in. A save comes before or after it.
func (t *process) start(ctx context.Context) (*vm, error) {
	c := t.c
	if t.execID == "" {
		done, err := c.pod.change(ctx)
		if err != nil {
			return nil, err
		}
		defer done()
	}
	if err := c.starting(t); err != nil {
		return nil, err
	}
	v := c.vm()
	var err error
	if t.execID == "" {
		if err = c.startInit(ctx, v); err == nil {
			err = c.started(t, &eventsapi.TaskStart{ContainerID: c.id, Pid: uint32(v.PID())})
		}
	} else {
		v, err = c.startExec(ctx, t)
	}
	if err != nil {
		c.notStarted(t, statusNotStarted)
		return nil, fmt.Errorf("start %s: %w", t.name(), v.explain(err))
	}
	return v, nil
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
func (c *container) startInit(ctx context.Context, v *vm) error {
	r := &api.ContainerRequest{Id: c.guestID}
	if c.saved == nil {
		_, err := v.guest.StartContainer(ctx, r)
		return err
	}
	err := v.wake(ctx)
	if err == nil && c.saved.Paused {
		_, err = v.guest.ResumeContainer(ctx, r)
	}
	return err
}

func (c *container) startExec(ctx context.Context, t *process) (*vm, error) {
	host, err := stdio.Open(ctx, t.stdio, t.owner()) // may wait for the client
	if err != nil {
		return c.vm(), err
	}
	done, err := c.pod.change(ctx)
	if err != nil {
		host.Close()
		return c.vm(), err
	}
	defer done()
	v := c.vm()
	if err = c.execIn(ctx, v, t, host); err == nil {
		err = c.started(t, &eventsapi.TaskExecStarted{ContainerID: c.id, ExecID: t.execID, Pid: uint32(v.PID())})
	}
	return v, err
}

// execIn starts an exec in a machine, with the host's ends of its stdio, which it takes over.
func (c *container) execIn(ctx context.Context, v *vm, t *process, host *stdio.IO) error {
	names, err := t.attach(host, v.guest)
	if err != nil {
		return err
	}
	c.mu.Lock()
	cols, rows := t.cols, t.rows
	c.mu.Unlock()
	_, err = v.guest.ExecProcess(ctx, &api.ExecProcessRequest{
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
		v.guest.ResizePty(ctx, &api.ResizePtyRequest{Id: c.guestID, ExecId: t.execID, Columns: cols, Rows: rows})
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
