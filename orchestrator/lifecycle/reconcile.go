package lifecycle

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// Open puts what the engines of before have left in order, and lets the engine serve. From then on deadlines are kept, and
// machines that end by themselves are noticed. It fails if it isn't known which machines there are.
//
// What was being created is removed: nobody knows of it; so is what was to end with the engine that has made it. What was in another
// transition is what its machine is. What ran and has no machine has ended, and machines without a row are removed. Members of the pool
// that can be claimed stay, others are removed. Deadlines that have passed meanwhile act at once.
func (e *Engine) Open(ctx context.Context) error {
	seen, err := e.machines.All(ctx)
	if err != nil {
		return fmt.Errorf("look for the sandboxes of before: %w", err)
	}
	members, err := e.db.Members(ctx)
	if err != nil {
		return fmt.Errorf("look for the machines of before that were kept for sandboxes: %w", err)
	}
	for _, m := range members {
		e.ledger.Set(m.ID, spare(m.Build))
	}
	e.mu.Lock()
	if e.closed || e.open {
		e.mu.Unlock()
		return errdefs.ErrFailedPrecondition.WithMessage("the engine was opened before")
	}
	boxes := make([]*box, 0, len(e.boxes))
	for _, b := range e.boxes {
		boxes = append(boxes, b)
	}
	e.open = true
	e.mu.Unlock()
	e.strays(seen, members)
	for _, b := range boxes {
		e.takeOver(b, seen[b.id])
	}
	e.background(e.lookForPressure)
	e.openPool(members, seen)
	e.background(e.sweep)
	e.background(func() { e.alarms.run(e.life, func(id string) { e.background(func() { e.due(id) }) }) })
	e.background(e.watch)
	if e.Kept != nil {
		e.background(e.retain)
	}
	if e.SampleEvery > 0 {
		e.background(e.sample)
	}
	return nil
}

// strays removes machines that no row is of.
func (e *Engine) strays(seen map[string]Seen, members []db.Member) {
	for id := range seen {
		e.mu.Lock()
		known := e.boxes[id] != nil
		e.mu.Unlock()
		if known || slices.ContainsFunc(members, func(m db.Member) bool { return m.ID == id }) {
			continue
		}
		e.Log.Warn("removing a machine that is of no sandbox", "id", id)
		e.background(func() {
			ctx, cancel := context.WithTimeout(e.last, e.Timeout(killTimeout))
			defer cancel()
			if err := e.machines.Kill(ctx, id); err != nil {
				e.Log.Error("a machine that is of no sandbox can't be removed", "id", id, "error", err)
			}
		})
	}
}

// takeOver goes on with a sandbox of an engine of before.
func (e *Engine) takeOver(b *box, seen Seen) {
	r := b.row.Load()
	switch {
	case r.Ephemeral && r.State != Killing && r.State != Creating:
		e.background(func() { e.forsake(b, r) })
	case r.State.busy():
		e.work(e.last, b, r)
	case r.State == Running && seen.State == Runs:
		up := r.clone()
		up.addr = seen.Addr
		e.publish(b, r, up)
		e.background(func() { e.enforce(up) })
	case r.State == Paused && seen.State == Still:
	default:
		e.settle(b)
	}
}

// forsake removes a sandbox that was to end with the engine that has made it. If that can't be written down, its deadline is left.
func (e *Engine) forsake(b *box, r *row) {
	_ = e.advance(e.last, b, r, outcome{event: evKill, change: func(r *row) error {
		r.Reason = "what it was made for has ended with cube"
		return nil
	}})
}

// enforce has a machine reach what its row says, if whoever changed that has died in between.
func (e *Engine) enforce(r *row) {
	ctx, cancel := context.WithTimeout(e.life, e.Timeout(writeTimeout))
	defer cancel()
	if err := e.machines.SetNetwork(ctx, r.ID, r.egress()); err != nil {
		e.Log.Error("what a sandbox reaches can't be set", "sandbox", r.ID, "error", err)
	}
}

// watch notices machines that end by themselves, or that somebody else pauses or resumes.
func (e *Engine) watch() {
	for {
		err := e.machines.Watch(e.life, func() { e.background(e.compare) }, e.heard)
		if e.life.Err() != nil {
			return
		}
		e.Log.Warn("the ends of machines aren't told any more; listening again", "error", err)
		select {
		case <-time.After(e.Timeout(firstRetry)):
		case <-e.life.Done():
			return
		}
	}
}

// compare looks at all sandboxes at rest, whose ends nobody may have told.
func (e *Engine) compare() {
	ctx, cancel := context.WithTimeout(e.life, e.Timeout(lookTimeout))
	defer cancel()
	seen, err := e.machines.All(ctx)
	if err != nil {
		e.Log.Warn("it isn't known which machines there are", "error", err)
		return
	}
	e.mu.Lock()
	var odd []*box
	for id, b := range e.boxes {
		r := b.row.Load()
		s := seen[id].State
		if r.State == Running && s != Runs || r.State == Paused && s != Still {
			odd = append(odd, b)
		}
	}
	e.mu.Unlock()
	for _, b := range odd {
		e.settle(b)
	}
	for _, m := range e.pool.ready() {
		if seen[m.id].State != Runs {
			e.lost(m)
		}
	}
}
