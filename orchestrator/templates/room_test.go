package templates

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// TestWaitsForRoom: a build begins when the host has room for it, says meanwhile what it waits for, once for each thing, and is an error
// if there is none for too long.
func TestWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, b := newWorld(t)
		w.full = admission.Short(admission.ReasonMemory, 10*time.Second, "the host has no memory left")
		var l told
		ended := make(chan error, 1)
		begin := func(ctx context.Context) {
			go func() {
				_, err := b.Make(ctx, recipe(), files, l.tell, "one")
				ended <- err
			}()
			synctest.Wait()
		}
		short := func(err error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.full = err
		}
		begin(t.Context())
		time.Sleep(time.Minute)
		short(admission.Short(admission.ReasonCPU, 10*time.Second, "the host has no CPU left"))
		time.Sleep(time.Minute)
		if w.begun != 0 || !l.has("base waiting for room, at most 10m0s: the host has no memory left") || !l.has("base waiting for room, at most 10m0s: the host has no CPU left") || len(l.lines) != 3 {
			t.Errorf("%d machines were, it says %q", w.begun, l.lines)
		}
		short(nil)
		must(t, <-ended)
		if w.room != 0 {
			t.Errorf("%d are set aside", w.room)
		}

		short(admission.Short(admission.ReasonCPU, 10*time.Second, "the host has no CPU left"))
		began := time.Now()
		begin(t.Context())
		if err := <-ended; !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "no room within 10m0s: the host has no CPU left") || time.Since(began) != roomTimeout {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		begin(ctx)
		gone := errors.New("canceled")
		cancel(gone)
		if err := <-ended; !errors.Is(err, gone) {
			t.Errorf("canceled: %v", err)
		}
	})
}

// TestRoom: a build begins no machine where there is no room for it, and gives back what was set aside; what its sandboxes' profile is
// goes on from build to build.
func TestRoom(t *testing.T) {
	w, b := newWorld(t)
	w.full = errdefs.ErrUnavailable.WithMessage("the host is full")
	if _, err := b.Make(within(t), recipe(), files, (&told{}).tell, "none"); !errdefs.IsUnavailable(err) || w.begun != 0 {
		t.Errorf("on a full host: %v, %d machines were", err, w.begun)
	}
	w.full = nil
	r := recipe()
	r.Profile = admission.Resident
	made, err := b.Make(within(t), r, files, (&told{}).tell, "one")
	must(t, err)
	if made.Settings.Profile != "resident" || w.room != 0 {
		t.Errorf("%+v, %d are set aside", made.Settings, w.room)
	}
	on := Recipe{Team: team, Base: &db.Build{ID: "one", Snapshot: "one", DiskMB: made.DiskMB, Settings: made.Settings}, CPUs: 1, MemoryMB: 512}
	again, err := b.Make(within(t), on, nil, (&told{}).tell, "two")
	must(t, err)
	if again.Settings.Profile != "resident" {
		t.Errorf("%+v", again.Settings)
	}
	r.Profile = "any"
	if _, err := b.Make(within(t), r, files, (&told{}).tell, "three"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("another profile: %v", err)
	}
}
