package lifecycle

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	dto "github.com/prometheus/client_model/go"

	"github.com/cubesandbox/cube/orchestrator/admission"
)

// TestClaimedStays: who has found a member too many before a create has claimed it removes nothing of the sandbox.
func TestClaimedStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 1)
		defer s.stop()
		seen := s.pool.ready()[0]
		sb := s.create(nil)
		if sb.ID != seen.id {
			t.Fatalf("sandbox %s isn't of member %s", sb.ID, seen.id)
		}
		if _, ok := s.evict(seen); ok {
			t.Error("it is being removed")
		}
		pass(10 * time.Second)
		if got := s.state(sb.ID); got != Running || s.machine(sb.ID).lives != 1 {
			t.Errorf("it is %q, its machine %+v", got, s.machine(sb.ID))
		}
		if n := s.reserved().Memory; n != 2*96<<20 {
			t.Errorf("%d bytes are reserved for it and the next member", n)
		}
		s.whole()
	})
}

// TestUselessGift: members aren't given up for a sandbox that there wouldn't be room for without them, either.
func TestUselessGift(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := pooled(1)
		o.Host, o.Admission = few(3)
		s := newStand(t, o)
		defer s.stop()
		must(t, s.Kill(t.Context(), team, s.create(nil).ID))
		pass(10 * time.Second)
		large := Create{Team: team, Template: "base", Timeout: time.Hour, Profile: admission.Resident} // 576 MiB of 288
		if _, err := s.Create(t.Context(), large); !errdefs.IsUnavailable(err) {
			t.Errorf("created: %v", err)
		}
		if n := s.whole(); n != 1 {
			t.Errorf("%d members are left", n)
		}
		// Nor where it isn't reserved, but used.
		s.o.Host.(*room).set(func(r *admission.Reading) {
			r.MemoryTotal, r.MemoryAvailable = 1<<40, int64(s.Admission.MemoryHeadroom)
		})
		s.build("other")
		large.Template = "other"
		if _, err := s.Create(t.Context(), large); !errdefs.IsUnavailable(err) {
			t.Errorf("created: %v", err)
		}
		if n := s.whole(); n != 1 {
			t.Errorf("%d members are left", n)
		}
	})
}

// TestGiftUnderWay: who needs the room of a member that is being removed waits for it.
func TestGiftUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := pooled(1)
		o.Host, o.Admission = few(1)
		s := newStand(t, o)
		defer s.stop()
		s.build("other")
		must(t, s.Kill(t.Context(), team, s.create(nil).ID))
		pass(2 * time.Minute) // there was no room for a member beside it
		s.evict(s.pool.ready()[0])
		s.create(func(c *Create) { c.Template = "other" })
		if n := s.whole(); n != 0 {
			t.Errorf("%d members", n)
		}
	})
}

// TestGiftHasAnEnd: nobody waits for long for a member that can't be removed.
func TestGiftHasAnEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := pooled(1)
		o.Host, o.Admission = few(1)
		s := newStand(t, o)
		defer s.stop()
		must(t, s.Kill(t.Context(), team, s.create(nil).ID))
		pass(2 * time.Minute) // there was no room for a member beside it
		s.host.luck(func(_ context.Context, call, _ string, _ bool) error {
			if call == "kill" {
				return errFake
			}
			return nil
		})
		began := time.Now()
		if _, err := s.AdmitBuild(t.Context(), admission.Shape{VCPUs: 2, MemoryMB: 512, DiskMB: 1024}); !errdefs.IsUnavailable(err) {
			t.Errorf("admitted: %v", err)
		}
		if took := time.Since(began); took > giveBackTimeout {
			t.Errorf("it took %v", took)
		}
		s.host.luck(nil)
		pass(2 * time.Minute)
		s.whole()
	})
}

// TestMemoryPressure: all members go when memory is under pressure, whether somebody comes or not, and none is made for a while.
func TestMemoryPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pressed := make(chan error)
		o := pooled(2)
		o.Pool.Pressed = func(ctx context.Context, percent int) error {
			if percent != 20 {
				t.Errorf("from %d percent on", percent)
			}
			select {
			case err := <-pressed:
				return err
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		s := newStand(t, o)
		defer s.stop()
		for range 4 {
			must(t, s.Kill(t.Context(), team, s.create(nil).ID))
		}
		pass(10 * time.Second)
		for range 2 {
			if n := s.whole(); n != 2 {
				t.Errorf("%d members", n)
			}
			pressed <- nil
			pass(30 * time.Second)
			if n := s.whole(); n != 0 {
				t.Errorf("%d members under pressure", n)
			}
			pass(time.Minute)
		}
		pressed <- errFake // the kernel doesn't tell any more
		pass(time.Minute)
		if n := s.whole(); n != 2 {
			t.Errorf("%d members", n)
		}
	})
}

// TestClaimGivenUp: a create that is given up amid its claim is over, and says nothing against the member.
func TestClaimGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := filled(t, 1)
		defer s.stop()
		ctx, cancel := context.WithCancel(t.Context())
		s.host.luck(func(_ context.Context, call, _ string, after bool) error {
			if call == "release" && !after {
				cancel()
			}
			return nil
		})
		if _, err := s.Create(ctx, Create{Team: team, Template: "base", Timeout: time.Hour}); !errors.Is(err, context.Canceled) {
			t.Errorf("created: %v", err)
		}
		s.host.luck(nil)
		var lost dto.Metric
		must(t, s.pool.creates.WithLabelValues("lost").Write(&lost))
		if n := lost.GetCounter().GetValue(); n != 0 {
			t.Errorf("%v members were of no use", n)
		}
		pass(time.Minute)
		s.whole()
	})
}
