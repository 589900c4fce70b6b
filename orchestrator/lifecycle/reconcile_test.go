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

// TestRestart: another engine finds everything as it is, and does what has become due.
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		ctx := t.Context()
		runs, paused, due, duePause, lost, stopped := s.create(nil), s.create(nil), s.create(func(c *Create) { c.Timeout = time.Minute }),
			s.create(func(c *Create) { c.Timeout, c.AutoPause = time.Minute, true }), s.create(nil), s.create(nil)
		must(t, s.Pause(ctx, team, paused.ID, true))
		before, err := s.Routes().Lookup(ctx, runs.ID)
		must(t, err)
		s.stop()
		pass(10 * time.Minute)
		delete(s.host.machines, lost.ID)
		s.host.machines[stopped.ID].state = Still // by somebody else
		s.host.machines["istray"] = &machine{state: Runs, addr: s.host.addr()}
		s.host.machines["ihalf"] = &machine{half: true}
		s.boot()
		defer s.stop()
		pass(2 * time.Second)
		for id, want := range map[string]State{runs.ID: Running, paused.ID: Paused, due.ID: gone, duePause.ID: Paused, lost.ID: gone, stopped.ID: Paused} {
			if got := s.state(id); got != want {
				t.Errorf("%s is %q, not %q", id, got, want)
			}
		}
		if len(s.host.machines) != 4 {
			t.Errorf("%d machines", len(s.host.machines))
		}
		if _, err := s.Get(ctx, team, lost.ID); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "its machine has ended") {
			t.Errorf("the lost one: %v", err)
		}
		if _, err := s.Get(ctx, "blue", lost.ID); !errdefs.IsNotFound(err) || strings.Contains(err.Error(), "ended") {
			t.Errorf("the lost one, to another team: %v", err)
		}
		after, err := s.Routes().Lookup(ctx, runs.ID)
		must(t, err)
		if before.Epoch != after.Epoch || before.Addr != after.Addr || after.Epoch == "" {
			t.Errorf("the way was %+v and is %+v", before, after)
		}
		if sb, err := s.Get(ctx, team, runs.ID); err != nil || sb.EnvdToken != runs.EnvdToken || !sb.EndAt.Equal(runs.EndAt.Truncate(time.Microsecond)) {
			t.Errorf("it was %+v and is %+v, %v", runs, sb, err)
		}
	})
}

// TestHostRestarts: after a restart of the host, what ran is lost, which its team is told, and what was paused goes on.
func TestHostRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		ctx := t.Context()
		ran, paused, spoilt := s.create(nil), s.create(nil), s.create(nil)
		must(t, s.Pause(ctx, team, paused.ID, true))
		must(t, s.Pause(ctx, team, spoilt.ID, true))
		s.stop()
		pass(time.Minute)
		s.o.Since = time.Now()
		delete(s.host.machines, ran.ID)
		delete(s.host.machines, spoilt.ID) // which isn't what a restart does
		s.boot()
		defer s.stop()
		later := s.create(nil)
		pass(time.Second)
		s.host.end(later.ID)
		pass(time.Second)
		for id, why := range map[string]string{ran.ID: "the host was restarted", spoilt.ID: "its machine has ended", later.ID: "its machine has ended"} {
			if _, err := s.Get(ctx, team, id); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), why) {
				t.Errorf("%s: %v", why, err)
			}
		}
		if sb, err := s.Resume(ctx, team, paused.ID, time.Hour, nil); err != nil || sb.EnvdToken != paused.EnvdToken {
			t.Errorf("the paused one: %+v, %v", sb, err)
		}
	})
}

// TestRefusedAfterRestart: a sandbox that was being resumed when the engine ended, and whose hook refuses for good then, is asked
// once and paused again, and so is one that somebody else has resumed. Where the hook agrees both run.
func TestRefusedAfterRestart(t *testing.T) {
	for _, refuses := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			s := newStand(t, Options{})
			ctx := t.Context()
			cut, foreign := s.create(nil), s.create(nil)
			must(t, s.Pause(ctx, team, cut.ID, true))
			must(t, s.Pause(ctx, team, foreign.ID, true))
			s.host.luck(func(ctx context.Context, call, _ string, _ bool) error {
				if call == "hook" {
					<-ctx.Done()
					return context.Cause(ctx)
				}
				return nil
			})
			done := make(chan error)
			go func() { _, err := s.Resume(ctx, team, cut.ID, time.Minute, nil); done <- err }()
			pass(time.Second)
			go s.endLasts(errClosing) // its time to finish anything is over
			if err := <-done; err == nil {
				t.Error("it was resumed all the same")
			}
			s.stop()
			_, err := s.host.get(cut.ID, Runs)
			must(t, err)
			_, _, err = s.host.Resume(ctx, foreign.ID, true)
			must(t, err)

			asked := 0
			s.host.luck(func(_ context.Context, call, _ string, after bool) error {
				if call == "hook" && !after {
					if asked++; refuses {
						return errdefs.ErrInvalidArgument.WithMessage("it answers 400: not me")
					}
				}
				return nil
			})
			s.boot()
			defer s.stop()
			pass(30 * time.Second)
			state, is := Running, Runs
			if refuses {
				state, is = Paused, Still
			}
			for _, id := range []string{cut.ID, foreign.ID} {
				if s.state(id) != state || s.machine(id).state != is {
					t.Errorf("refuses: %v: %s is %s, its machine %v", refuses, id, s.state(id), s.machine(id).state)
				}
			}
			if asked != 2 {
				t.Errorf("refuses: %v: the hooks were asked %d times", refuses, asked)
			}
			if len(s.host.overlap) > 0 {
				t.Errorf("calls at the same time: %v", s.host.overlap)
			}
			s.host.luck(nil)
			for _, id := range []string{cut.ID, foreign.ID} {
				_, _, err := s.Connect(ctx, team, id, time.Hour, nil)
				must(t, err)
				hooked := s.machine(id).hooked
				if now := hooked[len(hooked)-1]; now.RequestID == hooked[0].RequestID {
					t.Errorf("the hook takes its life now for the one before")
				}
			}
		})
	}
}

// TestMachineEnds: a machine that ends by itself is the end of its sandbox, unless it is the pause's.
func TestMachineEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		a, b, c := s.create(nil), s.create(nil), s.create(nil)
		s.host.end(a.ID)
		pass(time.Second)
		if s.state(a.ID) != gone || s.machine(a.ID).addr.IsValid() {
			t.Errorf("it is %s", s.state(a.ID))
		}
		// Amid a pause that fails by it.
		s.host.luck(func(_ context.Context, call, id string, after bool) error {
			if call == "pause" && !after {
				go s.host.end(id)
				time.Sleep(time.Millisecond)
				return errFake
			}
			return nil
		})
		if err := s.Pause(ctx, team, b.ID, true); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "it has ended: its machine has ended") {
			t.Errorf("a machine that has ended was paused: %v", err)
		}
		s.host.luck(nil)
		pass(time.Second)
		if s.state(b.ID) != gone {
			t.Errorf("it is %s", s.state(b.ID))
		}
		if s.host.swept != 3 { // once at the start
			t.Errorf("what they have left was looked for %d times", s.host.swept)
		}
		// The end that a pause makes is heard, too.
		must(t, s.Pause(ctx, team, c.ID, true))
		s.heard(c.ID)
		s.heard("inosuch")
		pass(time.Second)
		if s.state(c.ID) != Paused {
			t.Errorf("it is %s", s.state(c.ID))
		}
	})
}

// TestClosed: an engine that is closed refuses, and so does one that isn't open yet.
func TestClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		ctx := t.Context()
		sb := s.create(nil)
		s.host.slow(3 * time.Second)
		done := make(chan error, 2)
		go func() { done <- s.Pause(ctx, team, sb.ID, true) }()
		pass(time.Second)
		go func() { _, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour}); done <- err }()
		pass(time.Second)
		began := time.Now()
		s.Close()
		if err := errors.Join(<-done, <-done); err == nil || !errdefs.IsUnavailable(err) {
			t.Errorf("what was under way: %v", err)
		}
		if took := time.Since(began); took > 5*time.Second || s.host.machines[sb.ID].state != Still {
			t.Errorf("closed after %v, the machine is %v", took, s.host.machines[sb.ID].state)
		}
		if _, err := s.Get(ctx, team, sb.ID); !errdefs.IsUnavailable(err) || RetryAfter(err) == 0 {
			t.Errorf("closed: %v", err)
		}
		must(t, s.db.Close())
	})
}

// TestStale: what was found out about a sandbox while it was in another state, or had another deadline, changes nothing.
func TestStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		sb := s.create(nil)
		b, seen, err := s.find(team, sb.ID)
		must(t, err)
		must(t, s.SetTimeout(t.Context(), team, sb.ID, 2*time.Hour))
		for _, ev := range []event{evExpire, evGone, evStill} {
			if err := s.advance(t.Context(), b, seen, outcome{event: ev}); !errors.Is(err, errStale) {
				t.Errorf("%s: %v", ev, err)
			}
		}
		pass(time.Second)
		if got := s.state(sb.ID); got != Running {
			t.Errorf("it is %s", got)
		}
	})
}

// TestEndAmidLook: an end that is heard while somebody else looks isn't lost, whoever is first to say what he has seen.
func TestEndAmidLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		sb := s.create(nil)
		pass(time.Second)
		first, second := make(chan struct{}), make(chan struct{})
		looks := 0
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "look" && after {
				switch looks++; looks {
				case 1:
					<-first
				case 2:
					<-second
				}
			}
			return nil
		})
		// The first finds it at another address, so that there is another row.
		s.host.mu.Lock()
		s.host.machines[sb.ID].addr = s.host.addr()
		s.host.mu.Unlock()
		s.heard(sb.ID)
		pass(time.Second)
		s.host.end(sb.ID)
		pass(time.Second)
		close(first)
		pass(time.Second)
		close(second)
		pass(time.Second)
		if got := s.state(sb.ID); got != gone {
			t.Errorf("it is %s after %d looks", got, looks)
		}
	})
}
