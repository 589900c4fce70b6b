package lifecycle

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
)

func TestAdmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var left int64 = 1024<<20 + headroom
		s := newStand(t, Options{Starts: 4, MaxSandboxes: 3, Memory: func() (int64, error) { return left, nil }})
		defer s.stop()
		ctx := t.Context()
		// Two of 512 MiB go in at once, whoever asks.
		errs := make(chan error, 4)
		for range cap(errs) {
			go func() {
				_, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
				errs <- err
			}()
		}
		good := 0
		for range cap(errs) {
			err := <-errs
			switch {
			case err == nil:
				good++
			case !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "512 MiB") || RetryAfter(err) < time.Second:
				t.Errorf("refused with %v", err)
			}
		}
		if good != 2 {
			t.Errorf("%d were made", good)
		}
		sb := s.create(nil)
		if _, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour}); !errdefs.IsResourceExhausted(err) {
			t.Errorf("a fourth: %v", err)
		}
		must(t, s.Pause(ctx, team, sb.ID, true))
		third := s.create(nil)
		if _, _, err := s.Connect(ctx, team, sb.ID, time.Hour, nil); !errdefs.IsResourceExhausted(err) || s.state(sb.ID) != Paused {
			t.Errorf("resumed beyond the most: %v, %s", err, s.state(sb.ID))
		}
		// Traffic is told so, too.
		must(t, s.Kill(ctx, team, third.ID))
		asleep := s.create(func(c *Create) { c.AutoResume = true })
		must(t, s.Pause(ctx, team, asleep.ID, true))
		left = headroom
		if _, err := s.Routes().Wake(ctx, asleep.ID); !errdefs.IsResourceExhausted(err) || !strings.Contains(err.Error(), "512 MiB") {
			t.Errorf("woken where there is no room: %v", err)
		}
		if n, err := available(); err != nil || n < 1<<20 {
			t.Errorf("the host has %d bytes, %v", n, err)
		}
	})
}

// TestQueue: who has no turn within half a minute is told so, and those before him aren't bothered.
func TestQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{Starts: 1})
		defer s.stop()
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "create" && !after {
				time.Sleep(12 * time.Second)
			}
			return nil
		})
		type result struct {
			err  error
			took time.Duration
		}
		results := make(chan result, 5)
		began := time.Now()
		for range cap(results) {
			go func() {
				_, err := s.Create(t.Context(), Create{Team: team, Template: "base", Timeout: time.Hour})
				results <- result{err, time.Since(began)}
			}()
		}
		made := 0
		for range cap(results) {
			r := <-results
			switch {
			case r.err == nil:
				made++
			case !errdefs.IsUnavailable(r.err) || RetryAfter(r.err) == 0 || r.took != queueTimeout:
				t.Errorf("refused after %v: %v", r.took, r.err)
			}
		}
		if made != 3 {
			t.Errorf("%d were made", made)
		}
	})
}

// TestShare: of as many as come at once, a team gets its share and no more, and each place that one gives up is another's.
func TestShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{Starts: 10, MaxSandboxes: 3})
		defer s.stop()
		ctx := t.Context()
		create := func(team string) (string, error) {
			sb, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
			return sb.ID, err
		}
		var paused []string
		for range 5 {
			sb := s.create(nil)
			must(t, s.Pause(ctx, team, sb.ID, true))
			paused = append(paused, sb.ID)
		}
		const n = 10
		errs := make(chan error, 2*n)
		for i := range n {
			go func() {
				if i%2 == 0 {
					_, err := s.Resume(ctx, team, paused[i/2], time.Hour, nil)
					errs <- err
					return
				}
				_, err := create(team)
				errs <- err
			}()
			go func() { _, err := create("blue"); errs <- err }()
		}
		good := 0
		for range 2 * n {
			if err := <-errs; err == nil {
				good++
			} else if !errdefs.IsResourceExhausted(err) {
				t.Errorf("refused with %v", err)
			}
		}
		if good != 6 {
			t.Errorf("%d run of two teams that may have 3 each", good)
		}
		// What fails gives its place back.
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "create" && !after {
				return errFake
			}
			return nil
		})
		page, _, running, err := s.List(ctx, "blue", Filter{Limit: 10})
		if err != nil || len(page) != 3 || running != 3 {
			t.Fatalf("blue's: %d, %d run, %v", len(page), running, err)
		}
		must(t, s.Kill(ctx, "blue", page[0].ID))
		for range 3 {
			if _, err := create("blue"); !errdefs.IsUnavailable(err) {
				t.Errorf("one that can't be made: %v", err)
			}
		}
		s.host.luck(nil)
		id, err := create("blue")
		must(t, err)
		must(t, s.Pause(ctx, "blue", id, true))
		_, err = create("blue")
		must(t, err)
		for states, want := range map[State]int{Running: 3, Paused: 0} {
			if _, _, running, err := s.List(ctx, "blue", Filter{States: []State{states}, Limit: 1}); err != nil || running != want {
				t.Errorf("of the list of those that are %s, %d run, %v", states, running, err)
			}
		}
		if len(s.admitted) != 0 {
			t.Errorf("admitted are still %v", s.admitted)
		}
	})
}
