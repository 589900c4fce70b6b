package api

import (
	"context"
	"sync"
)

// turns has those who want the same container take it one after the other. The zero value is ready.
type turns struct {
	mu  sync.Mutex
	all map[string]*turn
}

// turn is a container that somebody has or wants.
type turn struct {
	token chan struct{} // of capacity 1: who has put the token in has the turn
	users int
	who   string
}

// take waits for the turn on id, which lasts until done is called. When ctx ends before, done is nil, and other is what the
// one who has the turn does.
func (t *turns) take(ctx context.Context, id, who string) (done func(), other string) {
	t.mu.Lock()
	if t.all == nil {
		t.all = map[string]*turn{}
	}
	e := t.all[id]
	if e == nil {
		e = &turn{token: make(chan struct{}, 1)}
		t.all[id] = e
	}
	e.users++
	t.mu.Unlock()
	select {
	case e.token <- struct{}{}:
	case <-ctx.Done():
		t.mu.Lock()
		defer t.mu.Unlock()
		t.forget(id, e)
		return nil, e.who
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	e.who = who
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		<-e.token // it is there: it doesn't block
		t.forget(id, e)
	}, ""
}

// forget drops a user of e. mu is held.
func (t *turns) forget(id string, e *turn) {
	if e.users--; e.users == 0 {
		delete(t.all, id)
	}
}
