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

// TestDescribeBuild: what is known of a build is written down while it is made, and not after.
func TestDescribeBuild(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	b := Build{ID: "b", Snapshot: "s", CPUs: 1, MemoryMB: 1}
	must(t, d.BeginBuild(ctx, b))
	must(t, d.DescribeBuild(ctx, "b", 77, Settings{Run: "serve", Digest: "sha256:1"}))
	if b, err := d.Build(ctx, "b"); err != nil || b.DiskMB != 77 || b.Settings.Run != "serve" || b.Settings.Digest != "sha256:1" {
		t.Errorf("%+v, %v", b, err)
	}
	done := build(t, d, "blue", "own")
	for _, id := range []string{"nosuch", done.ID} {
		if err := d.DescribeBuild(ctx, id, 1, Settings{}); !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", id, err)
		}
	}
}
