package lifecycle

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/audit"
)

// saved are the names of a team's snapshots, sorted; what has none is "-".
func (s *stand) saved(team string) (names []string) {
	s.t.Helper()
	page, _, err := s.Snapshots(s.t.Context(), team, SnapshotFilter{Limit: 100})
	must(s.t, err)
	for _, one := range page {
		name := "-"
		if len(one.Names) > 0 {
			name = strings.TrimPrefix(one.ID, team+"/")
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (s *stand) snap(id, name string) {
	s.t.Helper()
	_, err := s.Snapshot(s.t.Context(), team, id, name)
	must(s.t, err)
}

// TestRetention: what is older than is kept goes when that is so, what is one too many at once, and never what is in use.
func TestRetention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := &recorder{}
		kept := map[string]config.Kept{team: {SnapshotTTL: time.Hour, SnapshotKeep: 2, PausedTTL: 3 * time.Hour, PausedKeep: 2}}
		s := newStand(t, Options{Audit: rec, Kept: func(team string) config.Kept { return kept[team] }})
		defer func() { s.stop() }()
		ctx := t.Context()
		check := func(when string, want ...string) {
			t.Helper()
			pass(time.Second)
			if got := s.saved(team); !slices.Equal(got, want) {
				t.Errorf("%s there are %q, not %q", when, got, want)
			}
			if n := len(s.host.snapshots); n != len(want)+1 { // base
				t.Errorf("%s there are %d machines' snapshots", when, n)
			}
		}
		endless := func(c *Create) { c.Timeout = 1000 * time.Hour }
		sb := s.create(endless)
		for _, name := range []string{"mine:a", "mine:b", "other", ""} {
			s.snap(sb.ID, name)
			pass(time.Minute)
		}
		check("within bounds", "-", "mine:a", "mine:b", "other:default")
		s.snap(sb.ID, "mine:c")
		s.snap(sb.ID, "")
		s.snap(sb.ID, "")
		check("with too many", "-", "-", "mine:b", "mine:c", "other:default")
		user := s.create(func(c *Create) { endless(c); c.Template = "mine:b" })
		blue, err := s.Create(ctx, Create{Team: "blue", Template: "base", Timeout: 1000 * time.Hour})
		must(t, err)
		_, err = s.Snapshot(ctx, "blue", blue.ID, "theirs")
		must(t, err)
		must(t, s.Kill(ctx, "blue", blue.ID))
		rec.took(nil)
		pass(50 * time.Minute)
		if got := s.saved("blue"); !slices.Equal(got, []string{"theirs:default"}) {
			t.Errorf("another team's: %q", got)
		}
		pass(30 * time.Minute)
		if got := s.saved(team); !slices.Equal(got, []string{"mine:b"}) {
			t.Errorf("an hour later: %q", got)
		}
		var why []string
		rec.mu.Lock()
		for _, e := range rec.all {
			if e.Action != audit.Delete || e.Via != audit.Retention || e.Team != team || !strings.Contains(e.Why, "older than 1h0m0s") {
				t.Errorf("recorded: %+v", e)
			}
			why = append(why, e.Snapshot)
		}
		rec.mu.Unlock()
		if len(why) != 4 {
			t.Errorf("recorded: %q", why)
		}
		all, _, err := s.Expired(ctx, s.Kept)
		if err != nil || len(all) != 1 || all[0].Used != 1 || all[0].Name != "default/mine:b" {
			t.Errorf("in use: %+v, %v", all, err)
		}
		must(t, s.Kill(ctx, team, user.ID))
		pass(2 * time.Second)
		if got := s.saved(team); len(got) > 0 {
			t.Errorf("when its last sandbox is gone: %q", got)
		}

		// Paused sandboxes.
		var paused []string
		for range 3 {
			sb := s.create(nil)
			must(t, s.Pause(ctx, team, sb.ID, true))
			paused = append(paused, sb.ID)
			pass(time.Minute)
		}
		if s.state(paused[0]) != gone || s.state(paused[1]) != Paused {
			t.Errorf("with too many: %s, %s", s.state(paused[0]), s.state(paused[1]))
		}
		if _, err := s.Get(ctx, team, paused[0]); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "retention: there are 2 newer") {
			t.Errorf("why it is gone: %v", err)
		}
		_, err = s.Resume(ctx, team, paused[1], 1000*time.Hour, nil)
		must(t, err)
		s.stop()
		pass(4 * time.Hour) // while nobody looks
		s.boot()
		pass(time.Second)
		if s.state(paused[1]) != Running || s.state(paused[2]) != gone || s.state(sb.ID) != Running {
			t.Errorf("after a time away: %s, %s, %s", s.state(paused[1]), s.state(paused[2]), s.state(sb.ID))
		}
	})
}

// TestRetentionAway: what has become too old while cube was down goes when it starts, and what would go is told without.
func TestRetentionAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		ctx := t.Context()
		sb := s.create(func(c *Create) { c.Timeout = 1000 * time.Hour })
		s.snap(sb.ID, "old")
		pass(2 * time.Hour)
		s.snap(sb.ID, "young")
		kept := func(string) config.Kept { return config.Kept{SnapshotTTL: time.Hour} }
		all, next, err := s.Expired(ctx, kept)
		must(t, err)
		if len(all) != 1 || all[0].Name != "default/old:default" || !strings.HasPrefix(all[0].Machine, "build-") || time.Until(next).Round(time.Minute) != time.Hour {
			t.Errorf("would go: %+v, next at %v", all, next)
		}
		// It is another by the time that it is to go.
		s.snap(sb.ID, "old")
		if gone, err := all[0].Remove(ctx); gone || err != nil {
			t.Errorf("another one has gone: %v, %v", gone, err)
		}
		s.stop()
		s.o.Kept = kept
		pass(2 * time.Hour)
		s.boot()
		defer s.stop()
		pass(time.Second)
		if got := s.saved(team); len(got) > 0 || len(s.host.snapshots) != 1 {
			t.Errorf("left: %q, %v", got, s.host.snapshots)
		}
	})
}
