package server

import (
	"context"
	"fmt"
	"sync"
)

// gate lets calls that change containers in, any number at a time, or is closed with none inside. The zero value is open.
type gate struct {
	mu      sync.Mutex
	inside  int
	closed  bool
	changed chan struct{} // closed when any of it has changed; nil while nobody waits
}

// enter waits until the gate is open and goes in, until leave.
func (g *gate) enter(ctx context.Context) error {
	if err := g.await(ctx, func() bool {
		if g.closed {
			return false
		}
		g.inside++
		return true
	}); err != nil {
		return fmt.Errorf("the containers are at rest for a save of the machine: %w", err)
	}
	return nil
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside--
	g.wake()
}

// close lets nobody in any more and waits for those who are inside. Only one may, until open; after an error it is open.
func (g *gate) close(ctx context.Context) error {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	if err := g.await(ctx, func() bool { return g.inside == 0 }); err != nil {
		g.open()
		return fmt.Errorf("wait for changes of containers that are under way: %w", err)
	}
	return nil
}

// open lets all in. Idempotent.
func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = false
	g.wake()
}

// await waits until done, which is called with g.mu held, answers true.
func (g *gate) await(ctx context.Context, done func() bool) error {
	for {
		g.mu.Lock()
		if ctx.Err() == nil && done() {
			g.mu.Unlock()
			return nil
		}
		if g.changed == nil {
			g.changed = make(chan struct{})
		}
		changed := g.changed
		g.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// wake has those who wait look again. g.mu is held.
func (g *gate) wake() {
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}
