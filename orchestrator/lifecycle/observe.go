package lifecycle

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// Metrics tells what a sandbox uses, with what is kept of the past between from and to; zero is no bound. One that is paused uses
// nothing.
func (e *Engine) Metrics(ctx context.Context, team, id string, from, to time.Time) ([]Metric, error) {
	b, r, err := e.find(team, id)
	if err != nil {
		return nil, err
	}
	if r.State.Shown() == "" {
		return nil, e.missing(team, id)
	}
	if r.State == Running {
		if _, err := e.measure(ctx, b, r); err != nil && !errdefs.IsUnavailable(err) {
			e.Log.Debug("a sandbox doesn't tell what it uses", "sandbox", id, "error", err)
		}
	}
	var found []Metric
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range b.metrics {
		if (from.IsZero() || !m.At.Before(from)) && (to.IsZero() || !m.At.After(to)) {
			found = append(found, m)
		}
	}
	return found, nil
}

const (
	// freshFor is how old a measurement may be where nobody measures regularly.
	freshFor = 5 * time.Second
	// maxMetrics is how many measurements are kept of a sandbox: an hour's, where there is one every five seconds.
	maxMetrics = 720
	// measureTimeout bounds one measurement.
	measureTimeout = 2 * time.Second
	// silence is how long a sandbox is left alone that hasn't answered, so that it doesn't keep others from being asked.
	silence = time.Minute
)

// fresh is the latest measurement, if it is of the last while.
func (b *box) fresh(age time.Duration) (m Metric, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.metrics); n > 0 {
		m = b.metrics[n-1]
	}
	return m, time.Since(m.At) < age
}

// keep adds a measurement, unless another one was faster.
func (b *box) keep(m Metric, apart time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := len(b.metrics)
	if n > 0 && m.At.Sub(b.metrics[n-1].At) < apart/2 {
		return
	}
	if n >= maxMetrics {
		b.metrics = append(b.metrics[:0], b.metrics[n-maxMetrics+1:]...)
	}
	b.metrics = append(b.metrics, m)
}

// measure returns the latest measurement, for which it asks the sandbox if there is no fresh one.
func (e *Engine) measure(ctx context.Context, b *box, r *row) (Metric, error) {
	age := cmp.Or(e.SampleEvery, freshFor)
	if m, ok := b.fresh(age); ok {
		return m, nil
	}
	return e.ask(ctx, b, r, age)
}

func (e *Engine) ask(ctx context.Context, b *box, r *row, apart time.Duration) (Metric, error) {
	ctx, cancel := context.WithTimeout(ctx, e.Timeout(measureTimeout))
	defer cancel()
	token, _ := e.tokens(r)
	m, err := e.guests.Metrics(ctx, r.addr, token)
	if err == nil {
		b.keep(m, apart)
	}
	return m, err
}

// sample asks all sandboxes that run what they use, every SampleEvery, until the engine's life ends. A round that takes longer
// than that has the next one be late.
func (e *Engine) sample() {
	t := time.NewTicker(e.SampleEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-e.life.Done():
			return
		}
		e.each(e.running(), func(b *box) {
			r := b.row.Load()
			b.mu.Lock()
			quiet := time.Now().Before(b.silent)
			b.mu.Unlock()
			if quiet || r == nil || r.State != Running {
				return
			}
			if _, err := e.ask(e.life, b, r, e.SampleEvery); err != nil && e.life.Err() == nil {
				b.mu.Lock()
				b.silent = time.Now().Add(silence)
				b.mu.Unlock()
			}
		})
	}
}

// running are the sandboxes that run.
func (e *Engine) running() (all []*box) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, b := range e.boxes {
		if r := b.row.Load(); r != nil && r.State == Running {
			all = append(all, b)
		}
	}
	return all
}

// askParallel is how many sandboxes are asked at once.
const askParallel = 8

// each does something with all of them, some at a time.
func (e *Engine) each(all []*box, do func(*box)) {
	turn := make(chan struct{}, askParallel)
	var wg sync.WaitGroup
	for _, b := range all {
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			do(b)
		})
	}
	wg.Wait()
}

// Logs reads a sandbox's log: what its first process, which is envd's init, has written.
func (e *Engine) Logs(ctx context.Context, team, id string, q LogQuery) ([]LogEntry, error) {
	_, r, err := e.find(team, id)
	if err != nil {
		return nil, err
	}
	if r.State.Shown() == "" {
		return nil, e.missing(team, id)
	}
	return e.machines.Log(ctx, id, q)
}

// FollowLog calls each with the entries of a sandbox's log from a start on, and with follow then with what is written, until the
// sandbox is gone, ctx or the engine ends, or each fails.
func (e *Engine) FollowLog(ctx context.Context, team, id string, from LogStart, follow bool, each func(LogEntry) error) error {
	b, r, err := e.find(team, id)
	if err != nil {
		return err
	}
	if r.State.Shown() == "" {
		return e.missing(team, id)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(e.life, func() { cancel(errClosing) })()
	var ended chan struct{}
	if follow {
		ended = make(chan struct{})
		go func() {
			if b.over(ctx) {
				close(ended)
			}
		}()
	}
	if err := e.machines.FollowLog(ctx, id, from, ended, each); err != nil {
		return err
	}
	return context.Cause(ctx)
}
