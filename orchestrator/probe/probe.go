// Package probe finds out how many sandboxes a host carries that work: it makes one after the other, has each of them do the same again
// and again, and stops when that takes too long or the host is hard pressed. It knows of the host what the API tells.
package probe

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/orchestrator/client"
)

// Host is where sandboxes are made.
type Host interface {
	// Capacity tells what there is room for, of a template alone.
	Capacity(ctx context.Context, template string) (client.Capacity, error)
	// Make makes a sandbox that lives for so long at most. After an error there is none.
	Make(ctx context.Context, template string, life time.Duration) (Sandbox, error)
}

// Sandbox is one.
type Sandbox interface {
	// Run does what the load is, once.
	Run(ctx context.Context) error
	// Kill removes it. That there is none any more is no error.
	Kill(ctx context.Context) error
}

// Options say what is measured.
type Options struct {
	Template string
	// Step is how many sandboxes are made between measurements, Max how many there are at most; 0 is any number.
	Step, Max int
	// Window is how long is measured with each number of them, at least: until each has done its work once. The first run of each
	// is over before, as it finds nothing in caches and translates its code first where machines are emulated.
	Window time.Duration
	// P95 is what 95 of 100 runs may take at most; 0 is Factor times what they take in the first sandbox alone, by the median.
	P95    time.Duration
	Factor float64
	// CPU, Memory and IO are the pressure, in percent, from which on it is too much; 0 is never.
	CPU, Memory, IO float64
	// Limit bounds all of it.
	Limit time.Duration
	// Timeout scales deadlines for this host.
	Timeout func(time.Duration) time.Duration
	// Tell is called with each step.
	Tell func(Step)
}

// Check says what is wrong with them. The error is errdefs.ErrInvalidArgument.
func (o *Options) Check() error {
	why := ""
	switch {
	case o.Step < 1:
		why = "a step is of one sandbox at least"
	case o.Max < 0:
		why = "there can't be less than no sandboxes"
	case o.Window < time.Second:
		why = "a window is of a second at least"
	case o.P95 < 0 || o.P95 == 0 && !(o.Factor > 1):
		why = "how slow runs may be is a time above nought, or a factor above 1"
	case !(o.CPU >= 0 && o.CPU <= 100 && o.Memory >= 0 && o.Memory <= 100 && o.IO >= 0 && o.IO <= 100):
		why = "pressure is of 0 to 100 percent"
	case o.Limit < o.Window:
		why = "the limit is less than one window"
	default:
		return nil
	}
	return errdefs.ErrInvalidArgument.WithMessage(why)
}

// Step is what was measured with a number of sandboxes.
type Step struct {
	Sandboxes int              `json:"sandboxes"`
	Runs      int              `json:"runs"`
	P50       time.Duration    `json:"p50Nanoseconds"`
	P95       time.Duration    `json:"p95Nanoseconds"`
	Memory    int64            `json:"memoryUsed"` // of the host, in bytes
	Pressure  *client.Pressure `json:"pressure"`
}

const (
	// killParallel is how many sandboxes are removed at once, and killTimeout bounds the removal of all.
	killParallel = 8
	killTimeout  = 5 * time.Minute
	// stall is how many windows a run of each may take before some are taken for ones that don't end.
	stall = 6
	// firstRuns is how many runs there are in the first sandbox alone, unless they take more than firstWindows windows.
	firstRuns, firstWindows = 5, 3
)

// errDone ends the runs of a probe that is over.
var errDone = errors.New("the probe is over")

// probe is one under way.
type probe struct {
	Options
	host  Host
	ctx   context.Context // of the runs
	runs  chan run
	loads sync.WaitGroup
	all   []Sandbox
	warm  int // how many have had their first run
}

// run is one that has ended.
type run struct {
	sandbox int
	first   bool // of its sandbox's
	began   time.Time
	took    time.Duration
	err     error
}

// Run probes. Whatever comes of it, none of its sandboxes is left, or the error says that some are.
func Run(ctx context.Context, host Host, o Options) (result Result, err error) {
	life := ctx
	ctx, cancel := context.WithTimeoutCause(ctx, o.Limit, fmt.Errorf("it isn't done within %v: %w", o.Limit, context.DeadlineExceeded))
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	p := &probe{Options: o, host: host, ctx: ctx, runs: make(chan run)}
	defer func() {
		stop(errDone)
		p.loads.Wait()
		err = errors.Join(err, p.clean(life))
	}()
	before, err := host.Capacity(ctx, o.Template)
	if err != nil {
		return result, err
	}
	if len(before.Templates) != 1 {
		return result, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("template %s has nothing that sandboxes could be made of", o.Template))
	}
	var steps []Step
	var ended end
	for ended.kind == 0 && err == nil {
		had := len(p.all)
		if ended, err = p.grow(ctx, len(steps) > 0); err != nil || len(p.all) == had {
			break
		}
		s, late, failed := p.step(ctx, steps)
		if err = failed; err != nil {
			break
		}
		if late.kind != 0 {
			ended = late
		}
		if late.kind != broken {
			steps = append(steps, s)
			o.Tell(s)
		}
	}
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return result, err
	}
	return p.conclude(before, steps, ended), nil
}

// end is why there are no more sandboxes.
type end struct {
	kind kind
	why  string
}

type kind int

const (
	refused kind = iota + 1 // there may be no more
	most                    // no more were asked for
	broken                  // those that there are can't do their work
	tooMuch                 // they can, but not as they should
)

// grow makes a step's sandboxes more, or the first one, each with its load.
func (p *probe) grow(ctx context.Context, more bool) (end, error) {
	n := 1
	if more {
		n = p.Step
	}
	for range n {
		if p.Max > 0 && len(p.all) == p.Max {
			return end{most, fmt.Sprintf("no more than %d were asked for", p.Max)}, nil
		}
		sb, err := p.host.Make(ctx, p.Template, p.Limit+time.Minute)
		switch {
		case err == nil:
		case ctx.Err() == nil && (errdefs.IsUnavailable(err) || errdefs.IsResourceExhausted(err)):
			return end{refused, err.Error()}, nil
		default:
			return end{}, err
		}
		i := len(p.all)
		p.all = append(p.all, sb)
		p.loads.Go(func() { p.load(i, sb) })
	}
	return end{}, nil
}

// load has a sandbox work until the probe is over, or it fails.
func (p *probe) load(i int, sb Sandbox) {
	for first := true; ; first = false {
		began := time.Now()
		err := sb.Run(p.ctx)
		select {
		case p.runs <- run{i, first, began, time.Since(began), err}:
		case <-p.ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// step measures with the sandboxes that there are. What is too much is measured again, so that what the host does for a moment beside
// them doesn't end the probe.
func (p *probe) step(ctx context.Context, before []Step) (s Step, e end, err error) {
	for range 2 {
		if s, e, err = p.measure(ctx, len(before) == 0); err != nil || e.kind != 0 {
			return s, e, err
		}
		if e = p.tooMuch(append(before[:len(before):len(before)], s)); e.kind == 0 {
			break
		}
	}
	return s, e, nil
}

// measure has all sandboxes work for a while, if they can: for longer where a median of few runs would be what all others are compared
// with.
func (p *probe) measure(ctx context.Context, first bool) (s Step, e end, err error) {
	e, err = p.await(ctx, func() bool { return p.warm == len(p.all) }, func() int { return p.warm }, func(run) {})
	if err != nil || e.kind != 0 {
		return s, e, err
	}
	began := time.Now()
	seen := map[int]bool{}
	var took []time.Duration
	enough := func() bool {
		elapsed := time.Since(began)
		return elapsed >= p.Window && len(seen) == len(p.all) && (!first || len(took) >= firstRuns || elapsed >= firstWindows*p.Window)
	}
	e, err = p.await(ctx, enough, func() int { return len(seen) }, func(r run) {
		if !r.began.Before(began) { // with all of them there
			seen[r.sandbox] = true
			took = append(took, r.took)
		}
	})
	if err != nil || e.kind != 0 {
		return s, e, err
	}
	c, err := p.host.Capacity(ctx, p.Template)
	if err != nil {
		return s, e, err
	}
	return Step{Sandboxes: len(p.all), Runs: len(took), P50: percentile(took, 50), P95: percentile(took, 95), Memory: int64(c.Memory.Used), Pressure: c.Pressure}, e, nil
}

// await notes runs that end until that is enough, unless one fails or the sandboxes stand still; there are so many by then that don't.
func (p *probe) await(ctx context.Context, enough func() bool, done func() int, note func(run)) (end, error) {
	window, late := time.NewTimer(p.Window), time.NewTimer(stall*p.Window)
	defer window.Stop()
	defer late.Stop()
	for !enough() {
		select {
		case r := <-p.runs:
			if r.err != nil {
				return end{broken, fmt.Sprintf("with %d sandboxes a run has failed: %v", len(p.all), r.err)}, nil
			}
			if r.first {
				p.warm++
			}
			note(r)
		case <-window.C: // it may be enough
		case <-late.C:
			return end{broken, fmt.Sprintf("with %d sandboxes only %d have done their work within %v, which is %d windows", len(p.all), done(), stall*p.Window, stall)}, nil
		case <-ctx.Done():
			return end{}, context.Cause(ctx)
		}
	}
	return end{}, nil
}

// clean removes all sandboxes.
func (p *probe) clean(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.Timeout(killTimeout))
	defer cancel()
	var g errgroup.Group
	g.SetLimit(killParallel)
	errs := make([]error, len(p.all))
	for i, sb := range p.all {
		g.Go(func() error {
			errs[i] = sb.Kill(ctx)
			return nil
		})
	}
	_ = g.Wait() // the functions collect their errors
	return errors.Join(errs...)
}
