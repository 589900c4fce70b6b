// Package pod is one machine and the container in it: create, start, exec, signals, exits, delete, and what happens when
// the machine dies underneath. It knows containerd only by the order and content of its events; how requests come in is
// package task's.
//
// Locks are small and never held across I/O. What is slow (start, delete) holds a token of its process, so that state,
// pids and waiting always answer from memory.
package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm"
)

// Env is what a Pod works with.
type Env struct {
	Namespace string
	Events    *Events
	Log       *slog.Logger
	// Launcher returns the maker of machines for a configuration.
	Launcher func(*config.Config) vmm.Launcher
	// Cleanup undoes all that a machine's directory stands for, and removes it.
	Cleanup func(cfg *config.Config, machineDir string) error
}

// Pod is the machine that a shim serves, with its container.
type Pod struct {
	env Env
	// ctx ends when the shim does; what is being created then is given up.
	ctx    context.Context
	cancel context.CancelFunc

	mu        sync.Mutex
	creating  string     // the id of a container that is being created
	container *container // nil before Create and after Delete
	idle      sync.Cond  // creating has become ""
}

// New makes a pod without a machine: Create makes that.
func New(env Env) *Pod {
	p := &Pod{env: env}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.idle.L = &p.mu
	return p
}

// reserve makes sure that a container is created once, and alone.
func (p *Pod) reserve(id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	other := p.creating
	if p.container != nil {
		other = p.container.id
	}
	switch {
	case p.ctx.Err() != nil:
		return errdefs.ErrUnavailable.WithMessage("the shim is shutting down")
	case other == id:
		return errdefs.ErrAlreadyExists.WithMessage(fmt.Sprintf("container %s already exists", id))
	case other != "":
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("this shim serves container %s; a second one in its virtual machine is not supported by this version", other))
	}
	p.creating = id
	return nil
}

// settled ends a reservation, with the container or without.
func (p *Pod) settled(c *container) {
	p.mu.Lock()
	p.creating, p.container = "", c
	p.idle.Broadcast()
	p.mu.Unlock()
}

// get finds a container.
func (p *Pod) get(id string) (*container, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.container == nil || p.container.id != id {
		return nil, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("container %s is not created", id))
	}
	return p.container, nil
}

// process finds a process of a container; execID "" is its init.
func (p *Pod) process(id, execID string) (*process, error) {
	c, err := p.get(id)
	if err != nil {
		return nil, err
	}
	if execID == "" {
		return c.init, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.execs[execID]; e != nil {
		return e, nil
	}
	return nil, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("container %s has no exec %s", id, execID))
}

// Idle tells whether no container exists or is being created.
func (p *Pod) Idle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.container == nil && p.creating == ""
}

// PID is the machine's process, 0 while there is none. It never waits.
func (p *Pod) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.container == nil {
		return 0
	}
	return p.container.vm.PID()
}

// Close ends whatever there is, in order, for a shim that has been told to end. It waits until ctx ends.
func (p *Pod) Close(ctx context.Context) error {
	p.cancel()
	done := make(chan error, 1)
	go func() {
		p.mu.Lock()
		for p.creating != "" {
			p.idle.Wait()
		}
		c := p.container
		p.mu.Unlock()
		if c == nil {
			done <- nil
			return
		}
		err := c.vm.stop()
		<-c.init.done
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return errors.New("the virtual machine didn't stop in time")
	}
}
