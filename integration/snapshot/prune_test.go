package snapshot

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/usage"
)

// pruned is what cube prune tells of one kind.
func pruned(t *testing.T, kind string, args ...string) (names []string) {
	t.Helper()
	var freed usage.Freed
	must(t, json.Unmarshal([]byte(cube(t, append([]string{"prune", "--json"}, args...)...)), &freed))
	for _, r := range freed.Items {
		if r.Kind == kind {
			names = append(names, r.Name)
		}
	}
	// Artefacts are shared with the host's own stack; while its store isn't mounted, prune keeps them all and says so.
	others := "the store in " + config.Default().StateDir + " isn't mounted"
	for _, note := range freed.Notes {
		if !strings.Contains(note, others) {
			t.Errorf("note: %q", note)
		}
	}
	return names
}

// TestPruneLayers: layers go that no image, container or lease has, nor another layer that stays, and no other.
func TestPruneLayers(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "has-layers").run(ctx, "")
	layers := client.SnapshotService("cube")
	lease, err := client.LeasesService().Create(ctx, leases.WithRandomID())
	must(t, err)
	leased := leases.WithLease(ctx, lease.ID)
	root := snapshots.WithLabels(map[string]string{"containerd.io/gc.root": "test"})
	name := func(n string) string { return s.ID(t, "layer-"+n) }
	_, err = layers.Prepare(leased, name("base-active"), "")
	must(t, err)
	must(t, layers.Commit(leased, name("base"), name("base-active")))
	_, err = layers.Prepare(leased, name("leased"), "")
	must(t, err)
	_, err = layers.Prepare(ctx, name("rooted"), name("base"), root)
	must(t, err)
	_, err = layers.Prepare(ctx, name("unused"), name("base"))
	must(t, err)
	t.Cleanup(func() { _ = layers.Remove(ctx, name("rooted")) })

	want := []string{s.Config.Containerd.Namespace + "/" + name("unused")}
	for _, args := range [][]string{{"--dry-run"}, {"--dry-run"}, nil} {
		if got := pruned(t, "layer", args...); !slices.Equal(got, want) {
			t.Errorf("prune %v: %q, want %q", args, got, want)
		}
	}
	if _, err := layers.Stat(ctx, name("unused")); !errdefs.IsNotFound(err) {
		t.Errorf("the unused one: %v", err)
	}
	for _, n := range []string{name("base"), name("leased"), name("rooted"), b.id} {
		if _, err := layers.Stat(ctx, n); err != nil {
			t.Errorf("%s: %v", n, err)
		}
	}
	b.counts(1)
	must(t, layers.Remove(ctx, name("rooted")))
	must(t, client.LeasesService().Delete(ctx, lease)) // what it had is unused from then on
	if got := pruned(t, "layer"); len(got) > 2 {
		t.Errorf("then %q", got)
	}
	if _, err := layers.Stat(ctx, name("base")); !errdefs.IsNotFound(err) {
		t.Errorf("what nobody has any more: %v", err)
	}
	b.end(ctx)
}

// TestPrunePaused: what a container was paused with goes with a container that somebody has removed in containerd.
func TestPrunePaused(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	id, stays := s.ID(t, "gone"), s.ID(t, "stays")
	for _, id := range []string{id, stays} {
		cube(t, "run", "-d", "--name", id, stack.Image, "sleep", "1000")
		t.Cleanup(func() { s.Cube("rm", "-f", id) })
		cube(t, "pause", id)
	}
	c, err := client.LoadContainer(ctx, id)
	must(t, err)
	must(t, c.Delete(ctx, containerd.WithSnapshotCleanup))
	want := []string{s.Config.Containerd.Namespace + "/" + id}
	for _, args := range [][]string{{"--dry-run"}, {"--dry-run"}, nil} {
		if got := pruned(t, "paused", args...); !slices.Equal(got, want) {
			t.Errorf("prune %v: %q, want %q", args, got, want)
		}
	}
	if left := cube(t, "snapshot", "ls", "-q"); strings.Count(left, "\n") > 0 || !strings.HasPrefix(left, stays) {
		t.Errorf("snapshots: %q", left)
	}
	if r := s.Cube("resume", stays); r.Err != nil {
		t.Errorf("resume: %+v", r)
	}
	cube(t, "rm", "-f", stays)
	if left, _ := os.ReadDir(s.Config.PausedDir()); len(left) > 0 {
		t.Errorf("paused: %v", left)
	}
}
