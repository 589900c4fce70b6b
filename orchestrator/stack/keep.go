package stack

import (
	"context"
	"fmt"
	"time"

	"github.com/cubesandbox/cube/orchestrator/health"
)

// A containerd that ends is started again: the first time at once, then after ever longer waits. One that has ended
// more than maxRestarts times within restartWindow is given up.
const (
	maxRestarts   = 5
	restartWindow = 5 * time.Minute
	firstBackoff  = 500 * time.Millisecond
)

// startContainerd has a containerd serve, private or existing, and makes sure that it fits.
func (s *stack) startContainerd(ctx context.Context) error {
	c, err := dial(s.cfg)
	if err != nil {
		return err
	}
	s.undo.Push(c.Close)
	if s.cfg.Containerd.Address == "" {
		d, err := adoptOrLaunch(ctx, s.cfg)
		if err != nil {
			return err
		}
		if d.adopted {
			s.Log.Info("adopted the containerd of an earlier run", "pid", d.proc.pid)
		}
		s.group.Go(func() error { return s.keepContainerd(d) })
	}
	if s.containerd, err = checkContainerd(ctx, s.cfg, c); err != nil {
		return err
	}
	if err := meetSnapshotter(ctx, c); err != nil {
		return err
	}
	s.board.SetProbe("containerd", func(ctx context.Context) error {
		if _, err := c.Version(ctx); err != nil {
			return fmt.Errorf("doesn't answer: %w", err)
		}
		return nil
	})
	return nil
}

// keepContainerd owns the private containerd: it starts it again when it ends, and stops it when the stack's life ends.
func (s *stack) keepContainerd(d *daemon) error {
	var ends []time.Time
	for {
		select {
		case <-s.life.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(s.life), s.cfg.Timeout(stopTimeout))
			defer cancel()
			return d.stop(ctx)
		case <-d.proc.done:
		}
		why := "containerd has ended: " + d.death()
		d.close()
		for d = nil; d == nil; {
			s.Log.Error("starting containerd again", "why", why)
			s.board.Set("containerd", health.Failed, why)
			ends = recent(append(ends, time.Now()))
			if len(ends) > maxRestarts {
				return fmt.Errorf("containerd is given up after %d ends within %v, the last: %s", len(ends), restartWindow, why)
			}
			if !sleep(s.life, restartDelay(len(ends))) {
				return nil
			}
			ctx, cancel := context.WithTimeout(s.life, s.cfg.Timeout(time.Duration(s.cfg.ReadyTimeout)))
			next, err := adoptOrLaunch(ctx, s.cfg)
			cancel()
			if s.life.Err() != nil && err != nil {
				return nil
			}
			if err != nil {
				why = err.Error()
				continue
			}
			d = next
		}
		s.board.Set("containerd", health.Ready, "")
	}
}

// recent drops what is older than restartWindow.
func recent(times []time.Time) []time.Time {
	for len(times) > 0 && time.Since(times[0]) > restartWindow {
		times = times[1:]
	}
	return times
}

// restartDelay is the wait before the nth start in a row.
func restartDelay(n int) time.Duration {
	if n <= 1 {
		return 0
	}
	return firstBackoff << (n - 2)
}

// sleep waits, and says false when ctx has ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
