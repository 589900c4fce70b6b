package db

import (
	"testing"

	"github.com/containerd/errdefs"
)

// TestLayers: a layer is found by its team alone, once it is ready, the newest of a sum; those come first that were not used for
// longest.
func TestLayers(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	for _, team := range []string{"blue", "red"} {
		_, err := d.CreateKey(ctx, team)
		must(t, err)
	}
	for _, l := range []Layer{{Snapshot: "one", Team: "blue", Sum: "s"}, {Snapshot: "two", Team: "blue", Sum: "s"}, {Snapshot: "half", Team: "blue", Sum: "s"}, {Snapshot: "red", Team: "red", Sum: "s"}} {
		must(t, d.BeginLayer(ctx, l))
		if l.Snapshot != "half" {
			must(t, d.FinishLayer(ctx, l.Snapshot, 7))
		}
	}
	l, err := d.Layer(ctx, "blue", "s")
	if err != nil || l.Snapshot != "two" || l.Bytes != 7 || !l.Ready || l.CreatedAt.IsZero() || l.UsedAt.Before(l.CreatedAt) {
		t.Errorf("%+v, %v", l, err)
	}
	must(t, d.UseLayer(ctx, "one"))
	all, err := d.Layers(ctx)
	if err != nil || len(all) != 4 || all[0].Snapshot != "two" || all[3].Snapshot != "one" {
		t.Errorf("%+v, %v", all, err)
	}
	must(t, d.DropLayer(ctx, "two"))
	must(t, d.DropLayer(ctx, "two"))
	if l, err := d.Layer(ctx, "blue", "s"); err != nil || l.Snapshot != "one" {
		t.Errorf("%+v, %v", l, err)
	}
	for what, err := range map[string]error{
		"of another sum": second(d.Layer(ctx, "blue", "other")), "of another team": second(d.Layer(ctx, "green", "s")),
		"to finish": d.FinishLayer(ctx, "two", 1), "to use": d.UseLayer(ctx, "two"),
	} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("one %s: %v", what, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }
