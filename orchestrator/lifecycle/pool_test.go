package lifecycle

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// pooled are an engine's options with room for n members of the template base.
func pooled(n int) Options {
	return Options{Pool: PoolOptions{MaxMemory: int64(n) * 512 << 20, MaxPerTemplate: n}, Starts: 8}
}

// filled has a pool of n members, as creates before have left it, and nothing else.
func filled(t *testing.T, n int) *stand {
	t.Helper()
	s := newStand(t, pooled(n))
	for range n {
		must(t, s.Kill(t.Context(), team, s.create(nil).ID))
	}
	pass(10 * time.Second)
	if got := s.still(); len(got) != n {
		t.Fatalf("%d members, not %d", len(got), n)
	}
	s.host.mu.Lock()
	s.host.calls = nil
	s.host.mu.Unlock()
	return s
}

// still are the ids of the members that can be claimed.
func (s *stand) still() (ids []string) {
	for _, m := range s.pool.ready() {
		ids = append(ids, m.id)
	}
	return ids
}

// build makes another build of a public template of that name, or its first, and returns its id.
func (s *stand) build(name string) string {
	s.t.Helper()
	b := db.Build{ID: "next-" + name, Team: team, CreatedAt: time.Now(), CPUs: 2, MemoryMB: 512, DiskMB: 1024}
	snapshot, done, err := s.Begin(s.t.Context(), b)
	must(s.t, err)
	defer done()
	s.host.mu.Lock()
	s.host.snapshots[snapshot] = true
	s.host.mu.Unlock()
	_, err = s.db.Publish(s.t.Context(), db.Publication{Build: b.ID, Team: team, Name: name, Template: "t" + name, Tag: db.DefaultTag, Public: true})
	must(s.t, err)
	return b.ID
}

// members are all that there are, whatever they are doing.
func (s *stand) members() (ids []string) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	return slices.Collect(maps.Keys(s.pool.members))
}

// whole sees that machines, rows and members belong to one another, and returns how many members there are.
func (s *stand) whole() int {
	s.t.Helper()
	rows, err := s.db.SandboxesIn(s.t.Context())
	must(s.t, err)
	members, err := s.db.Members(s.t.Context())
	must(s.t, err)
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	if len(rows)+len(members) != len(s.host.machines) {
		s.t.Errorf("%d machines, %d rows, %d members", len(s.host.machines), len(rows), len(members))
	}
	for _, r := range rows {
		if m := s.host.machines[r.ID]; m == nil || m.held {
			s.t.Errorf("sandbox %s is %s, its machine %+v", r.ID, r.State, m)
		}
	}
	for _, one := range members {
		if m := s.host.machines[one.ID]; m == nil || !m.held || !one.Ready {
			s.t.Errorf("member %+v has the machine %+v", one, m)
		}
	}
	if len(s.host.overlap) > 0 {
		s.t.Errorf("calls at the same time: %v", s.host.overlap)
	}
	var reserved int64
	for _, one := range members {
		reserved += admission.Need(s.Admission, spare(one.Build).Shape).Memory
	}
	if got := s.ledger.Totals().Spare.Memory; got != reserved {
		s.t.Errorf("%d bytes are reserved for members that need %d", got, reserved)
	}
	return len(members)
}

func (h *host) called(call string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.calls {
		if strings.HasPrefix(c, call+" ") {
			n++
		}
	}
	return n
}

// TestClaim: a create that finds a member makes nothing, and the sandbox is told all that any is told.
func TestClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 2)
		defer s.stop()
		if m := s.machine(s.still()[0]); !m.held || len(m.told) != 1 || m.told[0].Token != "" || len(m.hooked) != 0 || len(m.started) != 1 || m.started[0] != "true" {
			t.Errorf("a member before its claim: %+v", m)
		}
		began := time.Now()
		sb := s.create(func(c *Create) { c.Team = "blue" })
		m := s.machine(sb.ID)
		// Release and what envd is told at once, then hook and start, 100 ms each.
		if took := time.Since(began); took > 350*time.Millisecond || s.host.called("network") > 0 || s.host.called("init") > 0 {
			t.Errorf("it took %v: %v", took, s.host.calls)
		}
		last := m.told[len(m.told)-1]
		if sb.Team != "blue" || sb.State != Running || sb.Env["X"] != "1" || sb.Metadata["a"] != "b" || m.held || last.SandboxID != sb.ID ||
			last.Token != sb.EnvdToken || last.Token == "" || last.Env["X"] != "1" || last.HookToken == "" || len(m.hooked) != 1 || m.hooked[0].Event != "create" || len(m.started) != 2 {
			t.Errorf("sandbox %+v of machine %+v", sb, m)
		}
		if sb.EndAt.Sub(sb.StartedAt) != time.Hour || sb.StartedAt.Before(began) {
			t.Errorf("from %v to %v", sb.StartedAt, sb.EndAt)
		}
		no := false
		closed := s.create(func(c *Create) { c.AllowInternet = &no })
		s.host.mu.Lock()
		calls := strings.Join(s.host.calls, "\n")
		reach := s.host.network[closed.ID]
		s.host.mu.Unlock()
		if network, release := strings.Index(calls, "network "+closed.ID), strings.Index(calls, "release "+closed.ID); len(reach.DenyOut) != 1 || network < 0 || release < network {
			t.Errorf("it reaches %+v: %s", reach, calls)
		}
		pass(10 * time.Second)
		if n := s.whole(); n != 2 {
			t.Errorf("%d members after the claims", n)
		}
		must(t, s.Pause(t.Context(), "blue", sb.ID, true)) // it is a sandbox like any
		must(t, s.Kill(t.Context(), "blue", sb.ID))
		s.whole()
	})
}

// TestClaimRace: of 200 creates at once each has a machine of its own, though members are few.
func TestClaimRace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 4)
		defer s.stop()
		var all sync.WaitGroup
		var mu sync.Mutex
		ids := map[string]bool{}
		for i := range 200 {
			all.Go(func() {
				want := fmt.Sprint(i)
				sb, err := s.Create(t.Context(), Create{Team: team, Template: "base", Timeout: time.Hour, Secure: true, Env: map[string]string{"N": want}})
				if err != nil {
					t.Error(err)
					return
				}
				m := s.machine(sb.ID)
				mu.Lock()
				defer mu.Unlock()
				if last := m.told[len(m.told)-1]; ids[sb.ID] || last.Env["N"] != want || last.SandboxID != sb.ID || last.Token != sb.EnvdToken {
					t.Errorf("create %d is %s, which was told %+v", i, sb.ID, last)
				}
				ids[sb.ID] = true
			})
		}
		all.Wait()
		if n := s.host.called("release"); n < 4 || len(ids) != 200 {
			t.Errorf("%d sandboxes, %d of members", len(ids), n)
		}
		pass(time.Minute)
		if n := s.whole(); n != 4 {
			t.Errorf("%d members", n)
		}
	})
}

// TestPoolDies has the engine's process die at each call that a claim, the making of a member and its removal make, before or after
// it has worked: the next engine has the member whole, as what it was or as a sandbox, or nothing of it.
func TestPoolDies(t *testing.T) {
	operations := map[string]func(context.Context, *stand){
		"claim and refill": func(ctx context.Context, s *stand) {
			_, _ = s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
		},
		"evict": func(_ context.Context, s *stand) { s.evict(s.pool.ready()[0]) },
	}
	for name, operate := range operations {
		died := true
		for n := 0; died; n++ {
			for _, after := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, call %d, after: %v", name, n, after), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) { died = poolDies(t, n, after, operate) })
				})
			}
		}
	}
}

// poolDies tells whether there was an n-th call.
func poolDies(t *testing.T, n int, after bool, operate func(context.Context, *stand)) bool {
	s := filled(t, 1)
	var mu sync.Mutex
	calls, dead := 0, false
	s.host.luck(func(_ context.Context, _, _ string, a bool) error {
		mu.Lock()
		defer mu.Unlock()
		if a == after && !dead {
			calls++
			dead = calls > n
		}
		if dead { // what it still asks for doesn't happen
			return errDied
		}
		return nil
	})
	operate(t.Context(), s)
	for range 20 { // until the member is made that takes the place of the other
		pass(100 * time.Millisecond)
		if mu.Lock(); dead {
			mu.Unlock()
			break
		}
		mu.Unlock()
	}
	must(t, s.db.Close()) // nothing more is written
	s.Close()
	s.host.luck(nil)
	s.boot()
	defer s.stop()
	pass(time.Minute)
	s.whole()
	s.create(nil)
	pass(time.Minute)
	if s.whole() != 1 {
		t.Error("there is no member in the end")
	}
	return dead
}

// TestPoolTakenOver: the members of an engine of before can be claimed of the next one, but none whose machine has ended, whose
// build isn't current any more, or that nobody wants to be kept.
func TestPoolTakenOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 3)
		s.stop()
		ended := s.still()[0]
		s.host.mu.Lock()
		s.host.machines[ended].half = true
		s.host.mu.Unlock()
		s.boot()
		pass(time.Second)
		if got := s.still(); len(got) != 2 {
			t.Errorf("%d members", len(got))
		}
		sb := s.create(nil) // there is no line to it any more
		if m := s.machine(sb.ID); s.host.called("release") != 1 || m.told[len(m.told)-1].Token != sb.EnvdToken || s.host.called("tell") > 0 {
			t.Errorf("of %d claims, one was told %+v", s.host.called("release"), m.told)
		}
		pass(time.Minute)
		s.whole()
		s.stop()
		s.o.Pool = PoolOptions{}
		s.boot()
		defer s.stop()
		pass(time.Minute)
		if n := s.whole(); n != 0 {
			t.Errorf("%d members of a pool that there isn't", n)
		}
	})
}

// TestMemberOfNoUse: a member that doesn't go on, or whose machine has ended, costs a create time and nothing else.
func TestMemberOfNoUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 2)
		defer s.stop()
		s.host.luck(func(_ context.Context, call, _ string, _ bool) error {
			if call == "release" {
				return errFake
			}
			return nil
		})
		sb := s.create(nil)
		if m := s.machine(sb.ID); m.lives != 1 || m.held {
			t.Errorf("machine %+v", m)
		}
		s.host.luck(nil)
		pass(time.Minute)
		for _, id := range s.still() {
			s.host.end(id)
		}
		s.create(nil)
		pass(2 * time.Minute)
		if n := s.whole(); n != 2 {
			t.Errorf("%d members", n)
		}
	})
}

// TestLine: a create isn't told to a machine that has the address of a member's that has ended.
func TestLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 1)
		defer s.stop()
		s.pool.rest(time.Hour)
		s.build("other")
		other := s.create(func(c *Create) { c.Template = "other" })
		was := s.still()[0]
		s.host.mu.Lock()
		ended, lives := s.host.machines[was], s.host.machines[other.ID]
		ended.half, lives.addr = true, ended.addr // of which nobody has heard
		told := len(lives.told)
		s.host.mu.Unlock()
		sb := s.create(nil)
		if got := s.machine(other.ID).told[told:]; len(got) > 0 || sb.ID == was || s.host.called("tell") != 1 {
			t.Errorf("the other machine was told %+v", got)
		}
	})
}

// TestHookRefuses: what the template's hook says of a create holds for one of the pool, too.
func TestHookRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 1)
		defer s.stop()
		s.pool.rest(30 * time.Second)
		s.host.luck(func(_ context.Context, call, _ string, _ bool) error {
			if call == "hook" {
				return errFake
			}
			return nil
		})
		if _, err := s.Create(t.Context(), Create{Team: team, Template: "base", Timeout: time.Hour}); err == nil || !strings.Contains(err.Error(), "hook") {
			t.Errorf("created: %v", err)
		}
		if n := s.host.called("create"); n != 0 {
			t.Errorf("%d other machines were tried", n)
		}
		s.host.luck(nil)
		pass(time.Minute)
		s.whole()
	})
}

// TestPoolOfBuild: with a template's next build, and with its deletion, the members of the one before go, and its snapshot.
func TestPoolOfBuild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 2)
		defer s.stop()
		ctx := t.Context()
		before := s.still()
		build := s.build("base")
		pass(10 * time.Second)
		for _, id := range before {
			if s.machine(id).lives != 0 {
				t.Errorf("%s is still there", id)
			}
		}
		if s.host.snapshots["base"] || s.whole() != 0 {
			t.Errorf("snapshots %v", s.host.snapshots)
		}
		sb := s.create(nil)
		if sb.BuildID != build {
			t.Errorf("it is of build %s", sb.BuildID)
		}
		pass(10 * time.Second)
		if n := s.whole(); n != 1 {
			t.Errorf("%d members of the next build", n)
		}
		must(t, s.Kill(ctx, team, sb.ID))
		must(t, s.DeleteSnapshot(ctx, team, "base"))
		pass(10 * time.Second)
		if n := s.whole(); n != 0 || len(s.host.snapshots) != 0 {
			t.Errorf("%d members of no template, snapshots %v", n, s.host.snapshots)
		}
	})
}

// TestPoolGivesBack: a create that the host has no memory for gets that of a member of another template.
func TestPoolGivesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := pooled(2)
		o.Host, o.Admission = few(3)
		s := newStand(t, o)
		defer s.stop()
		ctx := t.Context()
		s.build("other")
		for range 2 {
			must(t, s.Kill(ctx, team, s.create(nil).ID))
		}
		pass(10 * time.Second)
		if n := s.whole(); n != 2 {
			t.Fatalf("%d members", n)
		}
		other := func(c *Create) { c.Template = "other" }
		s.create(other)
		if n := len(s.still()); n != 2 {
			t.Errorf("%d members while there is room", n)
		}
		s.create(other)
		s.create(other)
		if n := len(s.still()); n != 0 {
			t.Errorf("%d members where there is no room", n)
		}
		pass(10 * time.Minute)
		if s.whole() != 0 {
			t.Error("members are made where there is no room")
		}
	})
}

// TestPoolSize: there are as many members as were asked for lately, within bounds, and none of what nobody asks for.
func TestPoolSize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, pooled(3))
		defer s.stop()
		pass(time.Hour)
		if n := s.whole(); n != 0 {
			t.Errorf("%d members that nobody has asked for", n)
		}
		s.create(nil)
		pass(10 * time.Second)
		if n := s.whole(); n != 1 {
			t.Errorf("%d members after one create", n)
		}
		for range 6 {
			s.create(nil)
		}
		pass(10 * time.Second)
		if n := s.whole(); n != 3 {
			t.Errorf("%d members after seven creates", n)
		}
		pass(9 * time.Minute) // which leaves a quarter of them
		if n := s.whole(); n != 2 {
			t.Errorf("%d members after 9 minutes", n)
		}
		pass(time.Hour)
		if n := s.whole(); n != 0 {
			t.Errorf("%d members an hour later", n)
		}
	})
}

// TestPoolWaits: no member is made while creates wait for their turn.
func TestPoolWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := pooled(1)
		o.Starts = 2
		s := newStand(t, o)
		defer s.stop()
		s.host.slow(time.Second)
		for range 6 {
			go func() { _, _ = s.Create(t.Context(), Create{Team: team, Template: "base", Timeout: time.Hour}) }()
		}
		pass(2500 * time.Millisecond) // the last two have their turn
		if n := len(s.members()); n != 0 {
			t.Errorf("%d members while creates wait", n)
		}
		pass(time.Minute)
		if n := s.whole(); n != 1 {
			t.Errorf("%d members when none does", n)
		}
	})
}

// TestRefillWaits: no member is made while another one becomes a sandbox. One that knows who it is keeps none from being made, whatever
// its hook does.
func TestRefillWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 2)
		defer s.stop()
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "release" && !after {
				time.Sleep(2 * time.Second)
			}
			return nil
		})
		go s.create(nil)
		pass(time.Second)
		s.host.luck(nil)
		s.create(nil)
		pass(500 * time.Millisecond)
		if n := len(s.members()); n != 0 {
			t.Errorf("%d members amid a claim", n)
		}
		pass(10 * time.Second)
		if n := s.whole(); n != 2 {
			t.Fatalf("%d members after the claims", n)
		}
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "hook" && !after {
				time.Sleep(10 * time.Second)
			}
			return nil
		})
		go s.create(nil)
		pass(time.Second)
		s.host.luck(nil)
		s.create(nil)
		pass(5 * time.Second)
		if n := len(s.still()); n != 2 {
			t.Errorf("%d members amid a hook", n)
		}
		pass(time.Minute)
		s.whole()
	})
}

// TestPoolBadLuck: what fails is tried less and less often, and leaves nothing.
func TestPoolBadLuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, pooled(1))
		defer s.stop()
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "hold" && after {
				return errFake
			}
			return nil
		})
		s.create(nil)
		pass(4 * time.Minute)
		if n := s.host.called("hold"); n < 3 || n > 12 {
			t.Errorf("%d tries in 4 minutes", n)
		}
		s.host.luck(nil)
		s.create(nil)
		pass(2 * time.Minute)
		if n := s.whole(); n != 1 {
			t.Errorf("%d members when luck is back", n)
		}
	})
}
