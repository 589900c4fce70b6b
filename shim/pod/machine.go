package pod

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
)

// errEnded is what asks for more of a machine that has ended.
var errEnded = errdefs.ErrFailedPrecondition.WithMessage("the pod's virtual machine has ended: delete what is left of the pod and make a new one")

// machine is a pod's, from the moment that somebody asks for it.
type machine struct {
	ready chan struct{} // closed when it is there, or is not going to be
	err   error         // why it isn't; read after ready

	// All below is guarded by Pod.mu.
	vm *vm // nil before ready, and for good if there is an err
	// users are those who keep the machine: what is being created, containers whose first process isn't over, and the
	// pod itself.
	users int
	// undead are those of them that have outlived a SIGKILL.
	undead int
	// sandbox: the pod itself has the machine, with containers or without.
	sandbox bool
	// owner is the container that stands for the pod: its end is the machine's. "" if none does.
	owner string
	// first is the container whose namespaces others can join. A machine that the pod itself has is lent its own for
	// that; there it is only the pid namespace, and the next container's to have it when this one has ended.
	first string
	// ended: it isn't to be used any more. It may still be stopping.
	ended bool
}

// claim is what keeps a machine for a container, or for the pod itself (id "").
type claim struct {
	*machine
	pod *Pod
	id  string
	// given: back, with end. isUndead: counted in undead. Both are guarded by Pod.mu.
	given, isUndead bool
}

// use gives a container that is being created its claim on the machine. The first one leads: it has to make the machine,
// which the others have to await. standsFor: the container is its pod's sandbox.
func (p *Pod) use(id string, standsFor bool) (c *claim, leads bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.machine
	switch {
	case m == nil && p.common != nil:
		return nil, false, errdefs.ErrFailedPrecondition.WithMessage("the pod's sandbox is not started: start it first")
	case m == nil:
		leads = true
		m = &machine{ready: make(chan struct{}), first: id}
		if standsFor {
			m.owner = id
		}
		p.machine = m
	case m.ended, m.vm != nil && m.vm.isDown():
		return nil, false, errEnded
	case standsFor:
		return nil, false, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s is to stand for a pod that exists already", id))
	}
	m.users++
	return &claim{machine: m, pod: p, id: id}, leads, nil
}

// end gives the claim back. It tells whether the machine has ended with it, or before: then whoever calls sees to it that
// the machine stops. Idempotent.
func (c *claim) end() (ended bool) {
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	if !c.given {
		c.given = true
		c.users--
		if c.isUndead {
			c.undead--
		}
		if c.sandbox && c.id == c.first {
			c.first = ""
		}
		if c.users == 0 || c.id == c.owner && c.id != "" {
			c.ended = true
		}
	}
	return c.ended
}

// alone tells whether the machine is of no use to anybody else.
func (c *claim) alone() bool {
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	return c.users == 1 || c.id == c.owner
}

// outlived notes that the container has outlived a SIGKILL. It tells whether the machine is of no use to any other that
// has not.
func (c *claim) outlived() bool {
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	if !c.given && !c.isUndead {
		c.isUndead = true
		c.undead++
	}
	return c.undead == c.users || c.id == c.owner
}

// await waits for a machine that somebody else makes.
func (p *Pod) await(ctx context.Context, m *machine) (*vm, error) {
	select {
	case <-m.ready:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if m.err != nil {
		return nil, errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("the pod has no virtual machine, since it could not be made: %v", m.err))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return m.vm, nil
}

// has gives the machine to those who wait for it, and follows its life.
func (p *Pod) has(m *machine, v *vm) {
	p.mu.Lock()
	m.vm = v
	p.settled.Broadcast()
	p.mu.Unlock()
	close(m.ready)
	p.followLife(m, v)
}

// followLife has the machine end when v goes down, unless another has taken the place of that.
func (p *Pod) followLife(m *machine, v *vm) {
	go func() {
		<-v.down
		p.mu.Lock()
		replaced := m.vm != v
		m.ended = m.ended || !replaced
		p.mu.Unlock()
		if !replaced {
			v.stop() // logs; whoever deletes gets the error
		}
	}()
}

// hasNot tells those who wait that there is none, and lets the next one try.
func (p *Pod) hasNot(m *machine, err error) {
	m.err = err
	p.mu.Lock()
	m.ended = true
	p.machine = nil
	p.settled.Broadcast()
	p.mu.Unlock()
	close(m.ready)
}
