package pod

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// changeLimit is how long a save or a rollback waits for changes of containers that are under way: those that take longer
	// wait for a guest that doesn't answer.
	changeLimit = 10 * time.Second
	// allChanges is what a save or a rollback takes of Pod.changes.
	allChanges = 1 << 20
)

// change is for whoever changes a container in the guest, and what is known of it here: these may happen at the same time,
// but not while the machine is saved or put back, which finds nothing half done. It waits for that.
func (p *Pod) change(ctx context.Context) (done func(), err error) {
	if err := p.changes.Acquire(ctx, 1); err != nil {
		return nil, fmt.Errorf("the pod is being saved or put back to a snapshot: %w", err)
	}
	if p.held() {
		p.changes.Release(1)
		return nil, errHeld
	}
	return func() { p.changes.Release(1) }, nil
}

// unchanged is for saves, rollbacks and holds.
func (p *Pod) unchanged(ctx context.Context, timeout func(time.Duration) time.Duration) (done func(), err error) {
	limited, cancel := context.WithTimeout(ctx, timeout(changeLimit))
	defer cancel()
	if err := p.changes.Acquire(limited, allChanges); err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, errdefs.ErrUnavailable.WithMessage("a container of the pod is being changed, or the pod saved or put back, and that takes long: try again later")
	}
	if p.held() {
		p.changes.Release(allChanges)
		return nil, errHeld
	}
	return func() { p.changes.Release(allChanges) }, nil
}

// stillness is the time in which the guest stands still for a save, a rollback or a hold.
type stillness struct {
	over   chan struct{}
	giveUp context.CancelCauseFunc // cancels the save or the rollback, and ends the machine that is held
	held   bool
	vm     *vm // that is held
}

// standStill begins one, with the changes kept away.
func (p *Pod) standStill(v *vm, giveUp context.CancelCauseFunc) (over func()) {
	s := &stillness{over: make(chan struct{}), giveUp: giveUp}
	v.held.Store(true)
	p.mu.Lock()
	p.still = s
	p.mu.Unlock()
	return func() {
		v.held.Store(false)
		p.mu.Lock()
		p.still = nil
		p.mu.Unlock()
		close(s.over)
	}
}

// stands tells whether the guest stands still.
func (p *Pod) stands() *stillness {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.still
}

// goesOn waits for the end of a stillness, if there is one. After the limit what the guest stands still for is given up, for
// that reason; 0 is no limit. A hold, which nothing else may end, is given up at once.
func (p *Pod) goesOn(ctx context.Context, limit time.Duration, reason string) error {
	s := p.stands()
	if s == nil {
		return nil
	}
	var late <-chan time.Time
	switch {
	case s.held:
		s.giveUp(errdefs.ErrAborted.WithMessage("given up: " + reason))
	case limit > 0:
		timer := time.NewTimer(limit)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case <-s.over:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-late:
	}
	s.giveUp(errdefs.ErrAborted.WithMessage("given up: " + reason))
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-s.over:
	case <-timer.C: // whoever asks the guest next sees what it is worth
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// calledOff prefers the reason for which something was given up to the error that this has caused.
func calledOff(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && cause != nil && cause != ctx.Err() {
		return cause
	}
	return err
}
