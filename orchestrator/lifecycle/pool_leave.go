package lifecycle

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// lossRest is how long no member is made after one has ended by itself: whoever ends one may be ending all.
const lossRest = 10 * time.Second

// evict has a member be removed with all that there is of it. gone is closed when nothing is left. ok is false for one that a create
// has taken since whoever calls has seen it: its machine is the sandbox's.
func (e *Engine) evict(m *member) (gone <-chan struct{}, ok bool) {
	p := e.pool
	p.mu.Lock()
	was := m.state
	if ok = p.members[m.id] == m; ok {
		m.state = leaving
	}
	p.mu.Unlock()
	switch {
	case !ok:
	case was == beingMade:
		m.stop() // who makes it removes it
	case was == still:
		e.background(func() { e.remove(m) })
	}
	return m.gone, ok
}

// remove removes what there is of a member, again and again until that works or the engine's life ends.
func (e *Engine) remove(m *member) {
	m.hangUp()
	for wait := firstRetry; ; wait = min(2*wait, lastRetry) {
		ctx, cancel := context.WithTimeout(e.last, e.Timeout(killTimeout))
		err := e.machines.Kill(ctx, m.id)
		if err == nil {
			err = e.db.DropMember(ctx, m.id)
		}
		cancel()
		if err == nil {
			break
		}
		e.Log.Warn("a machine that was kept for sandboxes can't be removed yet", "member", m.id, "error", err)
		select {
		case <-time.After(e.Timeout(wait)):
		case <-e.life.Done(): // the next engine does it
			return
		}
	}
	e.ledger.Drop(m.id) // before: who sees no member finds its room
	e.pool.mu.Lock()
	delete(e.pool.members, m.id)
	e.pool.mu.Unlock()
	close(m.gone)
	e.pool.poke()
}

// adopt takes over the members of an engine of before that can be claimed, and has the others removed.
func (p *pool) adopt(rows []db.Member, seen map[string]Seen) (useless []*member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, row := range rows {
		s := seen[row.ID]
		m := &member{id: row.ID, build: row.Build, addr: s.Addr, made: row.CreatedAt, stop: func() {}, gone: make(chan struct{}), state: still}
		p.members[m.id] = m
		if row.Ready && !row.Stale && s.State == Runs {
			p.want(row.Build, 1) // as far as is known
		} else {
			useless = append(useless, m)
		}
	}
	return useless
}

// openPool goes on with the pool of before.
func (e *Engine) openPool(rows []db.Member, seen map[string]Seen) {
	for _, m := range e.pool.adopt(rows, seen) {
		e.evict(m)
	}
	e.background(e.keepPool)
	if e.pool.Pressed != nil && e.pool.MaxMemory > 0 && e.Admission.MemoryPressure > 0 {
		e.background(e.heedPressure)
	}
}

// retire removes the members of builds that nobody can ask for any more, and waits for that.
func (e *Engine) retire(ctx context.Context) error {
	rows, err := e.db.Members(ctx)
	if err != nil {
		return err
	}
	var going []<-chan struct{}
	for _, row := range rows {
		e.pool.mu.Lock()
		m := e.pool.members[row.ID]
		if row.Stale {
			delete(e.pool.wanted, row.Build.ID)
		}
		e.pool.mu.Unlock()
		if !row.Stale || m == nil {
			continue
		}
		if gone, ok := e.evict(m); ok {
			going = append(going, gone)
		}
	}
	return await(ctx, going)
}

func await(ctx context.Context, all []<-chan struct{}) error {
	for _, c := range all {
		select {
		case <-c:
		case <-ctx.Done():
			return errors.New("members of the pool aren't removed yet")
		}
	}
	return nil
}

// giveBackTimeout bounds how long somebody waits for what a member gives back.
const giveBackTimeout = 20 * time.Second

// giveBack removes a member to make room for a sandbox, one of the build that is wanted least, and returns when its memory is
// there; if all are being removed, that of any of them. It is false if there is none, or that takes too long.
func (e *Engine) giveBack(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, e.Timeout(giveBackTimeout))
	defer cancel()
	p := e.pool
	now := time.Now()
	var least *member
	level := 0.0
	p.mu.Lock()
	for _, m := range p.members {
		of := 0.0
		if d := p.wanted[m.build.ID]; d != nil {
			of = d.level * decay(now.Sub(d.at))
		}
		if m.state == leaving {
			of = math.Inf(1)
		}
		if least == nil || of < level {
			least, level = m, of
		}
	}
	p.mu.Unlock()
	if least == nil {
		return false
	}
	p.rest(e.Timeout(pressureRest))
	gone, ok := e.evict(least)
	return !ok || await(ctx, []<-chan struct{}{gone}) == nil
}

// heedPressure has all members be removed whenever memory is under so much pressure that no sandbox is started, until the engine's
// life ends.
func (e *Engine) heedPressure() {
	for {
		err := e.pool.Pressed(e.life, e.Admission.MemoryPressure)
		if e.life.Err() != nil {
			return
		}
		if err != nil {
			e.Log.Warn("machines that are kept for sandboxes stay when memory is under pressure", "error", err)
			return
		}
		e.Log.Warn("memory is under pressure: machines that are kept for sandboxes are removed", "percent", e.Admission.MemoryPressure)
		e.drain()
	}
}

// drain has all members be removed.
func (e *Engine) drain() {
	p := e.pool
	p.mu.Lock()
	all := slices.Collect(maps.Values(p.members))
	p.mu.Unlock()
	p.rest(e.Timeout(pressureRest))
	for _, m := range all {
		e.evict(m)
	}
}

// lost looks at a member whose machine has begun, and may have ended.
func (e *Engine) lost(m *member) {
	e.background(func() {
		ctx, cancel := context.WithTimeout(e.life, e.Timeout(lookTimeout))
		defer cancel()
		seen, err := e.machines.Look(ctx, m.id)
		if err != nil || seen.State == Runs || e.pool.find(m.id) == nil {
			return // a claim sees what it is worth
		}
		e.Log.Warn("a machine that was kept for sandboxes has ended", "member", m.id, "why", seen.Why)
		e.pool.rest(e.Timeout(lossRest))
		e.evict(m)
	})
}
