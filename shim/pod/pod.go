// Package pod is one machine and the containers in it: create, start, exec, signals, exits, delete, and what happens when
// the machine dies underneath. It knows containerd only by the order and content of its events; how requests come in is
// package task's.
//
// The machine is made by the first container, the leader, or for the pod itself (StartMachine). It ends with the last
// container that could still run; one that was made for the pod, or for the pod's sandbox container, ends with that.
// Where there is no machine any more, everything is answered from memory.
//
// Locks are small and never held across I/O. What is slow (start, delete) holds a token of its process, so that state,
// pids and waiting always answer from memory, also for a container whose neighbour is stuck. A container's lock is never
// taken while the pod's is held, nor the other way round.
package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/semaphore"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

var errShuttingDown = errdefs.ErrUnavailable.WithMessage("the shim is shutting down")

// Env is what a Pod works with.
type Env struct {
	// ID is the pod's: the group that its containers name, or the id of the only one. It becomes part of the names that
	// the machine has on the host.
	ID string
	// Namespace is containerd's.
	Namespace string
	// Dir keeps the pod's records.
	Dir    record.Pod
	Events *Events
	Log    *slog.Logger
	// Launcher returns the maker of machines for a configuration.
	Launcher func(*config.Config) vmm.Launcher
	// Cleanup undoes all that a machine's directory stands for, and removes it.
	Cleanup func(cfg *config.Config, machineDir string) error
	// Snapshots returns the store of saved machines for a configuration.
	Snapshots func(*config.Config) *snapshot.Store
	// Network gives the pod its place in the host's network.
	Network Network
}

// Pod is the machine that a shim serves, with its containers.
type Pod struct {
	env Env
	// ctx ends when the shim does; what is being created then is given up.
	ctx    context.Context
	cancel context.CancelFunc

	mu    sync.Mutex
	slots map[string]*slot
	// machine is nil before it is asked for, and again when it has ended and nothing tells of it any more.
	machine *machine
	rolling bool       // a rollback is under way
	still   *stillness // the guest's, nil while it runs
	settled sync.Cond  // something that was being made, or answered, has come to an end
	// answering are the deletions whose answers aren't on their way yet, and deletions what they have come to, by container.
	answering int
	deletions map[string]deletion
	// common is what a pod with a machine of its own has for its containers; nil in other pods.
	common *spec.Common

	changes *semaphore.Weighted // see change
}

// slot is a container's place in the pod, from the request for it to its deletion.
type slot struct {
	c *container // nil before the guest is asked for it
	// created: the container can be asked for. Before that only the guest may tell of it.
	created bool
}

// New makes a pod without a machine.
func New(env Env) *Pod {
	p := &Pod{env: env, slots: map[string]*slot{}, deletions: map[string]deletion{}, changes: semaphore.NewWeighted(allChanges)}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.settled.L = &p.mu
	return p
}

// Name is the pod's id.
func (p *Pod) Name() string { return p.env.ID }

// reserve makes sure that a container is created once.
func (p *Pod) reserve(id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		return errShuttingDown
	}
	if p.rolling {
		return errRollingBack
	}
	if p.still != nil && p.still.held {
		return errHeld
	}
	if p.slots[id] != nil {
		return errdefs.ErrAlreadyExists.WithMessage(fmt.Sprintf("container %s already exists", id))
	}
	p.slots[id] = &slot{}
	delete(p.deletions, id)
	return nil
}

// expect lets events of a container that is being created find it.
func (p *Pod) expect(c *container) {
	p.mu.Lock()
	p.slots[c.id].c = c
	p.mu.Unlock()
}

// created ends a creation that has succeeded.
func (p *Pod) created(c *container) {
	p.mu.Lock()
	p.slots[c.id].created = true
	if c.claim.first == "" && c.commonPIDs {
		c.claim.first = c.id
	}
	p.settled.Broadcast()
	p.mu.Unlock()
}

// forget gives a container's place away, after a deletion or a creation that failed. With the last container the pod
// forgets a machine that was theirs.
func (p *Pod) forget(id string) {
	p.mu.Lock()
	delete(p.slots, id)
	if len(p.slots) == 0 && p.machine != nil && p.machine.ended && !p.machine.sandbox {
		p.machine = nil
	}
	p.settled.Broadcast()
	p.mu.Unlock()
}

// deletion is what a container's deletion tells.
type deletion struct {
	pid  int
	exit Exit
}

// deleted is forget for a container that has been deleted.
func (p *Pod) deleted(id string, d deletion) {
	p.mu.Lock()
	p.deletions[id] = d
	p.mu.Unlock()
	p.forget(id)
}

// deletion finds what a deletion tells that is being answered.
func (p *Pod) deletion(id string) (d deletion, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	d, ok = p.deletions[id]
	return d, ok
}

// Answer keeps the shim from ending on behalf of another deletion until done is called. Of two at a time, both are told the
// same: whoever hears first that all is gone has the shim ended, and the other's answer may get lost with it.
func (p *Pod) Answer() (done func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answering++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.answering--; p.answering == 0 {
			clear(p.deletions)
		}
		p.settled.Broadcast()
	}
}

// get finds a container.
func (p *Pod) get(id string) (*container, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.slots[id]; s != nil && s.created {
		return s.c, nil
	}
	return nil, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("container %s is not created", id))
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

// Close ends whatever there is, in order, for a shim that has been told to end. It waits until ctx ends.
func (p *Pod) Close(ctx context.Context) error {
	p.cancel()
	done := make(chan error, 1)
	go func() { done <- p.end() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return errors.New("the virtual machine didn't stop in time")
	}
}

// end waits for what is being made to give up, and stops the machine.
func (p *Pod) end() error {
	p.mu.Lock()
	for p.busy() {
		p.settled.Wait()
	}
	m := p.machine
	p.mu.Unlock()
	if m == nil {
		return nil
	}
	return p.stop(m.vm)
}

// stop stops the machine and waits for the exits of what ran in it.
func (p *Pod) stop(v *vm) error {
	err := v.stop()
	p.mu.Lock()
	var all []*container
	for _, s := range p.slots {
		if s.created && s.c.vm() == v {
			all = append(all, s.c)
		}
	}
	p.mu.Unlock()
	for _, c := range all {
		<-c.init.done
	}
	return err
}

// busy tells whether a container or the machine is being made, or put back. p.mu is held.
func (p *Pod) busy() bool {
	for _, s := range p.slots {
		if !s.created {
			return true
		}
	}
	return p.machine != nil && p.machine.vm == nil || p.rolling
}
