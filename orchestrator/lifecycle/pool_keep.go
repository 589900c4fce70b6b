package lifecycle

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// pressureRest is how long no member is made after members had to make room for sandboxes.
const pressureRest = time.Minute

// forgotten is a demand of which nothing needs to be known any more.
const forgotten = 0.05

// keepPool looks after the pool until the engine's life ends: that there are as many members as are wanted, made one after
// another while nothing else waits to be started, and no others.
func (e *Engine) keepPool() {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-e.pool.wake:
		case <-t.C:
		case <-e.life.Done():
			return
		}
		if wait := e.tend(); wait > 0 {
			t.Reset(wait)
		} else {
			t.Stop()
		}
	}
}

// tend does what is to be done. It returns how long it is until there is more by itself, 0 if there isn't.
func (e *Engine) tend() (wait time.Duration) {
	for {
		surplus, next, wait := e.pool.plan(time.Now())
		for _, m := range surplus {
			e.evict(m)
		}
		if next == nil || e.life.Err() != nil {
			return wait
		}
		if !e.refill(*next) { // who has its turn pokes when it is through
			_, _, wait = e.pool.plan(time.Now())
			return wait
		}
	}
}

// plan says which members are too many, and of which build one is to be made, nil for none; wait is how long it is until that may
// be otherwise though nothing happens, 0 is for ever.
func (p *pool) plan(now time.Time) (surplus []*member, next *db.Build, wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	sooner := func(d time.Duration) {
		if wait == 0 || d < wait {
			wait = max(d, time.Millisecond)
		}
	}
	have, memory := map[string]int{}, int64(0)
	for _, m := range p.members {
		memory += bytesOf(m.build)
		if m.state == leaving {
			continue
		}
		d := p.wanted[m.build.ID]
		if m.state == still && (d == nil || have[m.build.ID] >= p.target(d, now) || memory > p.MaxMemory) {
			surplus = append(surplus, m)
			continue
		}
		have[m.build.ID]++
	}
	best := 0.0
	for id, d := range p.wanted {
		target := p.target(d, now)
		switch {
		case have[id] > 0 && target > 0:
			sooner(p.lasts(d, now))
		case d.level*decay(now.Sub(d.at)) < forgotten:
			delete(p.wanted, id)
		}
		if lack := float64(target-have[id]) / float64(max(target, 1)); lack > best && memory+bytesOf(d.build) <= p.MaxMemory {
			b := d.build
			best, next = lack, &b
		}
	}
	if next != nil && now.Before(p.calm) {
		sooner(p.calm.Sub(now))
		next = nil
	}
	return surplus, next, wait
}

func bytesOf(b db.Build) int64 { return int64(b.MemoryMB) << 20 }

// refill makes one member, and waits for it. It is false if that has to wait, for others to be started or for better times.
func (e *Engine) refill(b db.Build) bool {
	release, ok := e.spareTurn(e.life, spare(b).Shape)
	if !ok {
		return false
	}
	defer release()
	ctx, stop := context.WithTimeoutCause(e.life, e.Timeout(createTimeout), &late{e.Timeout(createTimeout)})
	defer stop()
	m := &member{id: newSandboxID(), build: b, stop: stop, gone: make(chan struct{})}
	if !e.reserveSpare(m) {
		return false
	}
	p := e.pool
	p.mu.Lock()
	p.members[m.id] = m
	p.mu.Unlock()
	err := e.db.AddMember(ctx, m.id, b.ID)
	if errdefs.IsNotFound(err) { // nobody asks for it any more
		p.mu.Lock()
		delete(p.wanted, b.ID)
		delete(p.members, m.id)
		p.mu.Unlock()
		e.ledger.Drop(m.id)
		close(m.gone)
		return true
	}
	if err == nil {
		err = e.stage(ctx, stageMember, m.id, func(ctx context.Context) error { return e.makeMember(ctx, m) })
	}
	if err == nil {
		err = e.db.MemberReady(ctx, m.id)
	}
	p.mu.Lock()
	unwanted := m.state == leaving
	if err == nil && !unwanted {
		m.state, m.made, p.failed = still, time.Now(), 0
		p.mu.Unlock()
		return true
	}
	m.state = leaving
	p.mu.Unlock()
	if !unwanted && e.life.Err() == nil {
		e.Log.Warn("no machine can be kept ready for sandboxes", "template", b.Template, "member", m.id, "error", err)
		e.unlucky()
	}
	e.background(func() { e.remove(m) })
	return false
}

// spare is the entry of a member of a build. It is no team's.
func spare(b db.Build) admission.Entry {
	return admission.Entry{Shape: admission.Shape{VCPUs: b.CPUs, MemoryMB: b.MemoryMB, DiskMB: b.DiskMB, Profile: admission.Profile(b.Settings.Profile)}, Machine: true, Spare: true}
}

// reserveSpare sets aside what a member is going to have, if it is nobody else's.
func (e *Engine) reserveSpare(m *member) bool {
	reading, err := e.Host.Read()
	if err == nil {
		err = e.ledger.Reserve(m.id, spare(m.build), reading, false)
	}
	if err != nil {
		e.pool.rest(e.Timeout(pressureRest))
		return false
	}
	e.ledger.Set(m.id, spare(m.build))
	e.ledger.Release(m.id)
	return true
}

// makeMember makes a machine, has what a create needs of it happen once, so that the next time is fast, and leaves it still.
func (e *Engine) makeMember(ctx context.Context, m *member) (err error) {
	b := m.build
	if m.addr, err = e.machines.Create(ctx, Machine{ID: m.id, Team: poolTeam, Snapshot: b.Snapshot, Container: b.Settings.Container}); err != nil {
		return err
	}
	init := Init{SandboxID: m.id, TemplateID: b.Template, User: b.Settings.User, Workdir: b.Settings.Workdir, Request: randomID(20)}
	if b.Origin != "" {
		init.Former = e.seed.envd(b.Origin)
	}
	if err := e.guests.Init(ctx, m.addr, init); err != nil {
		return fmt.Errorf("envd: %w", err)
	}
	if exit, err := e.guests.Exec(ctx, m.addr, "", "true", func(Output) {}); err != nil || exit.Code != 0 {
		return fmt.Errorf("a first command: %s: %w", exit.Status, cmp.Or(err, error(errdefs.ErrUnavailable)))
	}
	if m.line, err = e.guests.Line(ctx, m.addr); err != nil {
		return fmt.Errorf("envd: %w", err)
	}
	return e.machines.Hold(ctx, m.id)
}

// unlucky has the pool wait after a failure, longer and longer.
func (e *Engine) unlucky() {
	e.pool.mu.Lock()
	wait := min(firstRetry<<min(e.pool.failed, 10), lastRetry)
	e.pool.failed++
	e.pool.mu.Unlock()
	e.pool.rest(e.Timeout(wait))
}
