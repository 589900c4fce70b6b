package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/audit"
)

const (
	// DrainTimeout bounds how long Close waits for what must not be left half done.
	DrainTimeout = 10 * time.Second
	// turnTimeout bounds how long an operation waits for the one before it on the same container.
	turnTimeout = 30 * time.Second
	// operationTimeout bounds an operation itself.
	operationTimeout = 2 * time.Minute
	// spaceTimeout bounds looking at, and freeing, all that takes space.
	spaceTimeout = 10 * time.Minute
)

var (
	errNotReady = errdefs.ErrUnavailable.WithMessage("the stack isn't ready yet: `cube status` tells what it waits for")
	errStopping = errdefs.ErrUnavailable.WithMessage("the stack is being stopped")
)

// operation is one kind of what is done to containers.
type operation struct {
	name string
	// finishes: once begun it goes on when its client has gone away. Another one is given up then, and undone.
	finishes bool
	// action is what the audit log calls it, "" for what isn't there.
	action audit.Action
}

var (
	opSave     = operation{name: "save", action: audit.Snapshot}
	opPause    = operation{name: "pause", finishes: true, action: audit.Pause}
	opResume   = operation{name: "resume", finishes: true, action: audit.Resume}
	opRollback = operation{name: "rollback", finishes: true, action: audit.Rollback}
	opClone    = operation{name: "clone", action: audit.Fork}
	opUsage    = operation{name: "look at what takes space"}
	opPrune    = operation{name: "prune"}
	opPurge    = operation{name: "purge a team"}
)

// operations admits operations: one at a time on a container, and none when the stack isn't there for them.
type operations struct {
	cfg   *config.Config
	log   *slog.Logger
	turns turns

	// quit ends when no operation may begin any more, and those that can be undone are given up; kill, when all are.
	quit, kill       context.Context
	sayQuit, sayKill context.CancelCauseFunc
	// drained is closed when none runs any more, after quit.
	drained chan struct{}

	mu     sync.Mutex
	ready  bool
	audit  audit.Recorder // nil before operations may begin
	closed bool
	active int
}

func newOperations(cfg *config.Config, log *slog.Logger) *operations {
	o := &operations{cfg: cfg, log: log, drained: make(chan struct{})}
	o.quit, o.sayQuit = context.WithCancelCause(context.Background())
	o.kill, o.sayKill = context.WithCancelCause(context.Background())
	return o
}

// open lets operations begin, and be recorded there.
func (o *operations) open(to audit.Recorder) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ready, o.audit = true, to
}

// close lets no operation begin any more and returns when none is under way.
func (o *operations) close() {
	o.mu.Lock()
	if !o.closed {
		o.closed = true
		if o.active == 0 {
			close(o.drained)
		}
	}
	o.mu.Unlock()
	o.sayQuit(errStopping)
	t := time.AfterFunc(o.cfg.Timeout(DrainTimeout), func() { o.sayKill(errStopping) })
	defer t.Stop()
	<-o.drained
}

func (o *operations) enter() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.closed:
		return errStopping
	case !o.ready:
		return errNotReady
	}
	o.active++
	return nil
}

// tell has the record have what has come of something.
func (o *operations) tell(e audit.Entry, err error) {
	o.mu.Lock()
	to := o.audit
	o.mu.Unlock()
	if to == nil {
		return // nothing was done
	}
	e.Result, e.Error = audit.Outcome(err)
	to.Record(e)
}

func (o *operations) leave() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.active--
	if o.closed && o.active == 0 {
		close(o.drained)
	}
}

// run does something to a container, or with "" to none in particular, when it is its turn. limit bounds it from then on.
// f's context ends for one of the reasons that there are for this kind of operation.
func (o *operations) run(ctx context.Context, op operation, id string, limit time.Duration, f func(ctx context.Context) error) (err error) {
	if err := o.enter(); err != nil {
		return err
	}
	defer o.leave()
	if op.action != "" {
		entry := audit.Entry{Action: op.action, By: audit.Of(ctx), Sandbox: id}
		defer func() { o.tell(entry, err) }()
	}
	if id != "" {
		done, err := o.turn(ctx, op, id)
		if err != nil {
			return err
		}
		defer done()
	}
	began := time.Now()
	ends := o.quit
	if op.finishes {
		ctx, ends = context.WithoutCancel(ctx), o.kill
	}
	ctx, stop := bound(ctx, ends, o.cfg.Timeout(limit))
	defer stop()
	err = f(ctx)
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(err, cause) {
		err = &cut{cause: cause, error: err}
	}
	log := o.log.With("operation", op.name, "container", id, "took", time.Since(began).Round(time.Millisecond))
	if err != nil {
		log.Warn("an operation has failed", "error", err)
	} else {
		log.Info("an operation is done")
	}
	return err
}

// turn waits until no other operation is under way on the container.
func (o *operations) turn(ctx context.Context, op operation, id string) (done func(), err error) {
	limit := o.cfg.Timeout(turnTimeout)
	ctx, stop := bound(ctx, o.quit, limit)
	defer stop()
	done, other := o.turns.take(ctx, id, op.name)
	switch cause := context.Cause(ctx); {
	case done != nil:
		return done, nil
	case errdefs.IsDeadlineExceeded(cause):
		return nil, errdefs.ErrConflict.WithMessage(fmt.Sprintf("%s has been under way on container %s for %v: try again when it is done", other, id, limit))
	default:
		return nil, cause
	}
}

// bound is a context that ends with ends, too, and after limit.
func bound(ctx, ends context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(ends, func() { cancel(context.Cause(ends)) })
	ctx, expire := context.WithTimeoutCause(ctx, limit, &late{limit})
	return ctx, func() {
		expire()
		stop()
		cancel(nil)
	}
}

// late says that a limit has passed.
type late struct{ limit time.Duration }

func (l *late) Error() string { return fmt.Sprintf("not done within %v", l.limit) }
func (l *late) Unwrap() error { return context.DeadlineExceeded }

// cut is the error of what was given up, of the class of why.
type cut struct {
	cause error
	error
}

func (c *cut) Error() string { return c.cause.Error() + ": " + c.error.Error() }
func (c *cut) Unwrap() error { return c.cause }
