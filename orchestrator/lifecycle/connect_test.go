package lifecycle

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
)

// TestConnectWaits: it waits for a pause or resume under way and resumes, and for no kill.
func TestConnectWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		sb := s.create(nil)
		s.host.slow(3 * time.Second)
		paused := make(chan error, 1)
		go func() { paused <- s.Pause(ctx, team, sb.ID, true) }()
		pass(time.Second)
		if err := s.SetTimeout(ctx, team, sb.ID, time.Minute); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("timeout amid a pause: %v", err)
		}
		if err := s.Pause(ctx, team, sb.ID, true); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("pause amid a pause: %v", err)
		}
		type result struct {
			resumed bool
			err     error
		}
		results := make(chan result, 5)
		for range cap(results) {
			go func() {
				_, resumed, err := s.Connect(ctx, team, sb.ID, time.Minute, nil)
				results <- result{resumed, err}
			}()
		}
		resumed := 0
		for range cap(results) {
			r := <-results
			must(t, r.err)
			if r.resumed {
				resumed++
			}
		}
		must(t, <-paused)
		if resumed != 1 || s.state(sb.ID) != Running || s.machine(sb.ID).lives != 2 {
			t.Errorf("%d have resumed it, it is %s in its life %d", resumed, s.state(sb.ID), s.machine(sb.ID).lives)
		}
		go func() { _ = s.Kill(ctx, team, sb.ID) }()
		pass(time.Second)
		if _, _, err := s.Connect(ctx, team, sb.ID, time.Minute, nil); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("connect amid a kill: %v", err)
		}
		pass(10 * time.Second)
		if _, _, err := s.Connect(ctx, team, sb.ID, time.Minute, nil); !errdefs.IsNotFound(err) {
			t.Errorf("connect after a kill: %v", err)
		}
	})
}

func TestWake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx, ways := t.Context(), s.Routes()
		auto := s.create(func(c *Create) { c.Timeout, c.AutoPause, c.AutoResume = 10*time.Second, true, true })
		long := s.create(func(c *Create) { c.AutoResume = true })
		not := s.create(nil)
		pass(11 * time.Second)
		must(t, s.Pause(ctx, team, long.ID, true))
		must(t, s.Pause(ctx, team, not.ID, true))
		for id, want := range map[string]time.Duration{auto.ID: minAutoResume, long.ID: time.Hour} {
			way, err := ways.Wake(ctx, id)
			must(t, err)
			sb, err := s.Get(ctx, team, id)
			must(t, err)
			if way.EnvdToken == "" || way.EnvdToken != sb.EnvdToken {
				t.Errorf("by the way in, nobody can be let wake it: %q", way.EnvdToken)
			}
			if !way.Open() || time.Until(sb.EndAt) > want || time.Until(sb.EndAt) < want-time.Second {
				t.Errorf("woken: %v, for %v", way, time.Until(sb.EndAt))
			}
		}
		if _, err := ways.Wake(ctx, not.ID); !errdefs.IsPermissionDenied(err) {
			t.Errorf("one that isn't to be: %v", err)
		}
		must(t, s.Pause(ctx, team, long.ID, false))
		if _, err := ways.Wake(ctx, long.ID); !errdefs.IsPermissionDenied(err) {
			t.Errorf("one without memory: %v", err)
		}
		if _, err := ways.Wake(ctx, "inosuch"); !errdefs.IsNotFound(err) {
			t.Errorf("one that isn't there: %v", err)
		}
	})
}
