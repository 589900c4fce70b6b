package lifecycle

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/ingress"
)

func TestSnapshots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		sb := s.create(nil)
		unnamed, err := s.Snapshot(ctx, team, sb.ID, "")
		must(t, err)
		named, err := s.Snapshot(ctx, team, sb.ID, "Mine")
		must(t, err)
		tagged, err := s.Snapshot(ctx, team, sb.ID, "mine:v2")
		must(t, err)
		again, err := s.Snapshot(ctx, team, sb.ID, "default/mine:default")
		must(t, err)
		if !strings.HasSuffix(unnamed.ID, ":default") || named.ID != "default/mine:default" || again.ID != named.ID || tagged.ID != "default/mine:v2" || !slices.Equal(tagged.Names, []string{tagged.ID}) {
			t.Errorf("ids %s, %s, %s, %s", unnamed.ID, named.ID, again.ID, tagged.ID)
		}
		for name, want := range map[string]func(error) bool{"base": errdefs.IsAlreadyExists, "blue/mine": errdefs.IsInvalidArgument, "a b": errdefs.IsInvalidArgument} {
			if _, err := s.Snapshot(ctx, team, sb.ID, name); !want(err) {
				t.Errorf("by the name %q: %v", name, err)
			}
		}
		pass(time.Second)
		if n := len(s.host.snapshots); n != 4 { // base, and the three that have a name
			t.Errorf("%d machines' snapshots: %v", n, s.host.snapshots)
		}
		var ids []string
		f := SnapshotFilter{Sandbox: sb.ID, Limit: 2}
		for {
			page, next, err := s.Snapshots(ctx, team, f)
			must(t, err)
			for _, one := range page {
				ids = append(ids, one.ID)
			}
			if next == (Cursor{}) {
				break
			}
			f.After = next
		}
		if !slices.Equal(ids, []string{named.ID, tagged.ID, unnamed.ID}) {
			t.Errorf("listed %q", ids)
		}
		if page, _, err := s.Snapshots(ctx, "blue", SnapshotFilter{Limit: 10}); err != nil || len(page) != 0 {
			t.Errorf("another team's: %v, %v", page, err)
		}

		child := s.create(func(c *Create) { c.Template = tagged.ID })
		if got := s.machine(child.ID).told[0].Former; got != sb.EnvdToken || child.EnvdToken == sb.EnvdToken {
			t.Errorf("the child's envd is asked with %q", got)
		}
		if err := s.DeleteSnapshot(ctx, team, tagged.ID); !errdefs.IsInvalidArgument(err) {
			t.Errorf("deleted while a sandbox is of it: %v", err)
		}
		if err := s.DeleteSnapshot(ctx, "blue", tagged.ID); !errdefs.IsNotFound(err) {
			t.Errorf("deleted by another team: %v", err)
		}
		must(t, s.Kill(ctx, team, child.ID))
		for _, id := range []string{unnamed.ID, named.ID, tagged.ID} {
			must(t, s.DeleteSnapshot(ctx, team, id))
			if err := s.DeleteSnapshot(ctx, team, id); !errdefs.IsNotFound(err) {
				t.Errorf("%s was deleted twice: %v", id, err)
			}
		}
		pass(time.Second)
		if loose, err := s.db.Loose(ctx); err != nil || len(loose) > 0 || len(s.host.snapshots) != 1 {
			t.Errorf("left are %v, %v, %v", loose, s.host.snapshots, err)
		}
	})
}

func TestFork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		sb := s.create(nil)
		made := 0
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "create" && !after {
				s.host.mu.Lock()
				defer s.host.mu.Unlock()
				if made++; made > 3 {
					return errFake
				}
			}
			return nil
		})
		results, err := s.Fork(ctx, team, sb.ID, time.Minute, 5)
		must(t, err)
		good := 0
		for _, r := range results {
			if r.Err != nil {
				if !errdefs.IsUnavailable(r.Err) {
					t.Errorf("a child's error is %v", r.Err)
				}
				continue
			}
			good++
			m := s.machine(r.Sandbox.ID)
			if r.Sandbox.ID == sb.ID || r.Sandbox.EnvdToken == sb.EnvdToken || r.Sandbox.TemplateID != sb.TemplateID || time.Until(r.Sandbox.EndAt) > time.Minute ||
				m.hooked[0].Event != "fork" || m.hooked[0].SandboxID != r.Sandbox.ID || m.told[0].Former != sb.EnvdToken || m.told[0].Env["X"] != "1" {
				t.Errorf("a child is %+v, %+v", r.Sandbox, m)
			}
		}
		pass(time.Second)
		if good != 3 || len(results) != 5 || len(s.host.machines) != 4 || len(s.host.snapshots) != 1 || s.state(sb.ID) != Running {
			t.Errorf("%d of %d children, %d machines, snapshots %v, the parent is %s", good, len(results), len(s.host.machines), s.host.snapshots, s.state(sb.ID))
		}
		for _, n := range []int{0, 101} {
			if _, err := s.Fork(ctx, team, sb.ID, time.Minute, n); !errdefs.IsInvalidArgument(err) {
				t.Errorf("%d children: %v", n, err)
			}
		}
	})
}

func TestRollback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		sb, other := s.create(nil), s.create(nil)
		snap, err := s.Snapshot(ctx, team, sb.ID, "here")
		must(t, err)
		before, err := s.Routes().Lookup(ctx, sb.ID)
		must(t, err)
		// Meanwhile nothing gets in, by neither machine: who comes waits until the hook has been told.
		var woken chan ingress.Route
		s.host.luck(func(_ context.Context, call, id string, _ bool) error {
			if call != "rollback" || woken != nil {
				return nil
			}
			way, err := s.Routes().Lookup(ctx, id)
			if err != nil || way.Open() || !way.Carries(before.Epoch) {
				t.Errorf("while it is put back its route is %+v, %v", way, err)
			}
			woken = make(chan ingress.Route, 1)
			go func() {
				way, err := s.Routes().Wake(ctx, id)
				if err != nil {
					t.Error(err)
				}
				woken <- way
			}()
			return nil
		})
		must(t, s.Rollback(ctx, team, sb.ID, snap.ID))
		after, err := s.Routes().Lookup(ctx, sb.ID)
		must(t, err)
		if way := <-woken; !way.Open() || way.Epoch != after.Epoch {
			t.Errorf("who has waited is let in by %+v", way)
		}
		m := s.machine(sb.ID)
		if before.Epoch == after.Epoch || m.hooked[len(m.hooked)-1].Event != "rollback" || m.rolledTo == "" {
			t.Errorf("epochs %s and %s, the hook was told %+v", before.Epoch, after.Epoch, m.hooked)
		}
		if err := s.Rollback(ctx, team, other.ID, snap.ID); !errdefs.IsInvalidArgument(err) {
			t.Errorf("to another's snapshot: %v", err)
		}
	})
}

// TestSweepAmidSaves: what is published while others' snapshots are being deleted stays.
func TestSweepAmidSaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		old := s.create(nil)
		var going []string
		for range 4 {
			snap, err := s.Snapshot(ctx, team, old.ID, "")
			must(t, err)
			going = append(going, snap.ID)
		}
		s.host.slow(10 * time.Second)
		saved := make(chan Snapshot, 4)
		for range cap(saved) {
			sb := s.create(nil)
			go func() {
				snap, err := s.Snapshot(ctx, team, sb.ID, "")
				if err != nil {
					t.Error(err)
				}
				saved <- snap
			}()
		}
		pass(time.Second)
		for _, id := range going {
			must(t, s.DeleteSnapshot(ctx, team, id))
		}
		for range cap(saved) {
			snap := <-saved
			pass(time.Minute)
			if _, err := s.Engine.Create(ctx, Create{Team: team, Template: snap.ID, Timeout: time.Hour}); err != nil {
				t.Errorf("a sandbox of what was saved meanwhile: %v", err)
			}
		}
	})
}

// TestInitAgain: the same request has one effect, a refused one none, and identity isn't a caller's.
func TestInitAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		ctx := t.Context()
		sb := s.create(nil)
		hooks := func() []HookBody { return s.machine(sb.ID).hooked[1:] }
		env := map[string]string{"KEY": "2"}
		must(t, s.InitAgain(ctx, team, sb.ID, env, "r1"))
		must(t, s.InitAgain(ctx, team, sb.ID, env, "r1"))
		if got := hooks(); len(got) != 1 || got[0].Event != "init" || got[0].RequestID != "r1" || got[0].Env["KEY"] != "2" || got[0].SandboxID != sb.ID {
			t.Errorf("the hook was told %+v", got)
		}
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "hook" && !after {
				return errFake
			}
			return nil
		})
		if err := s.InitAgain(ctx, team, sb.ID, map[string]string{"KEY": "3"}, "r2"); !errdefs.IsUnavailable(err) || s.state(sb.ID) != Running {
			t.Errorf("refused by the hook: %v, %s", err, s.state(sb.ID))
		}
		s.host.luck(nil)
		for i := range 2 * maxRequests {
			must(t, s.InitAgain(ctx, team, sb.ID, map[string]string{"KEY": "4"}, fmt.Sprintf("many%d", i)))
		}
		if _, r, err := s.find(team, sb.ID); err != nil || len(r.Requests) != maxRequests {
			t.Errorf("%d requests are remembered, %v", len(r.Requests), err)
		}
		for _, bad := range []string{"E2B_SANDBOX_ID", "E2B_TEMPLATE_ID", "E2B_SANDBOX"} {
			if err := s.InitAgain(ctx, team, sb.ID, map[string]string{bad: "x"}, ""); !errdefs.IsInvalidArgument(err) {
				t.Errorf("%s: %v", bad, err)
			}
		}
		if err := s.InitAgain(ctx, team, sb.ID, nil, "a\nb"); !errdefs.IsInvalidArgument(err) {
			t.Errorf("a request id of two lines: %v", err)
		}
		// Another engine knows what was done.
		s.stop()
		s.boot()
		defer s.stop()
		n := len(hooks())
		must(t, s.InitAgain(ctx, team, sb.ID, env, fmt.Sprintf("many%d", 2*maxRequests-1)))
		if len(hooks()) != n {
			t.Error("what was done was done again")
		}
		forged := s.create(func(c *Create) { c.Env = map[string]string{"E2B_SANDBOX_ID": "me", "Y": "1"} })
		if m := s.machine(forged.ID); m.told[0].Env["E2B_SANDBOX_ID"] != "" || m.hooked[0].Env["E2B_SANDBOX_ID"] != "" || m.told[0].Env["Y"] != "1" {
			t.Errorf("a forged identity: %+v", m.told)
		}
	})
}

func TestNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx, no := t.Context(), false
		sb := s.create(func(c *Create) {
			c.AllowInternet, c.Network.AllowOut, c.Network.AllowPublicTraffic = &no, []string{"1.1.1.1"}, &no
		})
		if n := s.host.network[sb.ID]; !slices.Equal(n.DenyOut, []string{"0.0.0.0/0"}) || !slices.Equal(n.AllowOut, []string{"1.1.1.1"}) {
			t.Errorf("it reaches %+v", n)
		}
		way, err := s.Routes().Lookup(ctx, sb.ID)
		must(t, err)
		if way.AllowPublic || len(way.TrafficToken) != 32 || len(sb.TrafficToken) != 64 {
			t.Errorf("the way in is %+v", way)
		}
		must(t, s.UpdateNetwork(ctx, team, sb.ID, Network{DenyOut: []string{"10.0.0.0/8"}}, nil))
		if n := s.host.network[sb.ID]; !slices.Equal(n.DenyOut, []string{"10.0.0.0/8"}) || len(n.AllowOut) > 0 {
			t.Errorf("it reaches %+v", n)
		}
		got, err := s.Get(ctx, team, sb.ID)
		must(t, err)
		if got.AllowInternet != nil || *got.Network.AllowPublicTraffic || len(got.Network.AllowOut) > 0 {
			t.Errorf("it is %+v", got.Network)
		}
		s.host.luck(func(_ context.Context, call, _ string, _ bool) error {
			if call == "network" {
				return errFake
			}
			return nil
		})
		if err := s.UpdateNetwork(ctx, team, sb.ID, Network{}, nil); !errdefs.IsUnavailable(err) {
			t.Errorf("refused: %v", err)
		}
		if got, err = s.Get(ctx, team, sb.ID); err != nil || len(got.Network.DenyOut) != 1 {
			t.Errorf("after a refusal it is %+v, %v", got.Network, err)
		}
	})
}

// TestLastOfBuild: what a template's build before was saved as goes with the last sandbox that is of it.
func TestLastOfBuild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		sb := s.create(nil)
		s.build("base")
		pass(time.Minute)
		if !s.host.snapshots["base"] {
			t.Error("it went while a sandbox was of it")
		}
		must(t, s.Kill(t.Context(), team, sb.ID))
		pass(time.Minute)
		if s.host.snapshots["base"] {
			t.Error("it stays")
		}
	})
}
