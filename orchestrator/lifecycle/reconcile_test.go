package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/ingress"
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
		if err := s.Pause(ctx, team, b.ID, true); err == nil {
			t.Error("a machine that has ended was paused")
		}
		s.host.luck(nil)
		pass(time.Second)
		if s.state(b.ID) != gone {
			t.Errorf("it is %s", s.state(b.ID))
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

// TestDies has the engine's process die at each call that operations make, before or after it has worked, and another one go
// on: nothing is lost, nothing is left, nothing is there twice, and all can be used.
func TestDies(t *testing.T) {
	operations := map[string]func(context.Context, *stand, string) error{
		"create": func(ctx context.Context, s *stand, _ string) error {
			_, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
			return err
		},
		"pause":      func(ctx context.Context, s *stand, id string) error { return s.Pause(ctx, team, id, true) },
		"pause cold": func(ctx context.Context, s *stand, id string) error { return s.Pause(ctx, team, id, false) },
		"resume": func(ctx context.Context, s *stand, id string) error {
			if err := s.Pause(ctx, team, id, true); err != nil {
				return err
			}
			_, err := s.Resume(ctx, team, id, time.Hour, nil)
			return err
		},
		"kill": func(ctx context.Context, s *stand, id string) error { return s.Kill(ctx, team, id) },
		"snapshot": func(ctx context.Context, s *stand, id string) error {
			_, err := s.Snapshot(ctx, team, id, "snap")
			return err
		},
		"fork": func(ctx context.Context, s *stand, id string) error {
			_, err := s.Fork(ctx, team, id, time.Hour, 2)
			return err
		},
		"rollback": func(ctx context.Context, s *stand, id string) error {
			if _, err := s.Snapshot(ctx, team, id, "snap"); err != nil {
				return err
			}
			return s.Rollback(ctx, team, id, "default/snap:default")
		},
		"init": func(ctx context.Context, s *stand, id string) error {
			return s.InitAgain(ctx, team, id, map[string]string{"N": "1"}, "r")
		},
	}
	for name, operate := range operations {
		died := true
		for n := 0; died; n++ {
			for _, after := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, call %d, after: %v", name, n, after), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						died = dies(t, n, after, operate)
					})
				})
			}
		}
	}
}

var errDied = errors.New("this engine's process has died")

// dies tells whether the operation had an n-th call.
func dies(t *testing.T, n int, after bool, operate func(context.Context, *stand, string) error) bool {
	s := newStand(t, Options{Starts: 1})
	ctx := t.Context()
	sb := s.create(nil)
	var mu sync.Mutex
	calls, dead := 0, false
	death := make(chan struct{})
	s.host.luck(func(_ context.Context, call, _ string, a bool) error {
		mu.Lock()
		defer mu.Unlock()
		if dead { // what it still asks for doesn't happen
			return errDied
		}
		if a != after {
			return nil
		}
		if calls++; calls <= n {
			return nil
		}
		dead = true
		close(death)
		return errDied
	})
	finished := make(chan struct{})
	var result error
	go func() {
		defer close(finished)
		result = operate(ctx, s, sb.ID)
	}()
	select {
	case <-death:
	case <-finished:
	}
	mu.Lock()
	hit := dead
	mu.Unlock()
	// The database has what it had at that moment: nothing more is written.
	must(t, s.db.Close())
	s.Close()
	if <-finished; !hit {
		must(t, result)
	}
	s.host.luck(nil)
	s.boot()
	defer s.stop()
	pass(time.Minute)

	rows, err := s.db.SandboxesIn(ctx)
	must(t, err)
	var ids []string
	for _, r := range rows {
		ids = append(ids, r.ID)
		want := map[State]Presence{Running: Runs, Paused: Still}
		p, rest := want[State(r.State)]
		if m := s.machine(r.ID); !rest || m.state != p || m.half {
			t.Errorf("sandbox %s is %s, its machine %v", r.ID, r.State, m.state)
		}
	}
	if len(s.host.machines) != len(rows) {
		t.Errorf("%d machines, %d sandboxes", len(s.host.machines), len(rows))
	}
	builds, err := s.db.Builds(ctx, "tbase")
	must(t, err)
	snaps, _, err := s.Snapshots(ctx, team, SnapshotFilter{Limit: 100})
	must(t, err)
	if loose, err := s.db.Loose(ctx); err != nil || len(loose) > 0 || len(s.host.snapshots) != len(builds)+len(snaps) {
		t.Errorf("loose: %v; machines' snapshots %v for %d and %d; %v", loose, s.host.snapshots, len(builds), len(snaps), err)
	}
	if len(s.host.overlap) > 0 {
		t.Errorf("calls at the same time: %v", s.host.overlap)
	}
	// Nothing but a kill takes the first one, and it can be used.
	if slices.Contains(ids, sb.ID) {
		_, _, err := s.Connect(ctx, team, sb.ID, time.Hour, nil)
		must(t, err)
		_, r, err := s.find(team, sb.ID)
		must(t, err)
		if m := s.machine(sb.ID); len(m.told) == 0 || m.addr != r.addr {
			t.Errorf("it is reached at %v, its machine at %v", r.addr, m.addr)
		}
		must(t, s.Kill(ctx, team, sb.ID))
	} else if _, why, _ := s.db.Ended(ctx, team, sb.ID); why != "" {
		t.Errorf("it was lost: %s", why)
	}
	return hit
}

// TestMany has many of everything at once.
func TestMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{Starts: 8})
		ctx := t.Context()
		watched := make(chan error, 1)
		wctx, stop := context.WithCancel(ctx)
		ways := map[string]ingress.Route{}
		go func() {
			watched <- s.Routes().Watch(wctx, func(u ingress.Update) error {
				for _, w := range u.Routes {
					ways[w.SandboxID] = w
				}
				for _, id := range u.Gone {
					delete(ways, id)
				}
				return nil
			})
		}()
		var all sync.WaitGroup
		for i := range 100 {
			all.Go(func() {
				sb, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour, Secure: true})
				if err != nil {
					t.Error(err)
					return
				}
				var each sync.WaitGroup
				for j := range 4 {
					each.Go(func() {
						for k := range 5 {
							var err error
							switch (i + j + k) % 5 {
							case 0:
								err = s.Pause(ctx, team, sb.ID, true)
							case 1:
								_, _, err = s.Connect(ctx, team, sb.ID, time.Hour, nil)
							case 2:
								err = s.SetTimeout(ctx, team, sb.ID, time.Hour)
							case 3:
								_, err = s.Get(ctx, team, sb.ID)
							case 4:
								_, err = s.Snapshot(ctx, team, sb.ID, "")
							}
							if err != nil && !errdefs.IsFailedPrecondition(err) {
								t.Errorf("%d: %v", (i+j+k)%5, err)
							}
						}
					})
				}
				each.Wait()
				if i%2 == 0 {
					if err := s.Kill(ctx, team, sb.ID); err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		synctest.Wait()
		if len(s.host.overlap) > 0 {
			t.Errorf("calls at the same time: %v", s.host.overlap)
		}
		rows, err := s.db.SandboxesIn(ctx)
		must(t, err)
		if len(rows) != 50 || len(s.host.machines) != 50 || len(ways) != 50 {
			t.Errorf("%d rows, %d machines, %d ways", len(rows), len(s.host.machines), len(ways))
		}
		for _, r := range rows {
			if way, m := ways[r.ID], s.host.machines[r.ID]; way.State != r.State || way.Addr != m.addr {
				t.Errorf("%s is %s, its way %v, its machine at %v", r.ID, r.State, way, m.addr)
			}
		}
		stop()
		<-watched
		s.stop()
	})
}

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
		s.create(nil)
		if _, _, err := s.Connect(ctx, team, sb.ID, time.Hour, nil); !errdefs.IsResourceExhausted(err) || s.state(sb.ID) != Paused {
			t.Errorf("resumed beyond the most: %v, %s", err, s.state(sb.ID))
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
