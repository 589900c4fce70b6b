package lifecycle

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cubesandbox/cube/orchestrator/admission"
)

// queueTimeout bounds how long a start waits for its turn: E2B's SDKs wait a minute for an answer, and the machine takes its part of
// that.
const queueTimeout = 30 * time.Second

// shape is what a row's sandbox has.
func (r *row) shape() admission.Shape {
	return admission.Shape{VCPUs: r.CPUs, MemoryMB: r.MemoryMB, DiskMB: r.DiskMB, Profile: r.Profile}
}

// active is the entry of a row's sandbox while there is a machine of it.
func (r *row) active() admission.Entry {
	return admission.Entry{Team: r.Team, Shape: r.shape(), Machine: true}
}

// account has the ledger have what a row says.
func (e *Engine) account(r *row) {
	switch r.State {
	case gone:
		e.ledger.Drop(r.ID)
	case Killing:
		e.ledger.End(r.ID)
	default:
		entry := r.active()
		entry.Machine = r.State != Paused
		e.ledger.Set(r.ID, entry)
	}
}

// admit lets the machine of a row be started, when there is room for it and it is its turn. release says that the machine is up, or
// isn't going to be; it can be called more than once. What there isn't enough of is errdefs.ErrResourceExhausted where the team has its
// share, otherwise errdefs.ErrUnavailable. create: it is a sandbox more, not one that comes back.
func (e *Engine) admit(ctx context.Context, r *row, create bool) (release func(), err error) {
	err = e.stage(ctx, stageAdmit, r.ID, func(ctx context.Context) error {
		if err := e.reserve(ctx, r.ID, r.active(), create); err != nil {
			return err
		}
		start, err := e.turn(ctx, r.Team, r.shape())
		if err != nil {
			e.ledger.Release(r.ID)
			return e.refused(err)
		}
		release = sync.OnceFunc(func() {
			e.ledger.Release(r.ID)
			start()
		})
		return nil
	})
	return release, err
}

// reserve sets aside what a sandbox is going to have, until the ledger's Release.
func (e *Engine) reserve(ctx context.Context, id string, entry admission.Entry, create bool) error {
	return e.refused(e.makingRoom(ctx, func() error {
		reading, err := e.Host.Read()
		if err != nil {
			return err
		}
		return e.ledger.Reserve(id, entry, reading, create)
	}))
}

// makingRoom does what needs room on the host, again and again while members of the pool can give theirs for it.
func (e *Engine) makingRoom(ctx context.Context, do func() error) error {
	for {
		err := do()
		r := (*admission.Refusal)(nil)
		if !errors.As(err, &r) {
			return err
		}
		if !r.Spared || !e.giveBack(ctx) {
			return err
		}
	}
}

// refused counts an error, if it is a refusal.
func (e *Engine) refused(err error) error {
	if r := (*admission.Refusal)(nil); errors.As(err, &r) {
		e.refusals.WithLabelValues(r.Reason).Inc()
	}
	return err
}

// turn waits until a machine of that shape can be started for a team, which lasts until release.
func (e *Engine) turn(ctx context.Context, team string, s admission.Shape) (release func(), err error) {
	e.waiting.Add(1)
	defer e.waiting.Add(-1)
	if err := e.queue(ctx, team); err != nil {
		return nil, err
	}
	err = e.makingRoom(ctx, func() (err error) {
		release, err = e.beginStart(ctx, team, s)
		return err
	})
	if err != nil {
		e.turns.done(team)
		e.pool.poke() // which may have waited for whoever waits here
	}
	return release, err
}

// queue waits for a team's turn.
func (e *Engine) queue(ctx context.Context, team string) error {
	limit := e.Timeout(queueTimeout)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, admission.Short(admission.ReasonQueue, 5*time.Second, "this host starts %d sandboxes at a time, and others have been before this one for %v: try again", e.turns.size, limit))
	defer cancel()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	defer context.AfterFunc(e.life, func() { end(errClosing) })()
	return e.turns.wait(ctx, team)
}

// spareTurn is turn for what can wait: ok is false while others do, or members are claimed, or most of what may be started at once is,
// or memory is short.
func (e *Engine) spareTurn(ctx context.Context, s admission.Shape) (release func(), ok bool) {
	if e.waiting.Load() > 0 || e.pool.claims.Load() > 0 || !e.turns.try(poolTeam) {
		return nil, false
	}
	release, err := e.beginStart(ctx, poolTeam, s)
	if err != nil {
		e.turns.done(poolTeam)
		e.pool.rest(e.Timeout(pressureRest))
		return nil, false
	}
	return release, true
}

// beginStart sees that the host has the memory left for a machine of that shape, which has a team's turn to be started until release.
func (e *Engine) beginStart(ctx context.Context, team string, s admission.Shape) (release func(), err error) {
	need := admission.Need(e.Admission, s).Memory
	reading, err := e.Host.Read()
	if err != nil {
		return nil, err
	}
	left := e.left(ctx, reading)
	e.mu.Lock()
	left -= e.starting // what is being started doesn't have its memory yet
	fits := left >= need
	if fits {
		e.starting += need
	}
	e.mu.Unlock()
	if !fits {
		no := admission.Short(admission.ReasonAvailable, 10*time.Second, "the host has %d MiB of memory left that nobody uses, and this sandbox needs %d MiB: kill or pause one", max(left, 0)>>20, need>>20)
		no.Spared = need <= left+e.pool.memory()
		return nil, no
	}
	return func() {
		e.mu.Lock()
		e.starting -= need
		e.mu.Unlock()
		e.turns.done(team)
		e.pool.poke()
	}, nil
}

// lookForPressure says so where the kernel doesn't tell what the configuration has the engine heed.
func (e *Engine) lookForPressure() {
	a := e.Admission
	reading, err := e.Host.Read()
	if err != nil || !reading.Pressure.Known && a.MemoryPressure+a.IOPressure+a.CPUPressure > 0 {
		e.Log.Warn("it isn't known how hard pressed the host is, so that this keeps no sandbox from being started: /proc/pressure needs CONFIG_PSI, and psi=1 where that is off", "error", err)
	}
}

// left is the host's memory that nobody uses, without its headroom and what resident sandboxes have to themselves and don't use yet.
func (e *Engine) left(ctx context.Context, reading admission.Reading) int64 {
	left := reading.MemoryAvailable - int64(e.Admission.MemoryHeadroom)
	residents := e.ledger.Residents()
	if len(residents) == 0 {
		return left
	}
	use, err := e.machines.Use(ctx)
	if err != nil {
		e.Log.Warn("what machines take of the host can't all be told", "error", err)
	}
	for id, reserved := range residents {
		if u, ok := use[id]; ok { // one that is being started is among e.starting
			left -= max(reserved-int64(u.Memory), 0)
		}
	}
	return left
}

// AdmitBuild sets aside what a machine of that shape takes by which a template is built, until done, which can be called more than
// once. What there isn't enough of now is an *admission.Refusal, what the host never has errdefs.ErrFailedPrecondition.
func (e *Engine) AdmitBuild(ctx context.Context, s admission.Shape) (done func(), err error) {
	reading, err := e.Host.Read()
	if err != nil {
		return nil, err
	}
	if short := admission.Never(e.Admission, s, reading); short != nil {
		return nil, short
	}
	id := "build-" + randomID(20)
	if err := e.reserve(ctx, id, admission.Entry{Shape: s, Machine: true}, false); err != nil {
		return nil, err
	}
	return sync.OnceFunc(func() { e.ledger.Release(id) }), nil
}
