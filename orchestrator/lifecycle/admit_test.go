package lifecycle

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	dto "github.com/prometheus/client_model/go"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/admission"
)

// few is a host that has room for so many sandboxes of the template, as far as memory is concerned.
func few(n int64) (*room, *config.Admission) {
	a := config.Default().Admission
	memory := n*int64(a.DisposableMemory) + int64(a.MemoryHeadroom)
	return &room{Reading: admission.Reading{CPUs: 64, MemoryTotal: memory, MemoryAvailable: memory, DiskTotal: 1 << 40, DiskFree: 1 << 40}}, &a
}

func (s *stand) tries(n int, c Create) (good int, failed []error) {
	c.Template, c.Timeout = "base", time.Hour
	errs := make(chan error, n)
	for range n {
		go func() {
			_, err := s.Create(s.t.Context(), c)
			errs <- err
		}()
	}
	for range n {
		if err := <-errs; err == nil {
			good++
		} else {
			failed = append(failed, err)
		}
	}
	return good, failed
}

func (s *stand) reserved() admission.Amount { return s.ledger.Totals().Reserved }

// TestAdmission: of a hundred that come at once exactly those are made that there is room for, also after a restart.
func TestAdmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, a := few(10)
		s := newStand(t, Options{Starts: 100, Host: h, Admission: a})
		defer func() { s.stop() }()
		ctx := t.Context()
		short := func(errs []error) {
			t.Helper()
			for _, err := range errs {
				if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "the host has 0 of its 960 MiB of memory left for sandboxes and this one needs 96 MiB") || RetryAfter(err) < time.Second {
					t.Errorf("refused with %v", err)
				}
			}
		}
		good, errs := s.tries(100, Create{Team: team})
		if good != 10 {
			t.Errorf("%d were made", good)
		}
		short(errs)
		var counted dto.Metric
		must(t, s.refusals.WithLabelValues(admission.ReasonMemory).Write(&counted))
		if n := counted.GetCounter().GetValue(); n != 90 {
			t.Errorf("%v refusals are counted", n)
		}
		want := admission.Amount{MilliCPU: 10 * 32, Memory: 10 * 96 << 20, Disk: 10 * 16 << 20}
		if got := s.reserved(); got != want {
			t.Errorf("reserved are %+v", got)
		}
		page, _, _, err := s.List(ctx, team, Filter{Limit: 10})
		must(t, err)
		must(t, s.Pause(ctx, team, page[0].ID, true))
		must(t, s.Pause(ctx, team, page[1].ID, true))
		must(t, s.Kill(ctx, team, page[2].ID))

		// The sum is right before anything is let in.
		s.stop()
		s.boot()
		want = admission.Amount{MilliCPU: 7 * 32, Memory: 7 * 96 << 20, Disk: 9 * 16 << 20}
		if got := s.reserved(); got != want {
			t.Errorf("after a restart reserved are %+v", got)
		}
		good, errs = s.tries(100, Create{Team: team})
		if good != 3 {
			t.Errorf("%d were made after a restart", good)
		}
		short(errs)
		_, err = s.Resume(ctx, team, page[0].ID, time.Hour, nil)
		if err == nil || s.state(page[0].ID) != Paused {
			t.Errorf("resumed where there is no room: %v, %s", err, s.state(page[0].ID))
		}
		short([]error{err})
	})
}

// TestAdmissionOfRoutes: traffic is told that there is no room, too.
func TestAdmissionOfRoutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, a := few(10)
		s := newStand(t, Options{Host: h, Admission: a})
		defer s.stop()
		asleep := s.create(func(c *Create) { c.AutoResume = true })
		must(t, s.Pause(t.Context(), team, asleep.ID, true))
		h.set(func(r *admission.Reading) { r.MemoryAvailable = int64(a.MemoryHeadroom) })
		if _, err := s.Routes().Wake(t.Context(), asleep.ID); !errdefs.IsResourceExhausted(err) || !strings.Contains(err.Error(), "96 MiB") {
			t.Errorf("woken where there is no room: %v", err)
		}
		if s.reserved().Memory != 0 {
			t.Errorf("reserved are %+v", s.reserved())
		}
	})
}

// TestUsedMemory: what others use isn't there, though it be reserved for nobody; and what a resident sandbox doesn't use yet is its own.
func TestUsedMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, a := few(100)
		s := newStand(t, Options{Host: h, Admission: a, Starts: 100})
		defer s.stop()
		h.set(func(r *admission.Reading) { r.MemoryAvailable = int64(a.MemoryHeadroom) + 3*96<<20 })
		good, errs := s.tries(10, Create{Team: team})
		if good != 3 {
			t.Errorf("%d were made at once", good)
		}
		for _, err := range errs {
			if r := (*admission.Refusal)(nil); !errors.As(err, &r) || r.Reason != admission.ReasonAvailable {
				t.Errorf("refused with %v", err)
			}
		}
		h.set(func(r *admission.Reading) { r.MemoryAvailable = 2 << 30 })
		s.create(func(c *Create) { c.Profile = admission.Resident })
		own := int64(512<<20 + admission.ProcessMemory - 7) // of which the fake uses 7 bytes
		for left, want := range map[int64]bool{own + 96<<20 - 1: false, own + 96<<20: true} {
			h.set(func(r *admission.Reading) { r.MemoryAvailable = int64(a.MemoryHeadroom) + left })
			told, err := s.Capacity(team, []admission.Shape{{VCPUs: 2, MemoryMB: 512, DiskMB: 1024}})
			must(t, err)
			if r := told.Rooms[0]; (r.Count == 1) != want || r.Short != admission.ReasonAvailable {
				t.Errorf("beside a resident one, with %d, it is told of %+v", left, r)
			}
			if good, errs := s.tries(1, Create{Team: team}); (good == 1) != want {
				t.Errorf("beside a resident one, with %d: %v", left, errs)
			}
		}
	})
}

// TestBrake: a host that is hard pressed starts nothing, and goes on when that has passed.
func TestBrake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, a := few(10)
		s := newStand(t, Options{Host: h, Admission: a})
		defer s.stop()
		sb := s.create(nil)
		must(t, s.Pause(t.Context(), team, sb.ID, true))
		h.set(func(r *admission.Reading) { r.Pressure = admission.Pressure{Memory: 33, Known: true} })
		_, created := s.tries(1, Create{Team: team})
		_, resumed := s.Resume(t.Context(), team, sb.ID, time.Hour, nil)
		for _, err := range append(created, resumed) {
			if !errdefs.IsUnavailable(err) || RetryAfter(err) != 10*time.Second || !strings.Contains(err.Error(), "33 % of the last 10 s, and from 20 % on (admission.memory_pressure)") {
				t.Errorf("refused with %v", err)
			}
		}
		h.set(func(r *admission.Reading) { r.Pressure.Memory = 0 })
		if _, err := s.Resume(t.Context(), team, sb.ID, time.Hour, nil); err != nil {
			t.Error(err)
		}
	})
}

// TestProfiles: a create says what is reserved, or its template does, and it stays so.
func TestProfiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer func() { s.stop() }()
		whole := admission.Amount{MilliCPU: 2000, Memory: 512<<20 + admission.ProcessMemory, Disk: 1 << 30}
		sb := s.create(func(c *Create) { c.Profile = admission.Resident })
		if got := s.reserved(); got != whole {
			t.Errorf("reserved are %+v", got)
		}
		s.stop()
		s.boot()
		if got := s.reserved(); got != whole {
			t.Errorf("after a restart reserved are %+v", got)
		}
		results, err := s.Fork(t.Context(), team, sb.ID, time.Hour, 1)
		must(t, err)
		must(t, results[0].Err)
		if got := s.reserved(); got.Memory != 2*whole.Memory {
			t.Errorf("with its child reserved are %+v", got)
		}
		must(t, s.Kill(t.Context(), team, sb.ID))
		must(t, s.Kill(t.Context(), team, results[0].Sandbox.ID))
		if got := s.reserved(); got != (admission.Amount{}) {
			t.Errorf("reserved are still %+v", got)
		}
	})
}

func TestCapacity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, a := few(10)
		limits := config.Limits{Running: 5, CreateBurst: 1}
		s := newStand(t, Options{Host: h, Admission: a, Limits: &limits})
		defer s.stop()
		s.create(nil)
		sb := s.create(nil)
		must(t, s.Pause(t.Context(), team, sb.ID, true))
		c, err := s.Capacity(team, []admission.Shape{{VCPUs: 2, MemoryMB: 512, DiskMB: 1024}, {VCPUs: 2, MemoryMB: 512, DiskMB: 1024, Profile: admission.Resident}})
		must(t, err)
		if c.Running != 1 || c.Paused != 1 || c.Use.Running != 1 || c.Limits.Running != 5 || c.CPUsUsed != 0.5 || c.Total.Memory != 960<<20 || c.Reserved.Memory != 96<<20 {
			t.Errorf("%+v", c)
		}
		if len(c.Rooms) != 2 || c.Rooms[0].Count != 4 || c.Rooms[0].Short != "team_running" || c.Rooms[1].Count != 1 || c.Rooms[1].Short != admission.ReasonMemory {
			t.Errorf("%+v", c.Rooms)
		}
		if good, _ := s.tries(10, Create{Team: team}); good != 4 {
			t.Errorf("%d are made where there is said to be room for 4", good)
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
		began := time.Now()
		good, errs := s.tries(5, Create{Team: team})
		for _, err := range errs {
			if !errdefs.IsUnavailable(err) || RetryAfter(err) == 0 || !strings.Contains(err.Error(), "starts 1 sandboxes at a time") {
				t.Errorf("refused with %v", err)
			}
		}
		if good != 3 || time.Since(began) > 40*time.Second {
			t.Errorf("%d were made within %v", good, time.Since(began))
		}
		if got := s.reserved(); got.MilliCPU != 3*32 {
			t.Errorf("reserved are %+v", got)
		}
	})
}

// TestShare: of as many as come at once, a team gets its share and no more, and each place that one gives up is another's.
func TestShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{Starts: 10, Limits: &config.Limits{Running: 3, CreateBurst: 1}})
		defer s.stop()
		ctx := t.Context()
		var paused []string
		for range 5 {
			sb := s.create(nil)
			must(t, s.Pause(ctx, team, sb.ID, true))
			paused = append(paused, sb.ID)
		}
		var all sync.WaitGroup
		var mu sync.Mutex
		good := 0
		note := func(err error) {
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				good++
			} else if !errdefs.IsResourceExhausted(err) || !strings.Contains(err.Error(), "may have 3 running sandboxes (limits.running), has 3") {
				t.Errorf("refused with %v", err)
			}
		}
		for _, id := range paused {
			all.Go(func() {
				_, err := s.Resume(ctx, team, id, time.Hour, nil)
				note(err)
			})
		}
		for _, who := range []string{team, "blue", "blue"} {
			all.Go(func() {
				n, errs := s.tries(5, Create{Team: who})
				for range n {
					note(nil)
				}
				for _, err := range errs {
					note(err)
				}
			})
		}
		all.Wait()
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
			if _, errs := s.tries(1, Create{Team: "blue"}); !errdefs.IsUnavailable(errs[0]) {
				t.Errorf("one that can't be made: %v", errs)
			}
		}
		s.host.luck(nil)
		for range 2 {
			sb := s.create(func(c *Create) { c.Team = "blue" })
			must(t, s.Pause(ctx, "blue", sb.ID, true))
		}
		s.create(func(c *Create) { c.Team = "blue" })
		for states, want := range map[State]int{Running: 3, Paused: 0} {
			if _, _, running, err := s.List(ctx, "blue", Filter{States: []State{states}, Limit: 1}); err != nil || running != want {
				t.Errorf("of the list of those that are %s, %d run, %v", states, running, err)
			}
		}
		if use := s.ledger.Totals().Teams["blue"]; use.Running != 3 || use.Paused != 2 {
			t.Errorf("blue has %+v", use)
		}
	})
}

func TestSnapshotLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{Limits: &config.Limits{Snapshots: 2, CreateBurst: 1}})
		defer s.stop()
		ctx := t.Context()
		sb := s.create(nil)
		var first Snapshot
		for i := range 3 {
			made, err := s.Snapshot(ctx, team, sb.ID, "")
			switch {
			case i == 0:
				first = made
			case i == 2 && (!errdefs.IsResourceExhausted(err) || !strings.Contains(err.Error(), "may have 2 snapshots of sandboxes (limits.snapshots), has 2")):
				t.Errorf("a third: %v", err)
			}
			if i < 2 {
				must(t, err)
			}
		}
		if _, err := s.Fork(ctx, team, sb.ID, time.Hour, 1); err != nil {
			t.Errorf("a fork, which leaves none: %v", err)
		}
		if _, err := s.Snapshot(ctx, "blue", sb.ID, ""); !errdefs.IsNotFound(err) {
			t.Errorf("of another team's: %v", err)
		}
		must(t, s.DeleteSnapshot(ctx, team, first.ID))
		if _, err := s.Snapshot(ctx, team, sb.ID, ""); err != nil {
			t.Errorf("in place of one that was deleted: %v", err)
		}
	})
}

func TestAdmitBuild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, a := few(2)
		s := newStand(t, Options{Host: h, Admission: a})
		defer s.stop()
		shape := admission.Shape{VCPUs: 2, MemoryMB: 512, DiskMB: 1024}
		first, err := s.AdmitBuild(t.Context(), shape)
		must(t, err)
		s.create(nil)
		if _, err := s.AdmitBuild(t.Context(), shape); !errdefs.IsUnavailable(err) {
			t.Errorf("without room: %v", err)
		}
		first()
		first()
		if got := s.reserved().Memory; got != 96<<20 {
			t.Errorf("reserved are %d", got)
		}
		if _, err := s.AdmitBuild(t.Context(), shape); err != nil {
			t.Errorf("in place of another: %v", err)
		}
		shape.MemoryMB <<= 10
		if _, err := s.AdmitBuild(t.Context(), shape); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("more than the host has: %v", err)
		}
	})
}
