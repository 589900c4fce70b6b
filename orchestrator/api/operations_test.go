package api

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/audit"
)

func opened() *operations {
	o := newOperations(config.Default(), slog.New(slog.DiscardHandler))
	o.open(audit.Nowhere{})
	return o
}

// begun runs an operation that lasts until its context ends, or release is called.
type begun struct {
	ctx     context.Context
	release func()
	result  chan error
}

func begin(t *testing.T, ctx context.Context, o *operations, op operation, id string) *begun {
	t.Helper()
	b := &begun{result: make(chan error, 1)}
	started := make(chan struct{})
	released, release := context.WithCancel(t.Context())
	b.release = release
	go func() {
		b.result <- o.run(ctx, op, id, time.Minute, func(ctx context.Context) error {
			b.ctx = ctx
			close(started)
			select {
			case <-ctx.Done():
				return errors.New("undone")
			case <-released.Done():
				return nil
			}
		})
	}()
	<-started
	return b
}

// TestTurns: operations on one container wait for each other, for a while; those on others don't.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := opened()
		first := begin(t, t.Context(), o, opSave, "a")
		begin(t, t.Context(), o, opSave, "b").release()
		ran := false
		second := make(chan error, 1)
		go func() {
			second <- o.run(t.Context(), opRollback, "a", time.Minute, func(context.Context) error { ran = true; return nil })
		}()
		synctest.Wait()
		if ran {
			t.Error("two at a time")
		}
		first.release()
		if err := errors.Join(<-first.result, <-second); err != nil || !ran {
			t.Error(ran, err)
		}
		first = begin(t, t.Context(), o, opSave, "a")
		err := o.run(t.Context(), opRollback, "a", time.Minute, func(context.Context) error { t.Error("in another's turn"); return nil })
		if !errdefs.IsConflict(err) || !strings.Contains(err.Error(), "save has been under way on container a for 30s") {
			t.Errorf("waited too long: %v", err)
		}
		gone, leave := context.WithCancel(t.Context())
		leave()
		if err := o.run(gone, opRollback, "a", time.Minute, func(context.Context) error { t.Error("for nobody"); return nil }); !errors.Is(err, context.Canceled) {
			t.Errorf("a client that has gone: %v", err)
		}
		first.release()
		<-first.result
		if len(o.turns.all) > 0 {
			t.Errorf("left: %v", o.turns.all)
		}
	})
}

// TestGone: what a client leaves behind when it goes away.
func TestGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := opened()
		ctx, leave := context.WithCancel(t.Context())
		save, rollback := begin(t, ctx, o, opSave, "a"), begin(t, ctx, o, opRollback, "b")
		leave()
		if err := <-save.result; !errors.Is(err, context.Canceled) {
			t.Errorf("a save goes on: %v", err)
		}
		synctest.Wait()
		if rollback.ctx.Err() != nil {
			t.Error("a rollback is given up")
		}
		rollback.release()
		if err := <-rollback.result; err != nil {
			t.Error(err)
		}
		if err := <-begin(t, t.Context(), o, opRollback, "a").result; !errdefs.IsDeadlineExceeded(err) || err.Error() != "not done within 1m0s: undone" {
			t.Errorf("one without an end: %v", err)
		}
	})
}

// TestClose: at the stack's end some are given up at once, others are given a while; none begins.
func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOperations(config.Default(), slog.New(slog.DiscardHandler))
		never := func(context.Context) error { t.Error("it has begun"); return nil }
		if err := o.run(t.Context(), opSave, "a", time.Minute, never); !errors.Is(err, errNotReady) {
			t.Errorf("before it is ready: %v", err)
		}
		o.open(audit.Nowhere{})
		save, quick, slow := begin(t, t.Context(), o, opSave, "a"), begin(t, t.Context(), o, opRollback, "b"), begin(t, t.Context(), o, opRollback, "c")
		waits := make(chan error, 1)
		go func() { waits <- o.run(t.Context(), opSave, "c", time.Minute, never) }()
		synctest.Wait()
		closing := time.Now()
		for range 2 {
			go o.close()
		}
		if err := <-save.result; !errors.Is(err, errStopping) || time.Since(closing) > 0 {
			t.Errorf("a save, after %v: %v", time.Since(closing), err)
		}
		if err := <-waits; !errors.Is(err, errStopping) {
			t.Errorf("one that waits: %v", err)
		}
		if err := o.run(t.Context(), opSave, "d", time.Minute, never); !errors.Is(err, errStopping) {
			t.Errorf("a late one: %v", err)
		}
		quick.release()
		if err := <-quick.result; err != nil {
			t.Errorf("one that finishes in time: %v", err)
		}
		if err := <-slow.result; !errors.Is(err, errStopping) || time.Since(closing) != DrainTimeout {
			t.Errorf("one that doesn't, after %v: %v", time.Since(closing), err)
		}
		o.close()
	})
}
