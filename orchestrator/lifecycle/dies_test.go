package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

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
	rec, next := &recorder{}, &recorder{}
	s := newStand(t, Options{Starts: 1, Audit: rec})
	ctx := t.Context()
	sb := s.create(nil)
	rec.took(nil)
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
	rec.mute()
	s.Close()
	if <-finished; !hit {
		must(t, result)
	}
	s.host.luck(nil)
	s.o.Audit = next
	s.boot()
	defer s.stop()
	pass(time.Minute)
	// What was under way is recorded, by one or the other, or by both if it died in between.
	if told := len(rec.took(nil)) + len(next.took(nil)); hit && told == 0 {
		t.Errorf("%d entries are recorded", told)
	}

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
