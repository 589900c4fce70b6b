package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
)

// box is a sandbox in memory.
type box struct {
	id string
	// turn has room for one token: who has put it there may change the row. It is held for as long as a write takes, not for
	// what the sandbox's state has to have done.
	turn chan struct{}
	// row is the latest, nil when the sandbox is gone.
	row atomic.Pointer[row]

	mu      sync.Mutex
	changed chan struct{} // closed when there is another row
	seq     uint64        // of the latest row
	job     *job          // the latest
	failed  int           // how often in a row its work has come to nothing
	calm    time.Time     // until then, no deadline acts: the pause that it leads to has failed
	ended   bool          // its machine was heard to end since its job began
	metrics []Metric      // oldest first
	silent  time.Time     // until then, it isn't asked what it uses by itself: it hasn't answered
}

func newBox(r *row) *box {
	b := &box{id: r.ID, turn: make(chan struct{}, 1), changed: make(chan struct{})}
	b.row.Store(r)
	return b
}

// take waits for the turn.
func (b *box) take(ctx context.Context) error {
	select {
	case b.turn <- struct{}{}:
		return nil
	default:
	}
	select {
	case b.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (b *box) give() { <-b.turn }

// due is when the row's deadline acts.
func (b *box) due(r *row) time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.EndAt.Before(b.calm) {
		return b.calm
	}
	return r.EndAt
}

// set replaces the row.
func (b *box) set(r *row) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r != nil {
		b.seq++
		r.seq = b.seq
	}
	b.row.Store(r)
	close(b.changed)
	b.changed = make(chan struct{})
}

// until waits for a row that is so, nil for a sandbox that is gone.
func (b *box) until(ctx context.Context, so func(*row) bool) (*row, error) {
	for {
		b.mu.Lock()
		r, changed := b.row.Load(), b.changed
		b.mu.Unlock()
		if so(r) {
			return r, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// rest waits until the sandbox does nothing, and returns the row, nil for one that is gone. One that is being killed isn't
// waited for.
func (b *box) rest(ctx context.Context) (*row, error) {
	return b.until(ctx, func(r *row) bool { return r == nil || !r.State.busy() || r.State == Killing })
}

// over waits until the sandbox is gone, or is going, and tells whether it is before ctx ends.
func (b *box) over(ctx context.Context) bool {
	_, err := b.until(ctx, (*row).over)
	return err == nil
}

// over tells whether the sandbox is gone, or going.
func (r *row) over() bool { return r == nil || r.State.Shown() == "" }

// gone waits until there is nothing left of the sandbox, for so long at most.
func (b *box) gone(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, &late{limit})
	defer cancel()
	if _, err := b.until(ctx, func(r *row) bool { return r == nil }); err != nil {
		return fmt.Errorf("sandbox %s is being killed: %w", b.id, err)
	}
	return nil
}

// job is what a state has to have done.
type job struct {
	stop context.CancelCauseFunc
	done chan struct{}
	err  error // once it is done
}

// wait waits for the job.
func (j *job) wait(ctx context.Context) error {
	select {
	case <-j.done:
		return j.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// outcome is what has become of a sandbox when its state's work has ended. Without an event, that is to be looked for.
type outcome struct {
	event  event
	change func(*row) error
	err    error
}

// abandonAfter is how long what was interrupted is waited for before a sandbox is killed with it under way.
const abandonAfter = 30 * time.Second

// start does a state's work in the background, when what was under way before has ended, which is interrupted. It is of the
// request of ctx, but ends with ends, and after limit.
func (e *Engine) start(ctx context.Context, b *box, ends context.Context, limit time.Duration, do func(context.Context) outcome) *job {
	ctx, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	loose := context.AfterFunc(ends, func() { stop(context.Cause(ends)) })
	j := &job{stop: stop, done: make(chan struct{})}
	if !e.enter() {
		loose()
		stop(nil)
		j.err = errClosing
		close(j.done)
		return j
	}
	b.mu.Lock()
	before := b.job
	b.job, b.ended = j, false
	b.mu.Unlock()
	go func() {
		defer e.leave()
		defer loose()
		defer stop(nil)
		if before != nil {
			before.stop(errKilled)
			t := time.NewTimer(e.Timeout(abandonAfter))
			defer t.Stop()
			select {
			case <-before.done:
			case <-t.C:
			}
		}
		ctx, cancel := context.WithTimeoutCause(ctx, e.Timeout(limit), &late{e.Timeout(limit)})
		defer cancel()
		began := time.Now()
		o := do(ctx)
		if cause := context.Cause(ctx); o.err != nil && cause != nil && !errors.Is(o.err, cause) {
			o.err = &cut{cause: cause, error: o.err}
		}
		if o.err != nil {
			e.Log.Warn("work on a sandbox has failed", "sandbox", b.id, "took", time.Since(began).Round(time.Millisecond), "error", o.err)
		}
		j.err = e.conclude(ctx, b, j, o)
		close(j.done)
	}()
	return j
}

// late says that a limit has passed, which may be different next time.
type late struct{ limit time.Duration }

func (l *late) Error() string   { return "not done within " + l.limit.String() }
func (l *late) Unwrap() []error { return []error{context.DeadlineExceeded, errdefs.ErrUnavailable} }

// cut is the error of what was given up, of the class of why.
type cut struct {
	cause error
	error
}

func (c *cut) Error() string { return c.cause.Error() + ": " + c.error.Error() }
func (c *cut) Unwrap() error { return c.cause }
