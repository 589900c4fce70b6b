package lifecycle

import (
	"context"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// Begin writes a build down whose snapshot is going to be made, and returns what that is to be called. Until done is called nobody
// takes it for forgotten; then it has to be a template's, or its snapshot is deleted.
func (e *Engine) Begin(ctx context.Context, b db.Build) (snapshot string, done func(), err error) {
	b.Snapshot = buildSnapshot(b.ID)
	if done, err = e.keep(b.ID); err != nil {
		return "", nil, err
	}
	if err := e.db.BeginBuild(ctx, b); err != nil {
		done()
		return "", nil, err
	}
	return b.Snapshot, done, nil
}

// Keep has a build's snapshot stay until done is called, whatever becomes of its template. One that is no more is
// errdefs.ErrNotFound.
func (e *Engine) Keep(ctx context.Context, build string) (done func(), err error) {
	if done, err = e.keep(build); err != nil {
		return nil, err
	}
	if _, err := e.db.Build(ctx, build); err != nil {
		done()
		return nil, err
	}
	return done, nil
}

// Tidy has the snapshots of machines be deleted soon that nobody needs any more.
func (e *Engine) Tidy() { e.background(e.sweep) }

// dropped is how many want a build that is being deleted.
const dropped = -1

func (e *Engine) keep(build string) (done func(), err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.wanted[build] == dropped {
		return nil, errdefs.ErrNotFound.WithMessage("build " + build + " has just been deleted")
	}
	e.wanted[build]++
	return sync.OnceFunc(func() {
		e.mu.Lock()
		if e.wanted[build]--; e.wanted[build] == 0 {
			delete(e.wanted, build)
		}
		e.mu.Unlock()
		e.background(e.sweep)
	}), nil
}

// drop takes those of the builds that nobody wants, whom nobody can want then until forget is called.
func (e *Engine) drop(builds []db.Build) (taken map[string]bool, forget func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	taken = map[string]bool{}
	for _, b := range builds {
		if e.wanted[b.ID] == 0 {
			e.wanted[b.ID] = dropped
			taken[b.ID] = true
		}
	}
	return taken, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		for id := range taken {
			delete(e.wanted, id)
			delete(e.promoting, id)
		}
	}
}
