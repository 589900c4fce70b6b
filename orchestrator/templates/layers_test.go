package templates

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// layers are the disks that are kept, those first that were not used for longest.
func (b *Builder) layers(t *testing.T) (names []string) {
	t.Helper()
	all, err := b.Layers.Layers(t.Context())
	must(t, err)
	for _, l := range all {
		names = append(names, l.Snapshot)
	}
	return names
}

// runs are steps of commands.
func runs(commands ...string) (steps []Step) {
	for _, c := range commands {
		steps = append(steps, Step{Type: Run, Args: []string{c}})
	}
	return steps
}

// TestCacheBound: no more is kept than is configured, what was used last longest; and not even that if nothing is to be kept.
func TestCacheBound(t *testing.T) {
	w, b := newWorld(t)
	b.Config.Templates.Cache = 3 << 20 // three of the fake's
	build := func(name string, commands ...string) {
		t.Helper()
		_, err := b.Make(within(t), Recipe{Team: team, Image: "debian", CPUs: 1, MemoryMB: 512, Steps: runs(commands...)}, nil, (&told{}).tell, name)
		must(t, err)
		if want := append([]string{"docker.io/debian"}, commands...); !slices.Equal(w.kept[name], want) {
			t.Errorf("%s is %q", name, w.kept[name])
		}
		must(t, w.Forget(t.Context(), name))
	}
	build("one", "a", "b")
	build("two", "c")
	first := b.layers(t)
	build("three", "a") // which is used again
	build("four", "d", "e")
	if got := b.layers(t); len(got) != 3 || !slices.Contains(got, first[0]) || slices.Contains(got, first[1]) || len(w.kept) != 3 {
		t.Errorf("of %q there is %q, and disks %q", first, got, w.kept)
	}
	b.Config.Templates.Cache = config.Size(0)
	build("five", "f", "g")
	if got := b.layers(t); len(got) != 0 || len(w.kept) != 0 {
		t.Errorf("nothing is to be kept, but there is %q, %q", got, w.kept)
	}
}

// TestCacheGone: a layer whose disk somebody has removed is made anew.
func TestCacheGone(t *testing.T) {
	w, b := newWorld(t)
	r := Recipe{Team: team, Image: "debian", CPUs: 1, MemoryMB: 512, Steps: runs("a", "b")}
	for i := range 2 {
		_, err := b.Make(within(t), r, nil, (&told{}).tell, fmt.Sprint(i))
		must(t, err)
		for _, l := range b.layers(t) {
			must(t, w.Forget(t.Context(), l))
		}
	}
	if len(b.layers(t)) != 2 {
		t.Errorf("layers %q", b.layers(t))
	}
}

// TestLost: a layer of which it wasn't heard that it was saved is removed, also if the machine goes on with that.
func TestLost(t *testing.T) {
	w, b := newWorld(t)
	w.lost = true
	if _, err := b.Make(within(t), Recipe{Team: team, Image: "debian", CPUs: 1, MemoryMB: 512, Steps: runs("a")}, nil, (&told{}).tell, "one"); !errdefs.IsUnavailable(err) {
		t.Error(err)
	}
	if got := b.layers(t); len(got) != 0 || len(w.kept) != 0 || w.left() != 0 {
		t.Errorf("left: %q, %q, and %d machines", got, w.kept, w.left())
	}
}

// TestOpen: what a builder that was killed has left half made is removed with its machine, which may have gone on with it, and a team's
// can be.
func TestOpen(t *testing.T) {
	w, b := newWorld(t)
	for _, id := range []string{machinePrefix + "1", "sandbox"} {
		addr := w.add(&being{Beginning: lifecycle.Beginning{ID: id}})
		w.at(addr).saving = map[bool]string{true: "half"}[id != "sandbox"]
	}
	for _, l := range []db.Layer{{Snapshot: "half", Team: team, Sum: "1"}, {Snapshot: "whole", Team: team, Sum: "2"}, {Snapshot: "theirs", Team: "others", Sum: "2"}} {
		must(t, b.Layers.BeginLayer(t.Context(), l))
		w.kept[l.Snapshot] = []string{}
	}
	must(t, b.Layers.FinishLayer(t.Context(), "whole", 1))
	must(t, b.Layers.FinishLayer(t.Context(), "theirs", 1))
	must(t, b.Open(t.Context()))
	if w.left() != 1 || w.of("sandbox") == nil {
		t.Errorf("%d machines are left", w.left())
	}
	if got := b.layers(t); len(got) != 2 || len(w.kept) != 2 || w.kept["half"] != nil {
		t.Errorf("left: %q, %q", got, w.kept)
	}
	must(t, b.Purge(t.Context(), team))
	if got := b.layers(t); !slices.Equal(got, []string{"theirs"}) || w.kept["whole"] != nil {
		t.Errorf("left of the others: %q, %q", got, w.kept)
	}
}

// TestStuck: that a layer of somebody's can't be removed is no failure of a build, which it has nothing to do with.
func TestStuck(t *testing.T) {
	w, b := newWorld(t)
	b.Config.Templates.Cache = 1 << 20 // one of the fake's
	must(t, b.Layers.BeginLayer(t.Context(), db.Layer{Snapshot: "theirs", Team: "others", Sum: "2"}))
	must(t, b.Layers.FinishLayer(t.Context(), "theirs", 1<<40))
	w.stuck = errors.New("input/output error")
	if _, err := b.Make(within(t), Recipe{Team: team, Image: "debian", CPUs: 1, MemoryMB: 512, Steps: runs("a", "b")}, nil, (&told{}).tell, "one"); err != nil {
		t.Error(err)
	}
	if err := b.Trim(t.Context()); err == nil {
		t.Error("it isn't told")
	}
}
