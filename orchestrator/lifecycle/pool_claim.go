package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// claimTimeout bounds how long a member may take to go on: then another machine is made.
const claimTimeout = 5 * time.Second

// unfit is why a member of the pool is of no use to a create, which can be done without.
type unfit struct{ error }

func (u unfit) Unwrap() error { return u.error }

// Is has it stay what it is where the end of the machine is heard of, too.
func (u unfit) Is(target error) bool { return target == errEndedEarly }

// fromPool makes the sandbox of a new row of a member of the pool. ok is false if there is none for it, or none that works.
func (e *Engine) fromPool(ctx context.Context, r *row, m *member) (sb Sandbox, ok bool, err error) {
	defer e.pool.poke() // only then is another one made in its place
	e.pool.claims.Add(1)
	known := sync.OnceFunc(func() { e.pool.claims.Add(-1) })
	defer known()
	claimed := r.clone()
	claimed.ID = m.id
	err = e.stage(ctx, stageCreate, m.id, func(ctx context.Context) (err error) {
		sb, err = e.claim(ctx, claimed, m, known)
		return err
	})
	if why := (unfit{}); errors.As(err, &why) && ctx.Err() == nil {
		e.pool.creates.WithLabelValues("lost").Inc()
		e.Log.Warn("a machine that was kept for sandboxes is of no use: another one is made", "member", m.id, "error", why.error)
		return Sandbox{}, false, nil
	}
	if err == nil {
		e.pool.creates.WithLabelValues("hit").Inc()
	}
	return sb, true, err
}

// claim makes a member, which nobody else has, the sandbox of a row. Nothing of the host waits for its turn for that: the machine has
// its memory already. containerd is asked only where the sandbox is to reach other than what any does. known is called when it knows who
// it is, and at the latest in the end: what comes then is what the sandbox does.
func (e *Engine) claim(ctx context.Context, r *row, m *member, known func()) (Sandbox, error) {
	err := e.stage(ctx, stageAdmit, r.ID, func(ctx context.Context) error { return e.reserve(ctx, r.ID, r.active(), true) })
	if err != nil {
		e.pool.put(m)
		return Sandbox{}, err
	}
	defer e.ledger.Release(r.ID)
	write := func(ctx context.Context, s db.Sandbox) error {
		err := e.db.ClaimMember(ctx, s)
		if err != nil {
			e.pool.put(m)
			e.evict(m)
		}
		if errdefs.IsFailedPrecondition(err) {
			return unfit{err}
		}
		return err
	}
	return e.born(ctx, r, write, func(ctx context.Context) outcome { return e.claiming(ctx, r, m, known) })
}

// claiming has a member go on as the sandbox that it is.
func (e *Engine) claiming(ctx context.Context, r *row, m *member, known func()) outcome {
	defer m.hangUp()
	i := e.identity(r, whyCreate)
	whole, giveUp := context.WithCancel(ctx)
	defer giveUp()
	told := make(chan error, 1)
	err := e.stage(ctx, stageClaim, r.ID, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeoutCause(ctx, e.Timeout(claimTimeout), &late{e.Timeout(claimTimeout)})
		defer cancel()
		if reach := r.egress(); len(reach.AllowOut)+len(reach.DenyOut) > 0 { // before anything runs in it
			if err := e.machines.SetNetwork(ctx, r.ID, reach); err != nil {
				return err
			}
		}
		// It waits before the machine for the CPUs to go on, and in it for the work.
		go func() { told <- m.tell(whole, i) }()
		return e.machines.Release(ctx, r.ID)
	})
	gone := err != nil
	if !gone {
		err = e.introduced(ctx, r, m.addr, whyCreate, i, func(ctx context.Context) error {
			defer known()
			if <-told == nil {
				return nil
			}
			// This only when it has gone on: the address of one that has ended may be another's by now, and then the line isn't.
			return e.guests.Init(ctx, m.addr, i)
		})
	}
	if ended := context.Cause(ctx); err != nil && errors.Is(ended, errEndedEarly) {
		gone, err = true, fmt.Errorf("%w: %w", ended, err)
	}
	switch {
	case gone:
		return outcome{event: evUnfit, err: unfit{fmt.Errorf("claim sandbox %s: %w", r.ID, err)}}
	case err != nil: // what is there doesn't want to be it, and another one wouldn't
		return outcome{event: evUnfit, err: err}
	}
	return outcome{event: evRuns, change: e.begins(m.addr, r.Timeout)}
}
