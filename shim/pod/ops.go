package pod

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/shim/hooks"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/shim/stdio"
)

const (
	// killLimit is how long a SIGKILL for init may go unanswered before it goes to the machine instead.
	killLimit = 5 * time.Second
	// maxProcess bounds an exec's process, JSON.
	maxProcess = 4 << 20
)

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
		_, err = t.c.vm.guest.StartContainer(ctx, &api.ContainerRequest{Id: id})
		event = &eventsapi.TaskStart{ContainerID: id, Pid: uint32(t.c.vm.PID())}
	} else {
		err = t.c.startExec(ctx, t)
		event = &eventsapi.TaskExecStarted{ContainerID: id, ExecID: execID, Pid: uint32(t.c.vm.PID())}
	}
	if err == nil {
		err = t.c.started(t, event)
	}
	if err != nil {
		t.c.notStarted(t, statusNotStarted)
		return 0, fmt.Errorf("start %s: %w", t.name(), t.c.vm.explain(err))
	}
	if execID == "" {
		t.c.poststart(ctx)
	}
	return t.c.vm.PID(), nil
}

// starting takes a process into the state in which its exit waits for its start.
func (c *container) starting(t *process) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := t.state.check(opStart, t.name()); err != nil {
		return err
	}
	if t.execID != "" && c.initExited {
		return Stopped.check(opExec, c.init.name())
	}
	t.state = Starting
	return nil
}

func (c *container) startExec(ctx context.Context, t *process) error {
	host, err := stdio.Open(ctx, t.stdio, stdio.Owner{ID: t.execID, Namespace: c.state.Namespace, Log: c.log, Timeout: c.timeout})
	if err != nil {
		return err
	}
	names, err := t.attach(host, c.vm.guest)
	if err != nil {
		return err
	}
	c.mu.Lock()
	cols, rows := t.cols, t.rows
	c.mu.Unlock()
	_, err = c.vm.guest.ExecProcess(ctx, &api.ExecProcessRequest{
		Id: c.id, ExecId: t.execID, Process: t.spec, Stdio: names, Columns: cols, Rows: rows,
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
		c.vm.guest.ResizePty(ctx, &api.ResizePtyRequest{Id: c.id, ExecId: t.execID, Columns: cols, Rows: rows})
	}
	return nil
}

// poststart runs the hooks after init's start. Their failure is logged, not returned: the container runs.
func (c *container) poststart(ctx context.Context) {
	err := hooks.Run(ctx, "poststart", c.hooks.Poststart,
		specs.State{ID: c.id, Status: specs.StateRunning, Pid: c.vm.PID(), Bundle: c.bundle})
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

// Kill sends a signal to a process, or with all to every process of the container.
func (p *Pod) Kill(ctx context.Context, id, execID string, signal uint32, all bool) error {
	t, err := p.process(id, execID)
	if err != nil {
		return err
	}
	c := t.c
	c.mu.Lock()
	state := t.state
	c.mu.Unlock()
	if err := state.check(opKill, t.name()); err != nil {
		return err
	}
	if execID != "" && state < Running {
		return Created.check(opExec, t.name()) // there is no process yet
	}
	ends := execID == "" && signal == uint32(unix.SIGKILL)
	if ends {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.timeout(killLimit))
		defer cancel()
	}
	_, err = c.vm.guest.SignalProcess(ctx, &api.SignalProcessRequest{Id: id, ExecId: execID, Signal: signal, All: all})
	if ends && errors.Is(err, context.DeadlineExceeded) {
		c.vm.kill("its agent doesn't answer a SIGKILL for " + t.name())
		return nil
	}
	if errors.Is(err, guest.ErrGone) {
		// The machine has ended with the answer under way, as it does soon after its last process: this one has, too.
		return nil
	}
	if err != nil {
		return fmt.Errorf("signal %s: %w", t.name(), err)
	}
	return nil
}

// Status is a process as State tells it.
type Status struct {
	Bundle string
	PID    int
	State  State
	Stdio  stdio.Config
	Exit   Exit // zero before it has stopped
}

// State answers from memory.
func (p *Pod) State(id, execID string) (Status, error) {
	t, err := p.process(id, execID)
	if err != nil {
		return Status{}, err
	}
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	return Status{Bundle: t.c.bundle, PID: t.c.vm.PID(), State: t.state, Stdio: t.stdio, Exit: t.exit}, nil
}

// Wait waits for a process's exit, its output and the exit's event.
func (p *Pod) Wait(ctx context.Context, id, execID string) (Exit, error) {
	t, err := p.process(id, execID)
	if err != nil {
		return Exit{}, err
	}
	select {
	case <-t.done:
	case <-ctx.Done():
		return Exit{}, ctx.Err()
	}
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	return t.exit, nil
}

// Delete forgets a process that has stopped or never ran. With the container's init the machine goes.
func (p *Pod) Delete(ctx context.Context, id, execID string) (pid int, exit Exit, err error) {
	t, err := p.process(id, execID)
	if err != nil {
		return 0, Exit{}, err
	}
	if err := t.acquire(ctx); err != nil {
		return 0, Exit{}, err
	}
	defer t.release()
	c := t.c
	c.mu.Lock()
	state := t.state
	c.mu.Unlock()
	if err := state.check(opDelete, t.name()); err != nil {
		return 0, Exit{}, err
	}
	if state == Created {
		if execID == "" {
			c.exited(t, statusKilled)
		} else {
			c.notStarted(t, 0) // as runc's shim tells it
		}
	}
	select {
	case <-t.done:
	case <-ctx.Done():
		return 0, Exit{}, ctx.Err()
	}
	if execID == "" {
		if err := c.remove(); err != nil {
			// What has stopped can always be deleted; `shim delete` follows and undoes the rest by the record.
			c.log.Error("clean up after the container", "error", err)
		}
	}
	t.closeIO()
	c.mu.Lock()
	t.state = Deleted
	exit = t.exit
	delete(c.execs, execID)
	c.mu.Unlock()
	if execID == "" {
		c.events.Send(&eventsapi.TaskDelete{
			ContainerID: id,
			Pid:         uint32(c.vm.PID()),
			ExitStatus:  exit.Status,
			ExitedAt:    timestamppb.New(exit.At),
		})
		p.settled(nil)
	}
	return c.vm.PID(), exit, nil
}

// Process is one that runs in a container. All have the machine's pid.
type Process struct {
	PID    int
	ExecID string
}

// Pids lists init and the running execs.
func (p *Pod) Pids(id string) ([]Process, error) {
	c, err := p.get(id)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	list := []Process{{PID: c.vm.PID()}} // also of a stopped one: containerd takes a task without pids for a leak
	for execID, e := range c.execs {
		if e.state == Running {
			list = append(list, Process{PID: c.vm.PID(), ExecID: execID})
		}
	}
	return list, nil
}

// Resize sets the size of a process's terminal.
func (p *Pod) Resize(ctx context.Context, id, execID string, cols, rows uint32) error {
	t, err := p.process(id, execID)
	if err != nil {
		return err
	}
	t.c.mu.Lock()
	state := t.state
	t.cols, t.rows = cols, rows
	t.c.mu.Unlock()
	if err := state.check(opResize, t.name()); err != nil {
		return err
	}
	if execID != "" && state < Running {
		return nil // it starts with that size
	}
	if _, err := t.c.vm.guest.ResizePty(ctx, &api.ResizePtyRequest{Id: id, ExecId: execID, Columns: cols, Rows: rows}); err != nil {
		return fmt.Errorf("resize the terminal of %s: %w", t.name(), err)
	}
	return nil
}

// CloseIO ends a process's input after what is in its fifo. It returns at once.
func (p *Pod) CloseIO(id, execID string) error {
	t, err := p.process(id, execID)
	if err != nil {
		return err
	}
	t.c.mu.Lock()
	state, host := t.state, t.io
	t.stdinClosed = true
	t.c.mu.Unlock()
	if err := state.check(opCloseIO, t.name()); err != nil {
		return err
	}
	if host != nil {
		host.CloseStdin()
	}
	return nil
}

// Stats returns the container's cgroup metrics, an encoded io.containerd.cgroups.v2.Metrics.
func (p *Pod) Stats(ctx context.Context, id string) ([]byte, error) {
	c, err := p.get(id)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	state := c.init.state
	c.mu.Unlock()
	if err := state.check(opStats, c.init.name()); err != nil {
		return nil, err
	}
	r, err := c.vm.guest.Stats(ctx, &api.ContainerRequest{Id: id})
	if err != nil {
		return nil, fmt.Errorf("metrics of container %s: %w", id, err)
	}
	return r.GetMetrics(), nil
}
