package pod

import (
	"context"
	"fmt"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/undo"
)

// errHeld is why nothing is done with a pod that is held.
var errHeld = errdefs.ErrFailedPrecondition.WithMessage("the pod is held, as those of the warm pool are: nothing can be done with it but a kill until it is released")

// Hold has the machine stand still until Release, its memory where it is and the work in it at rest, so that it takes no CPU
// and nothing in it sees the time pass. Meanwhile nothing else can be asked of the pod. A signal to one of its containers, or the
// deletion of one, ends the machine: nobody in it could answer. After an error it goes on.
func (p *Pod) Hold(ctx context.Context) (err error) {
	v, err := p.live()
	if err != nil {
		return err
	}
	done, err := p.unchanged(ctx, v.timeout)
	if err != nil {
		return err
	}
	defer done()
	if v, err = p.live(); err != nil { // it may have been put back meanwhile
		return err
	}
	s, err := p.keep(v)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("hold the pod: %w", v.explain(err))
		}
	}()
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { p.let(s); return nil })
	u.Push(func() error { v.letGoOn(); return nil })
	limited, cancel := context.WithTimeout(ctx, v.timeout(holdLimit))
	defer cancel()
	if err := v.guest.Freeze(limited); err != nil {
		return err
	}
	u.Push(func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), v.timeout(holdLimit))
		defer cancel()
		return v.machine.Resume(ctx)
	})
	if err := v.machine.Pause(limited); err != nil {
		return err
	}
	go func() {
		select {
		case <-v.down:
			p.let(s)
		case <-s.over:
		}
	}()
	p.announce(func(id string) any { return &eventsapi.TaskPaused{ContainerID: id} })
	return nil
}

// Release has the machine go on after Hold, with the clock put right before anything works in it. It is nothing to do for one
// that isn't held. After an error, also that of the context, the machine is of no use: it stands still, or has ended, as it isn't
// known whether the work in it goes on.
func (p *Pod) Release(ctx context.Context) error {
	v, err := p.live()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, v.timeout(holdLimit))
	defer cancel()
	if err := p.changes.Acquire(ctx, allChanges); err != nil {
		return fmt.Errorf("release the pod: %w", err)
	}
	defer p.changes.Release(allChanges)
	s := p.stands()
	if s == nil || !s.held {
		return nil
	}
	if err := v.goOn(ctx); err != nil {
		err = v.explain(err)
		v.kill("it can't be released")
		return fmt.Errorf("release the pod: %w", err)
	}
	p.let(s)
	p.announce(func(id string) any { return &eventsapi.TaskResumed{ContainerID: id} })
	return nil
}

// goOn has the CPUs go on, and the work in the guest: the agent finds the call when they do, and needn't wait for QEMU's word on that.
func (v *vm) goOn(ctx context.Context) error {
	ctx, giveUp := context.WithCancel(ctx)
	defer giveUp()
	thawed := make(chan error, 1)
	go func() { thawed <- v.guest.Thaw(ctx) }()
	if err := v.machine.Resume(ctx); err != nil {
		return err
	}
	return <-thawed
}

// keep begins the stillness of a hold, with the changes kept away.
func (p *Pod) keep(v *vm) (*stillness, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.busy():
		return nil, errdefs.ErrUnavailable.WithMessage("a container is being created, or the pod put back: try again when it is")
	case v.asleep.Load():
		return nil, errdefs.ErrFailedPrecondition.WithMessage("the pod has not been started since it was made from a snapshot")
	}
	s := &stillness{over: make(chan struct{}), held: true, vm: v}
	s.giveUp = func(error) { _ = v.discard() } // which logs
	v.held.Store(true)
	v.kept.Store(true)
	p.still = s
	return s, nil
}

// let ends the stillness of a hold. Idempotent.
func (p *Pod) let(s *stillness) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.still == s {
		s.vm.held.Store(false)
		s.vm.kept.Store(false)
		p.still = nil
		close(s.over)
	}
}

// held tells whether the pod is held.
func (p *Pod) held() bool {
	s := p.stands()
	return s != nil && s.held
}

// announce tells containerd of all containers that run.
func (p *Pod) announce(event func(id string) any) {
	for _, id := range p.ids() {
		c, err := p.get(id)
		if err != nil {
			continue // deleted since
		}
		c.mu.Lock()
		if c.init.state == Running {
			c.events.Send(event(id))
		}
		c.mu.Unlock()
	}
}
