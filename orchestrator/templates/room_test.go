package templates

import (
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
)

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
