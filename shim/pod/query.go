package pod

import (
	"context"
	"fmt"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/stdio"
)

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
	held := p.held()
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	s := Status{Bundle: t.c.bundle, PID: t.c.vm().PID(), State: t.state, Stdio: t.stdio, Exit: t.exit}
	if init := t.c.init.state; t.state == Running && (init == Pausing || init == Paused) {
		s.State = init // an exec stands still with its container
	}
	if s.State == Running && held {
		s.State = Paused
	}
	return s, nil
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

// PID is the pid of a container's processes, 0 for one that isn't there.
func (p *Pod) PID(id string) int {
	c, err := p.get(id)
	if err != nil {
		return 0
	}
	return c.vm().PID()
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
	list := []Process{{PID: c.vm().PID()}} // also of a stopped one: containerd takes a task without pids for a leak
	for execID, e := range c.execs {
		if e.state == Running {
			list = append(list, Process{PID: c.vm().PID(), ExecID: execID})
		}
	}
	return list, nil
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
	if p.held() {
		return nil, errHeld
	}
	r, err := c.vm().guest.Stats(ctx, &api.ContainerRequest{Id: c.guestID})
	if err != nil {
		return nil, fmt.Errorf("metrics of container %s: %w", id, err)
	}
	return r.GetMetrics(), nil
}
