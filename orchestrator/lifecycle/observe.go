package lifecycle

import (
	"context"
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
	// sampleEvery is how old a measurement is before there is another. Nothing is measured that nobody asks for.
	sampleEvery = 5 * time.Second
	// maxMetrics is how many measurements are kept of a sandbox: an hour's.
	maxMetrics = int(time.Hour / sampleEvery)
	// measureTimeout bounds one measurement.
	measureTimeout = 2 * time.Second
)

// measure returns the latest measurement, for which it measures if there is no fresh one.
func (e *Engine) measure(ctx context.Context, b *box, r *row) (Metric, error) {
	var latest Metric
	b.mu.Lock()
	if n := len(b.metrics); n > 0 {
		latest = b.metrics[n-1]
	}
	b.mu.Unlock()
	if time.Since(latest.At) < sampleEvery {
		return latest, nil
	}
	ctx, cancel := context.WithTimeout(ctx, e.Timeout(measureTimeout))
	defer cancel()
	token, _ := e.tokens(r)
	m, err := e.guests.Metrics(ctx, r.addr, token)
	if err != nil {
		return Metric{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.metrics); n >= maxMetrics {
		b.metrics = append(b.metrics[:0], b.metrics[n-maxMetrics+1:]...)
	}
	b.metrics = append(b.metrics, m)
	return m, nil
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

// FollowLog calls each with the last tail entries of a sandbox's log, all if that is negative, and with follow then with what is
// written, until the sandbox is gone, ctx or the engine ends, or each fails.
func (e *Engine) FollowLog(ctx context.Context, team, id string, tail int, follow bool, each func(LogEntry) error) error {
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
	if err := e.machines.FollowLog(ctx, id, tail, ended, each); err != nil {
		return err
	}
	return context.Cause(ctx)
}
