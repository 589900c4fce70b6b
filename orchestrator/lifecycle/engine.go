package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
)

const (
	// drainTimeout bounds how long Close waits for what has to be finished.
	drainTimeout = 10 * time.Second
	// writeTimeout bounds a change of a row.
	writeTimeout = 10 * time.Second
)

// Options are an engine's.
type Options struct {
	Log *slog.Logger
	// Timeout scales deadlines for this host; nil leaves them.
	Timeout func(time.Duration) time.Duration
	// MaxTimeout bounds how long a sandbox may run at a stretch; 0 doesn't.
	MaxTimeout time.Duration
	// Admission is how much of the host sandboxes may take, Limits what each team may have; nil are config.Default's.
	Admission *config.Admission
	Limits    *config.Limits
	// Host is what there is of it.
	Host admission.Host
	// Starts is how many machines are started at once, others wait; 0 is two for each CPU.
	Starts int
	// Since is when the host, or Cube on it, was started: no machine of before runs any more.
	Since time.Time
	// Images are what sandboxes are made of that have no template.
	Images ImageOptions
	// SampleEvery is how often sandboxes that run are asked what they use; 0 asks them when somebody wants to know.
	SampleEvery time.Duration
	// Pool keeps machines ready for sandboxes to come.
	Pool PoolOptions
	// Kept says what is kept of teams' snapshots and paused sandboxes; nil keeps all for good.
	Kept Kept
	// Audit is told of all that is done; nil tells nobody.
	Audit audit.Recorder
}

// Engine makes sandboxes and says what state they are in. All methods may be called from many goroutines. What is asked of a
// sandbox that isn't the team's is as of one that isn't there.
type Engine struct {
	Options
	db       *db.DB
	machines Machines
	guests   Guests
	seed     seed
	stages   *prometheus.HistogramVec
	tracer   trace.Tracer

	// life ends with the engine; what has to be finished has a little longer, until last ends.
	life, last        context.Context
	endLife, endLasts context.CancelCauseFunc
	alarms            *alarms
	turns             *turns        // to start machines
	sweeps            chan struct{} // has an element while one goes on
	waiting           atomic.Int64  // for their turn to be started
	pool              *pool
	// ledger has what is reserved for each row: whoever publishes one tells it.
	ledger   *admission.Ledger
	refusals *prometheus.CounterVec
	aged     chan struct{} // has room for one: retention is to look again

	mu      sync.Mutex // not held while anything else is waited for
	open    bool
	closed  bool
	jobs    int           // under way
	drained chan struct{} // closed when none is, after the engine is closed
	boxes   map[string]*box
	wanted  map[string]int // builds that stay, by how many want them, or that are dropped
	// promoting has builds of images that are used often, with how many sandboxes there have to be for another try.
	promoting map[string]int64
	feeds     map[*feed]struct{}
	starting  int64 // bytes of memory of machines that are being started
}

var (
	errNotOpen = unavailable("the sandboxes of before are being looked for: try again", time.Second)
	errClosing = unavailable("cube is being stopped", 5*time.Second)
	errCut     = errdefs.ErrAborted.WithMessage("it was cut short")
	// errEndedEarly is why a create is given up whose machine has ended.
	errEndedEarly = unavailable("the sandbox's machine has ended before it was ready: try again", time.Second)
	errKilled     = errdefs.ErrAborted.WithMessage("the sandbox has been killed")
)

// New makes an engine of what the database has. It serves nothing until it is open.
func New(ctx context.Context, d *db.DB, m Machines, g Guests, seedFile string, o Options) (*Engine, error) {
	s, err := loadSeed(seedFile)
	if err != nil {
		return nil, err
	}
	if o.Timeout == nil {
		o.Timeout = func(d time.Duration) time.Duration { return d }
	}
	if o.Starts == 0 {
		o.Starts = 2 * runtime.NumCPU()
	}
	defaults := config.Default()
	o.Admission, o.Limits = cmp.Or(o.Admission, &defaults.Admission), cmp.Or(o.Limits, &defaults.Limits)
	if o.Audit == nil {
		o.Audit = audit.Nowhere{}
	}
	e := &Engine{Options: o, db: d, machines: m, guests: g, seed: s, stages: newStages(), tracer: newTracer(), pool: newPool(o.Pool), turns: newTurns(o.Starts), sweeps: make(chan struct{}, 1), aged: make(chan struct{}, 1), drained: make(chan struct{}),
		boxes: map[string]*box{}, wanted: map[string]int{}, promoting: map[string]int64{}, feeds: map[*feed]struct{}{},
		ledger: admission.NewLedger(o.Admission, o.Limits), refusals: newRefusals()}
	rows, err := d.SandboxesIn(ctx)
	if err != nil {
		return nil, err
	}
	for _, s := range rows {
		r, err := decodeRow(s)
		if err != nil {
			return nil, err
		}
		e.boxes[r.ID] = newBox(r)
		e.ledger.Set(r.ID, r.active()) // in case that it is being killed
		e.account(r)
	}
	e.life, e.endLife = context.WithCancelCause(context.Background())
	e.last, e.endLasts = context.WithCancelCause(context.Background())
	e.alarms = newAlarms()
	return e, nil
}

// Close has nothing begin any more, gives up what can be undone, and waits for the rest, which is given up after a while. What
// isn't finished then is put in order by the next engine of the database.
func (e *Engine) Close() {
	e.mu.Lock()
	if !e.closed {
		e.closed, e.open = true, false
		if e.jobs == 0 {
			close(e.drained)
		}
	}
	e.mu.Unlock()
	e.endLife(errClosing)
	t := time.AfterFunc(e.Timeout(drainTimeout), func() { e.endLasts(errClosing) })
	defer t.Stop()
	<-e.drained
	e.endLasts(errClosing)
	for _, m := range e.pool.ready() {
		m.hangUp()
	}
}

// enter lets something go on in the background, until leave: not when nothing does any more.
func (e *Engine) enter() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed && e.jobs == 0 {
		return false
	}
	e.jobs++
	return true
}

func (e *Engine) leave() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.jobs--; e.closed && e.jobs == 0 {
		close(e.drained)
	}
}

// background does something that ends with the engine.
func (e *Engine) background(f func()) {
	if e.enter() {
		go func() {
			defer e.leave()
			f()
		}()
	}
}

// Ready tells what keeps the engine from serving, nil if nothing does.
func (e *Engine) Ready() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closed:
		return errClosing
	case !e.open:
		return errNotOpen
	}
	return nil
}

// find finds a team's sandbox; team "" is any.
func (e *Engine) find(team, id string) (*box, *row, error) {
	if err := e.Ready(); err != nil {
		return nil, nil, err
	}
	e.mu.Lock()
	b := e.boxes[id]
	e.mu.Unlock()
	if b == nil {
		return nil, nil, e.missing(team, id)
	}
	r := b.row.Load()
	if r == nil || team != "" && r.Team != team {
		return nil, nil, e.missing(team, id)
	}
	return b, r, nil
}

// missing is the error of a sandbox that isn't there, with why, if it ended by itself.
func (e *Engine) missing(team, id string) error {
	if team != "" {
		if err := e.ended(team, id); err != nil {
			return err
		}
	}
	return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("sandbox '%s' not found", id))
}

// ended is the error of a sandbox that has ended by itself, nil if it isn't known to.
func (e *Engine) ended(team, id string) error {
	e.mu.Lock()
	b := e.boxes[id]
	e.mu.Unlock()
	if b != nil {
		if r := b.row.Load(); r != nil && r.Team == team && r.Reason != "" { // what is left of it is being removed
			return errEnded(r)
		}
	}
	ctx, cancel := context.WithTimeout(e.life, writeTimeout)
	defer cancel()
	when, why, err := e.db.Ended(ctx, team, id)
	if err != nil {
		return nil
	}
	return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("sandbox '%s' not found: it ended at %s: %s", id, when.Format(time.RFC3339), why))
}

// errEnded is the error of a sandbox that has ended by itself, for a reason.
func errEnded(r *row) error {
	return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("sandbox '%s' not found: it has ended: %s", r.ID, r.Reason))
}

// errStale: there has been another row since.
var errStale = errors.New("the sandbox's state has changed meanwhile")

// step has an event happen to a sandbox, if it is possible in its state and change lets it, and returns the row of before and
// after. If seen isn't nil, that has to be the row of before. What is after is written before anybody sees it. It isn't given
// up once it has begun.
func (e *Engine) step(ctx context.Context, b *box, seen *row, ev event, change func(*row) error) (was, is *row, err error) {
	if err := b.take(ctx); err != nil {
		return nil, nil, err
	}
	defer b.give()
	was = b.row.Load()
	if was == nil {
		return nil, nil, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("sandbox '%s' not found", b.id))
	}
	if seen != nil && seen != was {
		return was, nil, errStale
	}
	to, ok := next(was, ev)
	if !ok {
		return was, nil, refused(was, ev)
	}
	is = was.clone()
	is.State, is.failed, is.saved = to, nil, ""
	switch {
	case !to.busy():
		is.Cause = nil
	case to != was.State:
		is.Cause = causeOf(ctx, ev, to)
	}
	is.rewinding = is.rewinding && to == was.State
	if change != nil {
		if err := change(is); err != nil {
			return was, nil, err
		}
	}
	e.record(was, is)
	if err := e.stage(ctx, stageRow, b.id, func(ctx context.Context) error { return e.write(ctx, was, is) }); err != nil {
		return was, nil, err
	}
	e.publish(b, was, is)
	if is.State != was.State {
		e.Log.Debug("a sandbox has another state", "sandbox", b.id, "was", was.State, "event", ev, "is", is.State)
	}
	return was, is, nil
}

// write writes the row down.
func (e *Engine) write(ctx context.Context, was, is *row) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.Timeout(writeTimeout))
	defer cancel()
	if is.State == gone {
		return e.db.DropSandbox(ctx, is.ID, is.Reason)
	}
	s, err := is.encode()
	if err != nil {
		return err
	}
	return e.db.SetSandbox(ctx, s, string(was.State))
}

// publish has everybody see the row r, after was.
func (e *Engine) publish(b *box, was, r *row) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.account(r)
	if r.State == gone {
		delete(e.boxes, b.id)
		b.set(nil)
	} else {
		b.set(r)
	}
	for f := range e.feeds {
		f.add(b.id)
	}
	if r.State != was.State && (r.State == Paused || r.State == gone) {
		e.outlived()
	}
	if r.State.busy() && r.State == was.State {
		return // its work may have failed and be due again
	}
	var at time.Time
	if r.State == Running {
		at = b.due(r)
	}
	e.alarms.set(b.id, at)
}
