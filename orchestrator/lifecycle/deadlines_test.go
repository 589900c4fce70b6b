package lifecycle

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{MaxTimeout: 2 * time.Hour})
		defer s.stop()
		short := func(c *Create) { c.Timeout = 10 * time.Second }
		killed := s.create(short)
		paused := s.create(func(c *Create) { short(c); c.AutoPause = true })
		cold := s.create(func(c *Create) { short(c); c.AutoPause, c.AutoPauseMemory = true, false })
		extended := s.create(short)
		must(t, s.SetTimeout(t.Context(), team, extended.ID, time.Minute))
		refreshed := s.create(short)
		must(t, s.Refresh(t.Context(), team, refreshed.ID, 0)) // which is 15 s
		atOnce := s.create(nil)
		must(t, s.SetTimeout(t.Context(), team, atOnce.ID, -1))
		pass(2 * time.Second)
		if s.state(atOnce.ID) != gone {
			t.Errorf("timeout 0: %s", s.state(atOnce.ID))
		}
		pass(9 * time.Second)
		if s.state(killed.ID) != gone || s.state(paused.ID) != Paused || !s.machine(paused.ID).memory || s.state(cold.ID) != Paused || s.machine(cold.ID).memory || s.state(extended.ID) != Running || s.state(refreshed.ID) != Running {
			t.Errorf("after 11 s: %s, %s, %s, %s, %s", s.state(killed.ID), s.state(paused.ID), s.state(cold.ID), s.state(extended.ID), s.state(refreshed.ID))
		}
		pass(5 * time.Second)
		if s.state(refreshed.ID) != gone {
			t.Errorf("after the refresh's 15 s: %s", s.state(refreshed.ID))
		}
		// Neither refresh nor connect makes a deadline earlier, and nothing makes it later than the most.
		must(t, s.Refresh(t.Context(), team, extended.ID, 15*time.Second))
		_, resumed, err := s.Connect(t.Context(), team, extended.ID, time.Second, nil)
		must(t, err)
		pass(25 * time.Second)
		if resumed || s.state(extended.ID) != Running {
			t.Errorf("shortened: %v, %s", resumed, s.state(extended.ID))
		}
		must(t, s.SetTimeout(t.Context(), team, extended.ID, 100*time.Hour))
		sb, err := s.Get(t.Context(), team, extended.ID)
		must(t, err)
		if sb.EndAt.Sub(sb.StartedAt) != 2*time.Hour {
			t.Errorf("runs for %v", sb.EndAt.Sub(sb.StartedAt))
		}
		// A pause stops the clock, and says when it was.
		sb, err = s.Get(t.Context(), team, paused.ID)
		must(t, err)
		if d := time.Since(sb.EndAt); d < time.Second || d > time.Hour {
			t.Errorf("paused for %v", d)
		}
		pass(24 * time.Hour)
		if s.state(paused.ID) != Paused || s.state(extended.ID) != gone {
			t.Errorf("a day after: %s, %s", s.state(paused.ID), s.state(extended.ID))
		}
		sb, resumed, err = s.Connect(t.Context(), team, paused.ID, time.Minute, nil)
		must(t, err)
		if !resumed || sb.State != Running || time.Until(sb.EndAt) != time.Minute || sb.EnvdToken != paused.EnvdToken {
			t.Errorf("resumed: %v, %+v", resumed, sb)
		}
	})
}

// TestAutoPauseFails: what can't be paused runs on, and is tried again, not all the time.
func TestAutoPauseFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		sb := s.create(func(c *Create) { c.Timeout, c.AutoPause = 10*time.Second, true })
		tries := 0
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "pause" && !after {
				tries++
				return errFake
			}
			return nil
		})
		pass(5 * time.Minute)
		if s.state(sb.ID) != Running || tries < 5 || tries > 15 {
			t.Errorf("it is %s after %d tries", s.state(sb.ID), tries)
		}
		// Meanwhile it can be used, and given more time.
		must(t, s.SetTimeout(t.Context(), team, sb.ID, time.Hour))
		before := tries
		pass(50 * time.Minute)
		if tries != before || s.state(sb.ID) != Running {
			t.Errorf("%d tries before its deadline, it is %s", tries-before, s.state(sb.ID))
		}
		s.host.luck(nil)
		pass(15 * time.Minute)
		if s.state(sb.ID) != Paused {
			t.Errorf("it is %s", s.state(sb.ID))
		}
	})
}

// TestDeadlineIsKept: what fails but the deadline's own pause puts no deadline off, however often it is tried.
func TestDeadlineIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if (call == "pause" || call == "save") && !after {
				return errFake
			}
			return nil
		})
		for name, try := range map[string]func(id string) error{
			"pause":    func(id string) error { return s.Pause(ctx, team, id, true) },
			"snapshot": func(id string) error { _, err := s.Snapshot(ctx, team, id, ""); return err },
			"fork":     func(id string) error { _, err := s.Fork(ctx, team, id, time.Hour, 1); return err },
		} {
			sb := s.create(func(c *Create) { c.Timeout = 10 * time.Second })
			tries := 0
			for began := time.Now(); s.state(sb.ID) != gone && time.Since(began) < 20*time.Second; tries++ {
				_ = try(sb.ID)
				pass(100 * time.Millisecond)
			}
			if over := time.Since(sb.EndAt); tries < 10 || over > 2*time.Second {
				t.Errorf("%s: it has ended %v after its deadline, with %d tries", name, over, tries)
			}
		}
	})
}
