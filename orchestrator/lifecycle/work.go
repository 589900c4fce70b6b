package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/trace"
)

// What a state's work may take at most, init hook included.
const (
	createTimeout = 60 * time.Second
	pauseTimeout  = 2 * time.Minute
	resumeTimeout = 2 * time.Minute
	saveTimeout   = 2 * time.Minute
	killTimeout   = time.Minute
	lookTimeout   = 30 * time.Second
)

// Work that has come to nothing is tried again after a while, which doubles up to a most.
const (
	firstRetry = time.Second
	lastRetry  = time.Minute
)

// work begins what a state has to have done that a sandbox has entered without anybody who waits for it, or that was cut short.
func (e *Engine) work(ctx context.Context, b *box, r *row) *job {
	switch r.State {
	case Killing:
		return e.start(ctx, b, e.last, killTimeout, func(ctx context.Context) outcome { return e.killing(ctx, b) })
	case Pausing:
		return e.start(ctx, b, e.last, pauseTimeout, func(ctx context.Context) outcome { return e.pausing(ctx, r) })
	}
	return e.start(ctx, b, e.last, resumeTimeout, func(ctx context.Context) outcome {
		o := e.look(ctx, r)
		if r.State == Snapshotting && o.err == nil {
			o.err = errCut // whoever did something with it isn't there any more
		}
		return o
	})
}

func (e *Engine) killing(ctx context.Context, b *box) outcome {
	err := e.stage(ctx, stageKill, b.id, func(ctx context.Context) error { return e.machines.Kill(ctx, b.id) })
	if err != nil {
		return outcome{err: fmt.Errorf("kill sandbox %s: %w", b.id, err)}
	}
	return outcome{event: evGone}
}

func (e *Engine) pausing(ctx context.Context, r *row) outcome {
	err := e.stage(ctx, stagePause, r.ID, func(ctx context.Context) error { return e.machines.Pause(ctx, r.ID, !r.Cold) })
	if err != nil {
		return outcome{err: fmt.Errorf("pause sandbox %s: %w", r.ID, err)}
	}
	return outcome{event: evStill, change: pausedNow}
}

// pausedNow has a row say when it was paused.
func pausedNow(r *row) error {
	r.addr, r.EndAt = netip.Addr{}, time.Now()
	return nil
}

// look finds out what has become of a sandbox.
func (e *Engine) look(ctx context.Context, r *row) outcome {
	if r.State == Creating {
		return outcome{event: evUnfit} // nobody knows of it
	}
	seen, err := e.machines.Look(ctx, r.ID)
	if err != nil {
		return outcome{err: fmt.Errorf("look what has become of sandbox %s: %w", r.ID, err)}
	}
	return e.adopt(ctx, r, seen)
}

// adopt takes what was seen of a machine for what the sandbox is.
func (e *Engine) adopt(ctx context.Context, r *row, seen Seen) outcome {
	switch seen.State {
	case Runs:
		switch r.State {
		case Paused: // somebody else has resumed it
			return outcome{event: evResume, change: func(r *row) error {
				r.Request, r.Next = randomID(20), r.Timeout
				return nil
			}}
		case Resuming:
			return e.finishResume(ctx, r, seen.Addr)
		}
		o := outcome{event: evRuns}
		if r.addr != seen.Addr {
			o.change = func(r *row) error { r.addr = seen.Addr; return nil }
		}
		return o
	case Still:
		if r.State == Paused {
			return outcome{event: evStill}
		}
		return outcome{event: evStill, change: pausedNow}
	}
	why := seen.Why
	switch {
	case r.State != Paused && r.StartedAt.Before(e.Since):
		why = "it ran when the host was restarted, or Cube taken down"
	case why == "":
		why = "its machine has ended"
	}
	return outcome{event: evGone, change: func(r *row) error { r.Reason = why; return nil }}
}

// finishResume finishes the resume of a sandbox whose machine runs: that it has come back it may not have been told yet. If it
// doesn't take that, the sandbox is paused again, as where the resume wasn't cut short.
func (e *Engine) finishResume(ctx context.Context, r *row, addr netip.Addr) outcome {
	err := e.introduce(ctx, r, addr, whyResume)
	switch {
	case err == nil:
		return outcome{event: evRuns, change: e.begins(addr, cmp.Or(r.Next, r.Timeout))}
	case ctx.Err() != nil:
		return outcome{err: err} // there was no time to find out
	}
	if perr := e.putBack(r); perr != nil {
		return outcome{err: errors.Join(err, perr)}
	}
	return outcome{event: evStill, change: pausedNow, err: err}
}

// putBack pauses a machine again that has come back and doesn't know yet that time has passed.
func (e *Engine) putBack(r *row) error {
	ctx, cancel := context.WithTimeout(e.last, e.Timeout(pauseTimeout))
	defer cancel()
	return e.machines.Pause(ctx, r.ID, !r.Cold)
}

// begins makes a row that of a machine whose life begins, for so long.
func (e *Engine) begins(addr netip.Addr, d time.Duration) func(*row) error {
	return func(r *row) error {
		now := time.Now()
		r.addr, r.Epoch, r.Cold, r.Next = addr, randomID(16), false, 0
		r.StartedAt, r.EndAt = now, e.deadline(now, now.Add(d))
		return nil
	}
}

// deadline is when one that was started then ends that is to end at a time.
func (e *Engine) deadline(started, at time.Time) time.Time {
	if last := started.Add(e.MaxTimeout); e.MaxTimeout > 0 && at.After(last) {
		return last
	}
	return at
}

// conclude makes of a state's work, which was in a context that may have ended, what comes next, and returns the work's error, if it
// still is one.
func (e *Engine) conclude(worked context.Context, b *box, j *job, o outcome) error {
	r := b.row.Load()
	if r == nil {
		return o.err
	}
	if o.event == "" && r.State != Killing {
		ctx, cancel := context.WithTimeout(e.last, e.Timeout(lookTimeout))
		found := e.look(ctx, r)
		cancel()
		if r.State == Pausing && found.event == evStill {
			o.err = nil // it is paused all the same
		}
		if o.err != nil && found.event == evGone { // why it has failed is that it ended, and is in the log
			told := r.clone()
			_ = found.change(told) // which gives the reason, and no more
			o.err = errEnded(told)
		}
		o.event, o.change = found.event, found.change
		if found.event == "" {
			e.Log.Warn("it isn't known what has become of a sandbox", "sandbox", b.id, "error", found.err)
		}
	}
	if o.event == "" {
		b.mu.Lock()
		latest := b.job == j
		b.mu.Unlock()
		if latest { // otherwise it is what has interrupted it that goes on
			e.later(b)
		}
		return o.err
	}
	if o.err != nil && o.event == evRuns && r.State == Pausing && r.AutoPause {
		wait := e.backoff(b)
		b.mu.Lock()
		b.calm = time.Now().Add(wait)
		b.mu.Unlock()
	}
	ctx := trace.ContextWithSpan(context.WithoutCancel(e.last), trace.SpanFromContext(worked))
	was, is, err := e.step(ctx, b, nil, o.event, func(r *row) error {
		r.failed = o.err
		if o.change == nil {
			return nil
		}
		return o.change(r)
	})
	switch {
	case errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err):
		return o.err // it has been killed meanwhile
	case err != nil:
		e.Log.Error("what has become of a sandbox can't be written down", "sandbox", b.id, "error", err)
		e.later(b)
		return errors.Join(o.err, err)
	case is.State.busy() && is.State != was.State:
		e.work(e.last, b, is)
	case is.State == gone && is.Reason != "": // maybe amid a save
		e.background(e.sweep)
	case is.State == gone:
		e.background(func() { e.sweepBuild(is.BuildID) })
	}
	b.mu.Lock()
	ended := b.ended
	b.ended = false
	if o.err == nil {
		b.failed = 0
	}
	b.mu.Unlock()
	if ended {
		e.settle(b)
	}
	return o.err
}

// later has work that has come to nothing tried again.
func (e *Engine) later(b *box) { e.alarms.set(b.id, time.Now().Add(e.backoff(b))) }

// backoff is how long it is until what has failed is tried again.
func (e *Engine) backoff(b *box) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	wait := min(firstRetry<<min(b.failed, 10), lastRetry)
	b.failed++
	return e.Timeout(wait)
}

// settle finds out what has become of a sandbox that is at rest.
func (e *Engine) settle(b *box) {
	e.background(func() {
		ctx, cancel := context.WithTimeout(e.life, e.Timeout(resumeTimeout))
		defer cancel()
		for {
			r := b.row.Load()
			if r == nil || r.State.busy() {
				return
			}
			o := e.look(ctx, r)
			switch {
			case o.event == "":
				e.Log.Warn("it isn't known what has become of a sandbox", "sandbox", b.id, "error", o.err)
				return
			case o.change == nil && (o.event == evRuns && r.State == Running || o.event == evStill && r.State == Paused):
				return
			}
			if !errors.Is(e.advance(ctx, b, r, o), errStale) {
				return
			}
			// What was found is still so, whatever else there is to the row.
		}
	})
}

// advance has happen to a sandbox what was found out while its row was seen. The error is errStale if there has been another row
// since; of others it takes care.
func (e *Engine) advance(ctx context.Context, b *box, seen *row, o outcome) error {
	was, is, err := e.step(ctx, b, seen, o.event, o.change)
	switch {
	case errors.Is(err, errStale):
		return err
	case errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err):
	case err != nil:
		e.Log.Error("what has become of a sandbox can't be written down", "sandbox", b.id, "error", err)
		e.later(b)
	case is.State.busy() && is.State != was.State:
		if is.Reason != "" {
			e.Log.Warn("a sandbox has ended", "sandbox", b.id, "why", is.Reason)
		}
		e.work(ctx, b, is)
	}
	return nil
}

// heard is told that a machine has begun, or has ended.
func (e *Engine) heard(id string) {
	e.mu.Lock()
	b := e.boxes[id]
	e.mu.Unlock()
	if b == nil {
		if m := e.pool.find(id); m != nil {
			e.lost(m)
		}
		return
	}
	// Whoever does something with it looks at that when he is done, and sees it now or has made the row one at rest before.
	b.mu.Lock()
	b.ended = true
	b.mu.Unlock()
	r := b.row.Load()
	switch {
	case r == nil:
	case r.State == Creating:
		e.background(func() { e.failing(b) })
	case !r.State.busy():
		b.mu.Lock()
		b.ended = false
		b.mu.Unlock()
		e.settle(b)
	}
}

// failing has a create not wait for a machine that has begun and has ended: at its address nobody answers that.
func (e *Engine) failing(b *box) {
	ctx, cancel := context.WithTimeout(e.life, e.Timeout(lookTimeout))
	defer cancel()
	seen, err := e.machines.Look(ctx, b.id)
	if err != nil || seen.State != Absent {
		return
	}
	b.mu.Lock()
	j := b.job
	b.mu.Unlock()
	if r := b.row.Load(); r != nil && r.State == Creating && j != nil { // so that the job is the create's
		j.stop(errEndedEarly)
	}
}

// due does what is to be done with a sandbox at this time.
func (e *Engine) due(id string) {
	e.mu.Lock()
	b := e.boxes[id]
	e.mu.Unlock()
	if b == nil {
		return
	}
	r := b.row.Load()
	switch {
	case r == nil:
	case r.State == Running && !time.Now().Before(b.due(r)):
		// If it is stale, another deadline has an alarm of its own.
		_ = e.advance(e.life, b, r, outcome{event: evExpire, change: func(r *row) error {
			r.Cold = r.State == Pausing && !r.AutoPauseMemory
			return nil
		}})
	case r.State == Running:
		e.alarms.set(id, b.due(r))
	case r.State.busy():
		e.work(e.last, b, r)
	}
}
