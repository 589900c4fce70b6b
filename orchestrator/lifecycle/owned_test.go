package lifecycle

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/teams"
)

// purge purges a team of all that the engine has for it.
func (s *stand) purge(team string) teams.Report {
	s.t.Helper()
	sandboxes, builds := s.Assets()
	r, err := (&teams.Purger{DB: s.db, Audit: audit.Nowhere{}, Assets: []teams.Asset{sandboxes, builds}}).Purge(s.t.Context(), team)
	must(s.t, err)
	return r
}

// TestPurge: a team's sandboxes go whatever they are doing, and nothing is made for it any more. What another team's sandboxes are of
// stays as long as they do.
func TestPurge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		ctx := t.Context()
		theirs, err := s.Create(ctx, Create{Team: "blue", Template: "base", Timeout: time.Hour}) // of team default's public template
		must(t, err)
		runs, paused, killed := s.create(nil), s.create(nil), s.create(nil)
		must(t, s.Pause(ctx, team, paused.ID, true))
		s.snap(runs.ID, "mine")
		s.create(func(c *Create) { c.Template = "mine" })
		// One is being killed, one is being made and one is being saved.
		s.host.slow(5 * time.Second)
		made, saved := make(chan error, 1), make(chan error, 1)
		go func() { _ = s.Kill(ctx, team, killed.ID) }()
		go func() {
			_, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
			made <- err
		}()
		go func() {
			_, err := s.Snapshot(ctx, team, runs.ID, "more")
			saved <- err
		}()
		pass(time.Second)
		r := s.purge(team)
		if err := <-made; err == nil {
			t.Error("a sandbox was made meanwhile")
		}
		if err := <-saved; err == nil {
			t.Error("a snapshot was made meanwhile")
		}
		s.host.slow(100 * time.Millisecond)
		if len(r.Left) != 1 || r.Left[0].Kind != "snapshot" || !strings.Contains(r.Left[0].Why, theirs.ID+" of team blue") && r.Left[0].Name != "base" {
			t.Errorf("left: %+v, failed: %q", r.Left, r.Failed)
		}
		if s.state(theirs.ID) != Running || len(s.host.machines) != 1 {
			t.Errorf("the other team's is %q, of %d machines", s.state(theirs.ID), len(s.host.machines))
		}
		if _, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour}); !errdefs.IsNotFound(err) {
			t.Errorf("of a template of a team that is being removed: %v", err)
		}
		must(t, s.Kill(ctx, "blue", theirs.ID))
		pass(time.Second)
		if r := s.purge(team); !r.Done() {
			t.Errorf("when nobody uses it: %+v", r)
		}
		if len(s.host.machines)+len(s.host.snapshots) != 0 {
			t.Errorf("on the host: %v, %v", s.host.machines, s.host.snapshots)
		}
		rows, err := s.db.TeamRows(ctx, team)
		if err != nil || len(rows) > 0 {
			t.Errorf("rows: %q, %v", rows, err)
		}
	})
}

// TestPurgeDies: a purge that has ended anywhere is gone on with by another one, of another process.
func TestPurgeDies(t *testing.T) {
	for _, call := range []string{"kill", "forget"} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t, Options{})
				ctx := t.Context()
				for range 2 {
					sb, err := s.Create(ctx, Create{Team: "blue", Template: "base", Timeout: time.Hour})
					must(t, err)
					_, err = s.Snapshot(ctx, "blue", sb.ID, "")
					must(t, err)
				}
				s.host.luck(func(_ context.Context, c, _ string, after bool) error {
					if c == call && !after {
						return errFake
					}
					return nil
				})
				if r := s.purge("blue"); r.Done() || len(r.Left) < 2 || len(r.Failed) == 0 {
					t.Errorf("with a host that fails: %+v", r)
				}
				s.stop()
				s.host.luck(nil)
				s.boot()
				defer s.stop()
				pass(time.Minute)
				if _, err := s.Create(ctx, Create{Team: "blue", Template: "base", Timeout: time.Hour}); !errdefs.IsFailedPrecondition(err) {
					t.Errorf("for a team that is being removed, after a restart: %v", err)
				}
				if r := s.purge("blue"); !r.Done() {
					t.Errorf("once more: %+v", r)
				}
				if len(s.host.machines) != 0 || len(s.host.snapshots) != 1 {
					t.Errorf("on the host: %v, %v", s.host.machines, s.host.snapshots)
				}
			})
		})
	}
}
