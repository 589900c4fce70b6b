package lifecycle

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
)

// TestKillInterrupts: a kill ends what is under way at once.
func TestKillInterrupts(t *testing.T) {
	for _, call := range []string{"create", "init", "hook", "pause", "resume", "save"} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t, Options{})
				defer s.stop()
				ctx := t.Context()
				hang := func(ctx context.Context, c, _ string, after bool) error {
					if c != call || after {
						return nil
					}
					<-ctx.Done()
					return context.Cause(ctx)
				}
				set := func() { s.host.luck(hang) }
				done := make(chan error, 1)
				var id string
				if call == "create" || call == "init" || call == "hook" {
					set()
					go func() {
						_, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
						done <- err
					}()
					pass(time.Second)
					rows, err := s.db.SandboxesIn(ctx)
					must(t, err)
					id = rows[0].ID
				} else {
					id = s.create(nil).ID
					if call == "resume" {
						must(t, s.Pause(ctx, team, id, true))
					}
					set()
					go func() {
						var err error
						switch call {
						case "pause":
							err = s.Pause(ctx, team, id, true)
						case "resume":
							_, err = s.Resume(ctx, team, id, time.Minute, nil)
						case "save":
							_, err = s.Fork(ctx, team, id, time.Minute, 3)
						}
						done <- err
					}()
					pass(time.Second)
				}
				began := time.Now()
				must(t, s.Kill(ctx, team, id))
				if took := time.Since(began); took > time.Second {
					t.Errorf("the kill took %v", took)
				}
				if err := <-done; err == nil {
					t.Error("what was interrupted has worked")
				}
				if len(s.host.machines) != 0 || s.state(id) != gone || len(s.host.overlap) > 0 {
					t.Errorf("left: %d machines, %s, overlap %v", len(s.host.machines), s.state(id), s.host.overlap)
				}
			})
		})
	}
}

// TestKillFails: what can't be removed is tried again, and isn't there for users meanwhile.
func TestKillFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		sb := s.create(nil)
		kills := 0
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "kill" && !after {
				if kills++; kills < 5 {
					return errFake
				}
			}
			return nil
		})
		if err := s.Kill(ctx, team, sb.ID); !errdefs.IsUnavailable(err) {
			t.Errorf("the error is %v", err)
		}
		if _, err := s.Get(ctx, team, sb.ID); !errdefs.IsNotFound(err) {
			t.Errorf("it is there: %v", err)
		}
		pass(time.Minute)
		if s.state(sb.ID) != gone || len(s.host.machines) != 0 || kills != 5 {
			t.Errorf("it is %s after %d kills", s.state(sb.ID), kills)
		}
	})
}

// TestKillGoesOn: what was interrupted, and ends only when a kill has failed, doesn't keep that from being tried again.
func TestKillGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		sb := s.create(nil)
		slow, tries := make(chan struct{}), 0
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			switch {
			case call == "pause" && after:
				<-slow
			case call == "kill" && !after:
				if tries++; tries == 1 {
					return errFake
				}
			}
			return nil
		})
		go func() { _ = s.Pause(t.Context(), team, sb.ID, true) }()
		pass(time.Second)
		if err := s.Kill(t.Context(), team, sb.ID); err == nil || tries != 1 {
			t.Fatalf("killed after %d tries", tries)
		}
		close(slow)
		pass(10 * time.Second)
		if s.state(sb.ID) != gone || tries != 2 {
			t.Errorf("it is %s after %d tries", s.state(sb.ID), tries)
		}
	})
}

// TestKillTakesLong: a kill that has interrupted something isn't interrupted by another try of its own, however long it takes.
func TestKillTakesLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		sb := s.create(nil)
		s.host.slow(10 * time.Second)
		saved := make(chan error, 1)
		go func() {
			_, err := s.Snapshot(ctx, team, sb.ID, "mine")
			saved <- err
		}()
		pass(time.Second)
		must(t, s.Kill(ctx, team, sb.ID))
		if err := <-saved; err == nil {
			t.Error("it was saved")
		}
		kills := 0
		for _, call := range s.host.calls {
			if call == "kill "+sb.ID {
				kills++
			}
		}
		if kills != 1 || s.state(sb.ID) != gone {
			t.Errorf("%d kills, it is %q", kills, s.state(sb.ID))
		}
	})
}
