package guest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/api"
)

// holdLimit is how long the agent may take to hold its channel.
const holdLimit = 5 * time.Second

// ErrTooOld says that the machine's agent is of before machines could be saved.
var ErrTooOld = errdefs.ErrNotImplemented.WithMessage("the virtual machine's agent is too old for the machine to be saved: make the container anew")

// Freeze brings the guest to rest for a save of its machine: all containers' processes stand still, their files are
// written to the disks, and nothing is under way in the agent channel. Calls that are made from then on wait, without
// using up their time. Whatever it returns, Thaw must be called. An error that is a context.DeadlineExceeded says that the
// agent hasn't answered; the guest may come to rest later, but no later than Thaw.
func (g *Guest) Freeze(ctx context.Context) error {
	if !g.session.CanHold() {
		return ErrTooOld
	}
	g.control.pause.begin()
	if _, err := g.AgentClient.Freeze(ctx, &api.FreezeRequest{Number: g.freezes.Add(1)}); err != nil {
		return fmt.Errorf("bring the guest to rest: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, g.scale(holdLimit))
	defer cancel()
	switch err := g.session.Hold(ctx); {
	case err == nil:
		return nil
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the agent in the virtual machine didn't hold its channel in time: %w", context.DeadlineExceeded)
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fmt.Errorf("hold the agent channel: %w", ErrGone)
}

// Thaw lets the guest go on after Freeze, whatever that has returned, with the clock put right. When it fails, the work in
// the guest may still stand still: it can be called again. Idempotent.
func (g *Guest) Thaw(ctx context.Context) error {
	defer g.control.pause.end()
	g.session.Release()
	_, err := g.AgentClient.Thaw(ctx, &api.ThawRequest{Number: g.freezes.Load(), UnixNanos: time.Now().UnixNano()})
	if err != nil {
		return fmt.Errorf("let the guest go on: %w", err)
	}
	return nil
}

// pause has calls wait. The zero value doesn't.
type pause struct {
	mu   sync.Mutex
	over chan struct{} // closed with the pause; nil without one
}

func (p *pause) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over == nil {
		p.over = make(chan struct{})
	}
}

func (p *pause) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over != nil {
		close(p.over)
		p.over = nil
	}
}

// wait waits until there is none, or the channel has ended.
func (p *pause) wait(ctx context.Context, ended <-chan struct{}) error {
	for {
		p.mu.Lock()
		over := p.over
		p.mu.Unlock()
		if over == nil {
			return nil
		}
		select {
		case <-over:
		case <-ended:
			return nil // the call says so
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
