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

	"github.com/cubesandbox/cube/orchestrator/audit"
)

// recorder keeps entries in memory.
type recorder struct {
	mu    sync.Mutex
	all   []audit.Entry
	fails error
	muted bool
}

// mute has nothing be recorded any more.
func (r *recorder) mute() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.muted = true
}

func (r *recorder) Record(e audit.Entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.Time = time.Now(); !r.muted {
		r.all = append(r.all, e)
	}
}

func (r *recorder) Ready() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fails
}

// took are the entries since it was asked last, in words; ids have the names that are given them.
func (r *recorder) took(names map[string]string) (words []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.all {
		w := fmt.Sprintf("%s %s %s", e.Action, nameOf(names, e.Sandbox), e.Via)
		for _, more := range []string{e.Key, e.Error, nameOf(names, e.Origin), e.Snapshot} {
			if more != "" {
				w += " " + more
			}
		}
		words = append(words, w)
	}
	r.all = nil
	return words
}

func nameOf(names map[string]string, id string) string {
	if n, ok := names[id]; ok {
		return n
	}
	return id
}

// TestAudit: whatever is done, and by whom, and what has come of it is recorded before the answer.
func TestAudit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := &recorder{}
		s := newStand(t, Options{Audit: rec})
		defer s.stop()
		ctx := audit.With(t.Context(), audit.By{Via: audit.API, Key: "k1", Request: "req", From: "192.0.2.1:5"})
		names := map[string]string{}
		expect := func(what string, want ...string) {
			t.Helper()
			if got := rec.took(names); !slices.Equal(got, want) {
				t.Errorf("%s:\n got %q\nwant %q", what, got, want)
			}
		}
		secret := map[string]string{"TOKEN": "hush-hush"}
		sb, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour, Env: secret, AutoPause: true, AutoPauseMemory: true, AutoResume: true})
		must(t, err)
		names[sb.ID] = "A"
		rec.mu.Lock()
		one := rec.all[0]
		rec.mu.Unlock()
		if one.Team != team || one.Template != "tbase" || one.Build != "build" || one.Request != "req" || one.From != "192.0.2.1:5" || one.Result != audit.OK || strings.Contains(fmt.Sprintf("%+v", one), "hush") {
			t.Errorf("the create: %+v", one)
		}
		expect("create", "create A api k1 base")
		must(t, s.Pause(ctx, team, sb.ID, true))
		_, err = s.Resume(ctx, team, sb.ID, time.Minute, nil)
		must(t, err)
		must(t, s.SetTimeout(ctx, team, sb.ID, time.Minute))
		_, _, err = s.Connect(ctx, team, sb.ID, time.Minute, nil) // which runs
		must(t, err)
		expect("pause and resume", "pause A api k1", "resume A api k1")

		snap, err := s.Snapshot(ctx, team, sb.ID, "")
		must(t, err)
		_, err = s.Snapshot(ctx, team, sb.ID, "mine:v1")
		must(t, err)
		expect("snapshots", "snapshot A api k1 "+snap.ID, "snapshot A api k1 default/mine:v1")
		child, err := s.Create(ctx, Create{Team: team, Template: "mine:v1", Timeout: time.Hour})
		must(t, err)
		names[child.ID] = "B"
		must(t, s.Rollback(ctx, team, sb.ID, "mine:v1"))
		must(t, s.InitAgain(ctx, team, sb.ID, secret, ""))
		forks, err := s.Fork(ctx, team, sb.ID, time.Minute, 1)
		must(t, err)
		names[forks[0].Sandbox.ID] = "C"
		expect("of a snapshot", "restore B api k1 A mine:v1", "rollback A api k1 mine:v1", "init A api k1", "fork A api k1", "fork C api k1 A")
		must(t, s.Kill(ctx, team, forks[0].Sandbox.ID))
		must(t, s.DeleteSnapshot(ctx, team, snap.ID))
		expect("removed", "kill C api k1 A", "delete  api k1 "+snap.ID)

		// What is refused.
		for _, err := range []error{
			s.Kill(ctx, team, "nope"), s.DeleteSnapshot(ctx, team, "mine:v1"), s.Rollback(ctx, team, child.ID, "mine:v1"),
			func() error { _, err := s.Create(ctx, Create{Team: team, Template: "no such", Timeout: 1}); return err }(),
			func() error { _, err := s.Create(ctx, Create{Team: team, Template: "nope", Timeout: 1}); return err }(),
			func() error { _, err := s.Resume(ctx, team, child.ID, time.Minute, nil); return err }(),
		} {
			if err == nil {
				t.Error("it wasn't refused")
			}
		}
		expect("refused", "kill nope api k1 not_found", "delete  api k1 invalid_argument mine:v1", "rollback B api k1 invalid_argument mine:v1",
			"create  api k1 invalid_argument", "create  api k1 not_found nope", "resume B api k1 failed_precondition")

		// What nobody asks for.
		pass(2 * time.Minute)
		expect("the deadline", "pause A deadline")
		_, err = s.Routes().Wake(t.Context(), sb.ID)
		must(t, err)
		expect("traffic", "resume A traffic")
		s.host.end(child.ID)
		pass(time.Second)
		expect("by itself", "end B host A")

		// What comes to nothing.
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if !after && (call == "create" || call == "pause" || call == "save") {
				return errFake
			}
			return nil
		})
		_, err = s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
		if err == nil || s.Pause(ctx, team, sb.ID, true) == nil {
			t.Error("it has worked")
		}
		if _, err := s.Snapshot(ctx, team, sb.ID, "mine:v1"); err == nil {
			t.Error("it has worked")
		}
		s.host.luck(nil)
		pass(time.Second)
		rec.mu.Lock()
		names[rec.all[0].Sandbox] = "D"
		rec.mu.Unlock()
		expect("failed", "create D api k1 unavailable base", "pause A api k1 unavailable", "snapshot A api k1 unavailable mine:v1")

		// While nothing can be recorded, nothing is made, and what there is can be ended.
		rec.fails = errdefs.ErrUnavailable.WithMessage("the disk is full")
		if _, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour}); !errors.Is(err, rec.fails) {
			t.Errorf("without a record: %v", err)
		}
		if _, err := s.Snapshot(ctx, team, sb.ID, "more"); !errors.Is(err, rec.fails) {
			t.Errorf("without a record: %v", err)
		}
		must(t, s.Kill(ctx, team, sb.ID))
		if len(s.host.machines) != 0 {
			t.Errorf("%d machines are left", len(s.host.machines))
		}
	})
}

// TestAuditRestart: what was under way when the process has ended is recorded by the next one, for whom it was begun.
func TestAuditRestart(t *testing.T) {
	for _, do := range []string{"kill", "pause", "resume", "create", "snapshot"} {
		t.Run(do, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rec := &recorder{}
				s := newStand(t, Options{Audit: rec})
				ctx := audit.With(t.Context(), audit.By{Via: audit.API, Key: "k1"})
				sb := s.create(nil)
				if do == "resume" {
					must(t, s.Pause(ctx, team, sb.ID, true))
				}
				rec.took(nil)
				call := map[string]string{"snapshot": "save"}[do]
				if call == "" {
					call = do
				}
				hang := func(ctx context.Context, c, _ string, after bool) error {
					if c == call && !after {
						<-ctx.Done()
						return context.Cause(ctx)
					}
					return nil
				}
				s.host.luck(hang)
				go func() {
					switch do {
					case "kill":
						_ = s.Kill(ctx, team, sb.ID)
					case "pause":
						_ = s.Pause(ctx, team, sb.ID, true)
					case "resume":
						_, _ = s.Resume(ctx, team, sb.ID, time.Minute, nil)
					case "create":
						_, _ = s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour})
					case "snapshot":
						_, _ = s.Snapshot(ctx, team, sb.ID, "mine")
					}
				}()
				pass(time.Second)
				if got := rec.took(nil); len(got) > 0 {
					t.Errorf("before it is over: %q", got)
				}
				died := s.Engine
				old := s.db
				s.o.Audit = &recorder{} // the one before is heard no more
				next := s.o.Audit.(*recorder)
				s.host.luck(nil)
				s.boot()
				pass(5 * time.Second)
				want := map[string]string{"kill": "kill A api k1", "pause": "pause A api k1 aborted", "resume": "resume A api k1 aborted", "create": "create N api k1 aborted base", "snapshot": "snapshot A api k1 aborted mine"}[do]
				next.mu.Lock()
				names := map[string]string{sb.ID: "A"}
				if do == "create" && len(next.all) > 0 {
					names[next.all[0].Sandbox] = "N"
				}
				next.mu.Unlock()
				if got := next.took(names); !slices.Equal(got, []string{want}) && !(do == "pause" && slices.Equal(got, []string{"pause A api k1"})) {
					t.Errorf("by the next one: %q, not %q", got, want)
				}
				s.stop()
				died.endLife(errClosing)
				died.endLasts(errClosing)
				died.Close()
				must(t, old.Close())
			})
		})
	}
}

// TestAuditEphemeral: what the engine kills because the one before has ended is recorded, with why.
func TestAuditEphemeral(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		sb := s.create(func(c *Create) { c.Ephemeral = true })
		s.stop()
		rec := &recorder{}
		s.o.Audit = rec
		s.boot()
		defer s.stop()
		pass(time.Second)
		rec.mu.Lock()
		defer rec.mu.Unlock()
		if len(rec.all) != 1 || rec.all[0].Action != audit.Kill || rec.all[0].Sandbox != sb.ID || rec.all[0].Via != audit.Host || rec.all[0].Why == "" {
			t.Errorf("recorded: %+v", rec.all)
		}
	})
}
