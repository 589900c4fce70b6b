package lifecycle

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
)

func TestPauseAndResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		sb := s.create(nil)
		_, row, err := s.find(team, sb.ID)
		must(t, err)
		if _, err := s.Resume(ctx, team, sb.ID, time.Minute, nil); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("resumed while it runs: %v", err)
		}
		for i := range 3 {
			must(t, s.Pause(ctx, team, sb.ID, true))
			if err := s.Pause(ctx, team, sb.ID, true); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "paused already") {
				t.Errorf("paused twice: %v", err)
			}
			for name, err := range map[string]error{
				"timeout": s.SetTimeout(ctx, team, sb.ID, time.Minute),
				"network": s.UpdateNetwork(ctx, team, sb.ID, Network{}, nil),
			} {
				if !errdefs.IsFailedPrecondition(err) {
					t.Errorf("%s of a paused one: %v", name, err)
				}
			}
			if _, err := s.Fork(ctx, team, sb.ID, time.Minute, 1); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("fork of a paused one: %v", err)
			}
			up, err := s.Resume(ctx, team, sb.ID, time.Minute, nil)
			must(t, err)
			if up.ID != sb.ID || up.EnvdToken != sb.EnvdToken {
				t.Errorf("resumed as %+v", up)
			}
			m := s.machine(sb.ID)
			if n := len(m.hooked); n != i+2 || m.hooked[n-1].Event != "resume" || m.hooked[n-1].RequestID == m.hooked[n-2].RequestID || len(m.started) != 1 {
				t.Errorf("the hook was told %+v, started %q", m.hooked, m.started)
			}
		}
		_, again, err := s.find(team, sb.ID)
		must(t, err)
		if again.Epoch == row.Epoch || again.addr == row.addr {
			t.Errorf("the epoch is still %s, the address %v", again.Epoch, again.addr)
		}
		// Without memory it is the same sandbox, whose start command starts anew.
		must(t, s.Pause(ctx, team, sb.ID, false))
		up, resumed, err := s.Connect(ctx, team, sb.ID, time.Minute, nil)
		must(t, err)
		if m := s.machine(sb.ID); !resumed || up.ID != sb.ID || up.EnvdToken != sb.EnvdToken || m.memory || len(m.started) != 2 {
			t.Errorf("cold: %v, %+v, %+v", resumed, up, m)
		}
		// Memory that was kept can be done without.
		must(t, s.Pause(ctx, team, sb.ID, true))
		no := false
		_, _, err = s.Connect(ctx, team, sb.ID, time.Minute, &no)
		must(t, err)
		if m := s.machine(sb.ID); m.memory || len(m.started) != 3 {
			t.Errorf("rebooted: %+v", m)
		}
	})
}

// TestTransitionFails: a sandbox is in the state that its machine is in, whatever fails.
func TestTransitionFails(t *testing.T) {
	for _, call := range []string{"pause", "resume", "save", "init", "hook"} {
		for _, after := range []bool{false, true} {
			t.Run(call+map[bool]string{false: " before", true: " after"}[after], func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newStand(t, Options{})
					defer s.stop()
					ctx := t.Context()
					sb := s.create(nil)
					fail := func(_ context.Context, c, _ string, a bool) error {
						if c == call && a == after {
							return errFake
						}
						return nil
					}
					set := s.host.luck
					want := Running
					switch call {
					case "pause":
						set(fail)
						if err := s.Pause(ctx, team, sb.ID, true); (err == nil) != after {
							t.Errorf("the error is %v", err)
						}
						if after {
							want = Paused
						}
					case "save":
						set(fail)
						if _, err := s.Snapshot(ctx, team, sb.ID, ""); err == nil {
							t.Error("no error")
						}
					default:
						must(t, s.Pause(ctx, team, sb.ID, true))
						set(fail)
						if _, err := s.Resume(ctx, team, sb.ID, time.Minute, nil); err == nil {
							t.Error("no error")
						}
						if want = Paused; call == "resume" && after {
							want = Running // and told so
						}
					}
					set(nil)
					pass(time.Second)
					if got := s.state(sb.ID); got != want {
						t.Errorf("it is %s, not %s", got, want)
					}
					_, _, err := s.Connect(ctx, team, sb.ID, time.Minute, nil)
					must(t, err)
					if loose, err := s.db.Loose(ctx); err != nil || len(loose) > 0 || len(s.host.snapshots) != 1 {
						t.Errorf("left are %v, %v, %v", loose, s.host.snapshots, err)
					}
				})
			})
		}
	}
}

// TestMachineErrors: an error of the machine is none of what was asked, and is asked for once.
func TestMachineErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		sb := s.create(nil)
		must(t, s.Pause(ctx, team, sb.ID, true))
		for _, class := range []error{errdefs.ErrFailedPrecondition, errdefs.ErrNotFound, errdefs.ErrAlreadyExists, errdefs.ErrUnavailable, errdefs.ErrResourceExhausted} {
			tries := 0
			s.host.luck(func(_ context.Context, call, _ string, after bool) error {
				if (call == "resume" || call == "create") && !after {
					tries++
					return class
				}
				return nil
			})
			_, _, err := s.Connect(ctx, team, sb.ID, time.Minute, nil)
			_, created := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
			for _, err := range []error{err, created} {
				kept := errdefs.IsUnavailable(class) || errdefs.IsResourceExhausted(class)
				if kept != errdefs.IsUnavailable(err) || kept != (RetryAfter(err) > 0) || kept == errdefs.IsInternal(err) || errdefs.IsFailedPrecondition(err) || errdefs.IsNotFound(err) {
					t.Errorf("%v is told as %v", class, err)
				}
			}
			if tries != 2 || s.state(sb.ID) != Paused {
				t.Errorf("%v: %d tries, it is %s", class, tries, s.state(sb.ID))
			}
		}
		// What takes too long may not the next time.
		s.host.luck(func(ctx context.Context, call, _ string, after bool) error {
			if call == "create" && !after {
				<-ctx.Done()
				return context.Cause(ctx)
			}
			return nil
		})
		if _, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour}); !errdefs.IsUnavailable(err) || RetryAfter(err) == 0 || !strings.Contains(err.Error(), "not done within 1m0s") {
			t.Errorf("one that hangs: %v", err)
		}
	})
}
