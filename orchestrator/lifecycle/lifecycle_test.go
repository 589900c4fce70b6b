package lifecycle

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
)

func TestCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{MaxTimeout: 24 * time.Hour})
		defer s.stop()
		sb := s.create(func(c *Create) { c.Network.AllowOut = []string{"1.1.1.1"} })
		if sb.State != Running || sb.TemplateID != "tbase" || sb.Alias != "base" || sb.EndAt.Sub(sb.StartedAt) != time.Hour || sb.EnvdVersion != "0.6.13" || sb.MemoryMB != 512 {
			t.Errorf("made %+v", sb)
		}
		if len(sb.ID) != 21 || sb.ID[0] != 'i' || len(sb.EnvdToken) != 64 || sb.TrafficToken != "" {
			t.Errorf("id %s, tokens %q and %q", sb.ID, sb.EnvdToken, sb.TrafficToken)
		}
		m := s.machine(sb.ID)
		if len(m.told) != 1 || m.told[0].SandboxID != sb.ID || m.told[0].Token != sb.EnvdToken || m.told[0].Env["X"] != "1" || m.told[0].User != "user" {
			t.Errorf("envd was told %+v", m.told)
		}
		if len(m.hooked) != 1 || m.hooked[0].Event != "create" || m.hooked[0].SandboxID != sb.ID || m.hooked[0].TemplateID != "tbase" || m.hooked[0].RequestID == "" || m.hooked[0].Metadata["a"] != "b" {
			t.Errorf("the hook was told %+v", m.hooked)
		}
		if !slices.Equal(m.started, []string{"serve"}) {
			t.Errorf("started %q", m.started)
		}
		for name, c := range map[string]struct {
			change func(*Create)
			is     func(error) bool
		}{
			"unknown template":     {func(c *Create) { c.Template = "nosuch" }, errdefs.IsNotFound},
			"unknown tag":          {func(c *Create) { c.Template = "base:v9" }, errdefs.IsNotFound},
			"not a template":       {func(c *Create) { c.Template = "../../etc" }, errdefs.IsInvalidArgument},
			"longer than possible": {func(c *Create) { c.Timeout = 25 * time.Hour }, errdefs.IsInvalidArgument},
		} {
			create := Create{Team: team, Template: "base", Timeout: time.Hour}
			c.change(&create)
			if _, err := s.Create(t.Context(), create); !c.is(err) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if _, err := s.Get(t.Context(), "blue", sb.ID); !errdefs.IsNotFound(err) {
			t.Errorf("another team's: %v", err)
		}
		for name, f := range map[string]func() error{
			"kill":    func() error { return s.Kill(t.Context(), "blue", sb.ID) },
			"pause":   func() error { return s.Pause(t.Context(), "blue", sb.ID, true) },
			"timeout": func() error { return s.SetTimeout(t.Context(), "blue", sb.ID, 0) },
		} {
			if err := f(); !errdefs.IsNotFound(err) {
				t.Errorf("another team's %s: %v", name, err)
			}
		}
		must(t, s.Kill(t.Context(), team, sb.ID))
		if _, err := s.Get(t.Context(), team, sb.ID); !errdefs.IsNotFound(err) || len(s.host.machines) != 0 {
			t.Errorf("after the kill: %v, %d machines", err, len(s.host.machines))
		}
		if err := s.Kill(t.Context(), team, sb.ID); !errdefs.IsNotFound(err) {
			t.Errorf("killed twice: %v", err)
		}
	})
}

// TestCreateFails: what can't be made leaves nothing, and its error says why.
func TestCreateFails(t *testing.T) {
	for _, call := range []string{"create", "init", "hook", "start"} {
		for _, how := range []string{"error", "hangs", "client goes"} {
			t.Run(call+" "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newStand(t, Options{})
					defer s.stop()
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					s.host.luck(func(ctx context.Context, c, _ string, after bool) error {
						if c != call || after {
							return nil
						}
						switch how {
						case "hangs":
							<-ctx.Done()
							return context.Cause(ctx)
						case "client goes":
							cancel()
							<-ctx.Done()
							return context.Cause(ctx)
						}
						return errFake
					})
					began := time.Now()
					_, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
					if err == nil || call == "hook" && !strings.Contains(err.Error(), "init hook of its template, port 8080, path /who") {
						t.Errorf("the error is %v", err)
					}
					if took := time.Since(began); took > createTimeout+time.Minute || how != "hangs" && took > 2*time.Second {
						t.Errorf("it took %v", took)
					}
					if n, err := s.db.CountSandboxes(t.Context(), db.Filter{Team: team, States: []string{"creating", "running", "killing"}}); err != nil || n != 0 || len(s.host.machines) != 0 {
						t.Errorf("%d rows, %d machines, %v are left", n, len(s.host.machines), err)
					}
				})
			})
		}
	}
}

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

// TestSlowHook: a hook that takes its time keeps nobody else waiting.
func TestSlowHook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{Starts: 1})
		defer s.stop()
		slow := make(chan struct{})
		hooks := 0
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "hook" && !after {
				if hooks++; hooks == 1 {
					<-slow
				}
			}
			return nil
		})
		done := make(chan error, 1)
		go func() {
			_, err := s.Create(t.Context(), Create{Team: team, Template: "base", Timeout: time.Hour})
			done <- err
		}()
		pass(5 * time.Second)
		began := time.Now()
		s.create(nil)
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("it took %v", took)
		}
		close(slow)
		must(t, <-done)
	})
}
