package lifecycle

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
)

// TestExec: a command runs to its end, and not longer than its sandbox, the engine, or whoever waits for it.
func TestExec(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		ctx := t.Context()
		sb := s.create(nil)
		var said string
		exit, err := s.Exec(ctx, team, sb.ID, "echo", func(o Output) { said += string(o.Bytes) })
		if err != nil || exit.Code != 0 || said != "echo" {
			t.Errorf("%+v, %q, %v", exit, said, err)
		}
		hangs := func(id string) chan error {
			ended := make(chan error, 1)
			go func() {
				_, err := s.Exec(ctx, team, id, "until killed", func(Output) {})
				ended <- err
			}()
			pass(time.Minute)
			return ended
		}
		killed, ends, closed := s.create(nil), s.create(nil), s.create(nil)
		ended := hangs(killed.ID)
		must(t, s.Kill(ctx, team, killed.ID))
		if err := <-ended; !errors.Is(err, errKilled) {
			t.Errorf("of a sandbox that was killed: %v", err)
		}
		ended = hangs(ends.ID)
		s.host.end(ends.ID)
		if err := <-ended; !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "its machine has ended") {
			t.Errorf("of a sandbox that has ended: %v", err)
		}
		paused, back := s.create(nil), s.create(nil)
		ended = hangs(paused.ID)
		must(t, s.Pause(ctx, team, paused.ID, true))
		if err := <-ended; !errors.Is(err, errElsewhere) {
			t.Errorf("of a sandbox that was paused: %v", err)
		}
		s.snap(back.ID, "mine")
		ended = hangs(back.ID)
		must(t, s.Rollback(ctx, team, back.ID, "mine"))
		if err := <-ended; !errors.Is(err, errElsewhere) {
			t.Errorf("of a sandbox that was rolled back: %v", err)
		}
		late, cancel := context.WithTimeoutCause(ctx, time.Minute, errFake)
		defer cancel()
		if _, err := s.Exec(late, team, sb.ID, "until killed", func(Output) {}); !errors.Is(err, errFake) {
			t.Errorf("whose time is over: %v", err)
		}
		if _, err := s.Exec(ctx, "blue", sb.ID, "echo", nil); !errdefs.IsNotFound(err) {
			t.Errorf("of another team's sandbox: %v", err)
		}
		must(t, s.Pause(ctx, team, sb.ID, true))
		if _, err := s.Exec(ctx, team, sb.ID, "echo", nil); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("of one that is paused: %v", err)
		}
		ended = hangs(closed.ID)
		s.stop()
		if err := <-ended; !errors.Is(err, errClosing) {
			t.Errorf("when the engine was closed: %v", err)
		}
	})
}

// TestEphemeral: what is to end with the engine is removed by the next one, whatever state it is in; its children and others stay.
func TestEphemeral(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		ctx := t.Context()
		ephemeral := func(c *Create) { c.Ephemeral = true }
		stays, runs, paused, pausing := s.create(nil), s.create(ephemeral), s.create(ephemeral), s.create(ephemeral)
		children, err := s.Fork(ctx, team, runs.ID, time.Hour, 1)
		must(t, errors.Join(err, children[0].Err))
		must(t, s.Pause(ctx, team, paused.ID, true))
		// It dies amid a pause, and before a create is over.
		s.host.slow(time.Hour)
		go func() { _ = s.Pause(ctx, team, pausing.ID, true) }()
		go func() {
			_, _ = s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour, Ephemeral: true})
		}()
		pass(time.Second)
		s.host.luck(func(context.Context, string, string, bool) error { return errDied }) // what it still asks for doesn't happen
		must(t, s.db.Close())
		s.Close()
		s.host.luck(nil)
		s.host.slow(time.Millisecond)
		s.boot()
		defer s.stop()
		pass(time.Minute)
		if s.state(stays.ID) != Running || s.state(children[0].Sandbox.ID) != Running {
			t.Errorf("what stays is %q and %q", s.state(stays.ID), s.state(children[0].Sandbox.ID))
		}
		for _, sb := range []Sandbox{runs, paused, pausing} {
			if got := s.state(sb.ID); got != gone {
				t.Errorf("%s is %s", sb.ID, got)
			}
		}
		if n := len(s.host.machines); n != 2 {
			t.Errorf("%d machines", n)
		}
		if _, err := s.Get(ctx, team, runs.ID); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "has ended with cube") {
			t.Errorf("its team is told %v", err)
		}
	})
}
