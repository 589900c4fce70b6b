package lifecycle

import (
	"context"
	"slices"
	"sync"
)

// turns are how many machines may be started at once. Whose team starts the fewest is next, so that one which asks for many keeps no
// other from the few that it wants; of these who has waited longest.
type turns struct {
	size int

	mu     sync.Mutex
	taken  int
	of     map[string]int // of those taken, by team; no zeros
	queued []*turn        // in the order in which they came
}

// turn is one that somebody waits for.
type turn struct {
	team string
	come chan struct{} // closed when it is theirs
}

func newTurns(size int) *turns { return &turns{size: size, of: map[string]int{}} }

// wait waits until it is a team's turn, or until ctx ends. Who has had it calls done.
func (t *turns) wait(ctx context.Context, team string) error {
	w := &turn{team: team, come: make(chan struct{})}
	t.mu.Lock()
	t.queued = append(t.queued, w)
	t.next()
	t.mu.Unlock()
	select {
	case <-w.come:
		return nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	i := slices.Index(t.queued, w)
	if i >= 0 {
		t.queued = slices.Delete(t.queued, i, i+1)
	}
	t.mu.Unlock()
	if i < 0 { // it came meanwhile
		return nil
	}
	return context.Cause(ctx)
}

// try takes a turn if more than half of them are left, and nobody waits for one.
func (t *turns) try(team string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.queued) > 0 || 2*t.taken >= t.size {
		return false
	}
	t.take(team)
	return true
}

// done gives a team's turn back.
func (t *turns) done(team string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.taken--
	if t.of[team]--; t.of[team] == 0 {
		delete(t.of, team)
	}
	t.next()
}

// take notes a turn as a team's. t.mu is held.
func (t *turns) take(team string) {
	t.taken++
	t.of[team]++
}

// next has those go on for whom there is a turn. t.mu is held.
func (t *turns) next() {
	for t.taken < t.size && len(t.queued) > 0 {
		first := 0
		for i, w := range t.queued {
			if t.of[w.team] < t.of[t.queued[first].team] {
				first = i
			}
		}
		w := t.queued[first]
		t.queued = slices.Delete(t.queued, first, first+1)
		t.take(w.team)
		close(w.come)
	}
}
