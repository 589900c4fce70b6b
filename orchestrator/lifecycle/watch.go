package lifecycle

import (
	"cmp"
	"context"
	"slices"
	"sync"
)

// Change is news of a team's sandboxes.
type Change struct {
	// Full says that Sandboxes are all that there are: others are gone.
	Full      bool
	Sandboxes []Sandbox // oldest start first
	Gone      []string  // ids
}

// Watch calls each with all of a team's sandboxes, and then with those that have changed, until ctx or the engine ends, or each
// fails. What changes several times while each is busy is told once, as it is then.
func (e *Engine) Watch(ctx context.Context, team string, each func(Change) error) error {
	told := map[string]bool{}
	see := func(c *Change, r *row) {
		if r.Team == team && r.State.Shown() != "" {
			told[r.ID] = true
			c.Sandboxes = append(c.Sandboxes, e.sandbox(r))
		}
	}
	tell := func(c Change) error {
		slices.SortFunc(c.Sandboxes, func(a, b Sandbox) int {
			return cmp.Or(a.StartedAt.Compare(b.StartedAt), cmp.Compare(a.ID, b.ID))
		})
		return each(c)
	}
	return e.follow(ctx, func(all []*row) error {
		c := Change{Full: true}
		for _, r := range all {
			see(&c, r)
		}
		return tell(c)
	}, func(changed map[string]bool) error {
		var c Change
		for id := range changed {
			if r := e.rowOf(id); r != nil && r.State.Shown() != "" {
				see(&c, r)
			} else if told[id] {
				delete(told, id)
				c.Gone = append(c.Gone, id)
			}
		}
		if len(c.Sandboxes)+len(c.Gone) == 0 {
			return nil // others'
		}
		return tell(c)
	})
}

// rowOf is a sandbox's row as it is, nil if there is none.
func (e *Engine) rowOf(id string) *row {
	e.mu.Lock()
	b := e.boxes[id]
	e.mu.Unlock()
	if b == nil {
		return nil
	}
	return b.row.Load()
}

// feed is what one who watches hasn't been told yet: which sandboxes have changed, not how often.
type feed struct {
	mu      sync.Mutex
	changed map[string]bool
	more    chan struct{} // has room for one
}

func (f *feed) add(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changed[id] = true
	select {
	case f.more <- struct{}{}:
	default:
	}
}

func (f *feed) take() map[string]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	changed := f.changed
	f.changed = map[string]bool{}
	return changed
}

// follow calls first with all rows, and then each with the ids of sandboxes that have another row or none, until ctx or the
// engine ends, or one of both fails.
func (e *Engine) follow(ctx context.Context, first func(all []*row) error, each func(changed map[string]bool) error) error {
	if err := e.Ready(); err != nil {
		return err
	}
	f := &feed{changed: map[string]bool{}, more: make(chan struct{}, 1)}
	var all []*row
	e.mu.Lock()
	e.feeds[f] = struct{}{}
	for _, b := range e.boxes {
		if r := b.row.Load(); r != nil {
			all = append(all, r)
		}
	}
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		delete(e.feeds, f)
		e.mu.Unlock()
	}()
	if err := first(all); err != nil {
		return err
	}
	for {
		select {
		case <-f.more:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-e.life.Done():
			return errClosing
		}
		if err := each(f.take()); err != nil {
			return err
		}
	}
}
