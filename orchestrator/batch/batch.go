// Package batch runs one command in many sandboxes: each item has one of its own, which is made for it and removed after it. There
// are as many at once as are asked for and as there is room for: an item that finds none waits for it, and doesn't fail the others.
// What sandboxes are is the engine's, who asks for a batch and reads its results isn't known here.
package batch

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// Sandboxes is what a batch needs of the engine: a lifecycle.Engine.
type Sandboxes interface {
	Create(ctx context.Context, c lifecycle.Create) (lifecycle.Sandbox, error)
	Exec(ctx context.Context, team, id, line string, out func(lifecycle.Output)) (lifecycle.Exit, error)
	Kill(ctx context.Context, team, id string) error
}

// Request is a batch.
type Request struct {
	// Create is what each item's sandbox is made with, but for its timeout, and Env beside the item's own.
	Create lifecycle.Create
	// Envs are the items' own variables, one for each item, which win over those of Create.
	Envs []map[string]string
	// Command is a command line for the shell of the sandbox's default user.
	Command string
	// Timeout is how long an item's command may run, Deadline how long the batch may.
	Timeout, Deadline time.Duration
	// MaxTimeout is the longest that a sandbox may run; 0 is any.
	MaxTimeout time.Duration
	// Concurrency is how many sandboxes there are at once, at most; above 0.
	Concurrency int
}

// Status is what has become of an item.
type Status string

const (
	OK      Status = "ok"      // its command has ended with 0
	Failed  Status = "failed"  // it has ended otherwise, or something broke
	Refused Status = "refused" // it had no sandbox: none could be had in time, or at all
	Timeout Status = "timeout" // it ran for longer than it, or the batch, may
)

// Result is an item's. Each has one.
type Result struct {
	Index     int
	SandboxID string // "" if it had none
	Status    Status
	// Exit is nil if the command hasn't ended.
	Exit *lifecycle.Exit
	// Err is why there is no Exit.
	Err            error
	Stdout, Stderr Text
	// Waited is how long it had to wait for its sandbox to be begun, Made how long that took, Ran the command's.
	Waited, Made, Ran time.Duration
}

// Summary is what has become of all.
type Summary struct {
	Count map[Status]int
	Took  time.Duration
}

// Progress is how far a batch is.
type Progress struct {
	Done    int // items that have a result
	Running int // sandboxes that there are, those that are being made and removed included
}

// Batch is one that runs.
type Batch struct {
	Request
	Sandboxes Sandboxes
	Metrics   *Metrics
	Log       *slog.Logger
	// Scale scales deadlines that nobody has asked for, for this host.
	Scale func(time.Duration) time.Duration

	next    atomic.Int64
	began   time.Time
	room    room
	mu      sync.Mutex
	done    int
	running int
}

// over says which time is over.
type over string

func (o over) Error() string { return string(o) }
func (o over) Unwrap() error { return context.DeadlineExceeded }

const (
	errDeadline = over("the batch's deadline has passed")
	errTimeout  = over("the command ran for longer than its timeout")
)

// Run does all of it, and calls each with the items' results, one after another as they come. When it returns, of the batch's
// sandboxes none is left that can be removed. When ctx ends, or each fails, it gives up what runs, and returns why. It is called once.
func (b *Batch) Run(ctx context.Context, each func(Result) error) (_ Summary, err error) {
	b.Metrics.batches.Inc()
	defer func() { b.Metrics.ends(err) }()
	b.began = time.Now()
	b.room = newRoom(b.Concurrency)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	sum := Summary{Count: map[Status]int{}}
	var told sync.Mutex
	tell := func(r Result) {
		told.Lock()
		defer told.Unlock()
		if ctx.Err() != nil {
			return
		}
		sum.Count[r.Status]++
		if err := each(r); err != nil {
			cancel(err)
			return
		}
		b.Metrics.item(r)
	}
	due, stop := context.WithTimeoutCause(ctx, b.Deadline, errDeadline)
	defer stop()
	var workers sync.WaitGroup
	for range min(b.Concurrency, len(b.Envs)) {
		workers.Go(func() {
			for i := b.take(); i < len(b.Envs) && ctx.Err() == nil; i = b.take() {
				r := b.item(due, i)
				b.count(1, 0)
				tell(r)
			}
		})
	}
	workers.Wait()
	sum.Took = time.Since(b.began)
	return sum, context.Cause(ctx)
}

// take is the next item that nobody has taken.
func (b *Batch) take() int { return int(b.next.Add(1)) - 1 }

func (b *Batch) count(done, running int) {
	b.Metrics.sandboxes.Add(float64(running))
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done, b.running = b.done+done, b.running+running
}

// Progress tells how far it is.
func (b *Batch) Progress() Progress {
	b.mu.Lock()
	defer b.mu.Unlock()
	return Progress{Done: b.done, Running: b.running}
}

// item does one.
func (b *Batch) item(ctx context.Context, i int) Result {
	r := Result{Index: i}
	sb, err := b.sandbox(ctx, &r)
	if err != nil {
		r.Status, r.Err = Refused, err
		if !refusal(err) {
			r.Status = Failed
		}
		return r
	}
	r.SandboxID = sb.ID
	defer b.reclaim(ctx, sb.ID)
	began := time.Now()
	rctx, cancel := context.WithTimeoutCause(ctx, b.Timeout, errTimeout)
	defer cancel()
	exit, err := b.Sandboxes.Exec(rctx, b.Create.Team, sb.ID, b.Command, func(o lifecycle.Output) {
		if o.Stderr {
			r.Stderr.add(o.Bytes)
		} else {
			r.Stdout.add(o.Bytes)
		}
	})
	r.Ran = time.Since(began)
	switch {
	case err == nil:
		r.Exit, r.Status = &exit, OK
		if exit.Code != 0 {
			r.Status = Failed
		}
	case rctx.Err() != nil:
		r.Err, r.Status = context.Cause(rctx), Timeout
	default:
		r.Err, r.Status = err, Failed
	}
	return r
}

// grace is how much longer than its command a sandbox may live, if nobody removes it.
const grace = time.Minute

// create is what an item's sandbox is made with.
func (b *Batch) create(i int) lifecycle.Create {
	c := b.Create
	c.Ephemeral = true
	c.Timeout = b.Timeout + b.Scale(grace)
	if b.MaxTimeout > 0 {
		c.Timeout = min(c.Timeout, b.MaxTimeout)
	}
	c.Env = maps.Clone(c.Env)
	if c.Env == nil {
		c.Env = map[string]string{}
	}
	maps.Copy(c.Env, b.Envs[i])
	return c
}

// reclaimTimeout bounds how long the removal of a sandbox is waited for.
const reclaimTimeout = time.Minute

// reclaim removes a sandbox, whatever has become of the batch. The engine goes on with what has failed.
func (b *Batch) reclaim(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.Scale(reclaimTimeout))
	defer cancel()
	if err := b.Sandboxes.Kill(ctx, b.Create.Team, id); err != nil && !errdefs.IsNotFound(err) {
		b.Log.Warn("a batch's sandbox isn't removed yet", "sandbox", id, "error", err)
	}
	b.count(0, -1)
	b.room.freed()
}
