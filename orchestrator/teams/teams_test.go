package teams

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// things are an asset in memory.
type things struct {
	names map[string][]string // by team
	stuck map[string]bool     // can't be removed
	on    map[string]bool     // the disk, whatever is in names
	fails error
}

func (x *things) asset(kind string) Asset {
	return Asset{Kind: kind,
		List: func(_ context.Context, team string) ([]string, error) { return slices.Clone(x.names[team]), nil },
		Remove: func(_ context.Context, team string) error {
			x.names[team] = slices.DeleteFunc(x.names[team], func(n string) bool { return !x.stuck[n] })
			return x.fails
		},
		Left: func(_ context.Context, names []string) (left []string, _ error) {
			for _, n := range names {
				if x.on[n] {
					left = append(left, n)
				}
			}
			return left, nil
		},
		Why: func(name string) string { return "why " + name },
	}
}

type record struct{ all []audit.Entry }

func (r *record) Record(e audit.Entry) { r.all = append(r.all, e) }
func (r *record) Ready() error         { return nil }

// TestPurge: a team goes when nothing of it is left, and not before; nothing of it is in the database's files then.
func TestPurge(t *testing.T) {
	ctx := audit.With(t.Context(), audit.By{Via: audit.CLI})
	path := filepath.Join(t.TempDir(), "cube.db")
	d, err := db.Open(ctx, path)
	must(t, err)
	defer d.Close()
	key, err := d.CreateKey(ctx, "blue")
	must(t, err)
	_, err = d.CreateKey(ctx, "red")
	must(t, err)
	must(t, d.BeginBuild(ctx, db.Build{ID: "b", Team: "blue", Snapshot: "build-b", CreatedAt: time.Now()}))
	_, err = d.Publish(ctx, db.Publication{Build: "b", Team: "blue", Name: "tpl", Template: "t", Tag: "default"})
	must(t, err)
	marker := strings.Repeat("verysecretvalue", 500) // of several pages
	must(t, d.AddSandbox(ctx, db.Sandbox{ID: "i1", Team: "blue", Template: "t", Build: "b", State: "running", Spec: []byte(`{"env":"` + marker + `"}`)}))
	boxes := &things{names: map[string][]string{"blue": {"i1"}, "red": {"i2"}}, stuck: map[string]bool{"i1": true}}
	disks := &things{names: map[string][]string{"blue": {"d1", "d2"}}, on: map[string]bool{"d1": true}}
	rec := &record{}
	p := &Purger{DB: d, Audit: rec, Assets: []Asset{boxes.asset("sandbox"), disks.asset("disk")}}

	if _, err := p.Purge(ctx, "green"); !errdefs.IsNotFound(err) {
		t.Errorf("a team that isn't there: %v", err)
	}
	r, err := p.Purge(ctx, "blue")
	must(t, err)
	if r.Done() || !slices.Equal(r.Removed, []Item{{Kind: "disk", Name: "d2"}}) || !slices.Equal(r.Left, []Item{{"sandbox", "i1", "why i1"}, {"disk", "d1", "why d1"}}) {
		t.Errorf("with things that stay: %+v", r)
	}
	if _, _, err := d.Authenticate(ctx, key); !errdefs.IsUnauthorized(err) {
		t.Errorf("the key of a team that is being removed: %v", err)
	}
	for what, err := range map[string]error{
		"a sandbox": d.AddSandbox(ctx, db.Sandbox{ID: "i3", Team: "blue", Template: "t", Build: "b", State: "creating", Spec: []byte("{}")}),
		"a build":   d.BeginBuild(ctx, db.Build{ID: "b2", Team: "blue", Snapshot: "build-b2"}),
		"a key":     func() error { _, err := d.CreateKey(ctx, "blue"); return err }(),
	} {
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "cube team purge blue") {
			t.Errorf("%s is made for a team that is being removed: %v", what, err)
		}
	}
	// What has failed is said, and keeps the team.
	boxes.stuck, disks.on, disks.fails = nil, nil, errors.New("no luck")
	must(t, d.DropSandbox(ctx, "i1", "its machine has ended"))
	if r, err = p.Purge(ctx, "blue"); err != nil || r.Done() || len(r.Left) > 0 || !slices.Equal(r.Failed, []string{"disk: no luck"}) {
		t.Errorf("with a failure: %+v, %v", r, err)
	}
	// So do rows of which no asset knows.
	disks.fails = nil
	if r, err = p.Purge(ctx, "blue"); err != nil || len(r.Left) == 0 || r.Left[0].Kind != "rows" || !slices.Contains(r.Left, Item{Kind: "rows", Name: "1 in builds"}) {
		t.Errorf("with rows: %+v, %v", r, err)
	}
	must(t, d.DropTeamTemplates(ctx, "blue"))
	must(t, d.DropBuild(ctx, "b"))
	if r, err = p.Purge(ctx, "blue"); err != nil || !r.Done() {
		t.Errorf("with nothing left: %+v, %v", r, err)
	}
	if _, err := p.Purge(ctx, "blue"); !errdefs.IsNotFound(err) {
		t.Errorf("once more: %v", err)
	}
	rows, err := d.TeamRows(ctx, "red")
	must(t, err)
	if !slices.Equal(rows, []string{"1 in keys"}) || len(boxes.names["red"]) != 1 {
		t.Errorf("another team has %q, %q", rows, boxes.names["red"])
	}
	files, err := filepath.Glob(path + "*")
	must(t, err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		must(t, err)
		if bytes.Contains(b, []byte("verysecret")) {
			t.Errorf("%s still has what the sandbox's variables were", f)
		}
	}
	var results []string
	for _, e := range rec.all {
		results = append(results, string(e.Action)+" "+e.Team+" "+string(e.Via)+" "+string(e.Result))
	}
	failed := "purge blue cli failed"
	if !slices.Equal(results, []string{"purge green cli failed", failed, failed, failed, "purge blue cli ok", failed}) {
		t.Errorf("recorded: %q", results)
	}
}

// TestPurgeOrder: what an asset has is found before another one is removed.
func TestPurgeOrder(t *testing.T) {
	ctx := t.Context()
	d, err := db.Open(ctx, filepath.Join(t.TempDir(), "cube.db"))
	must(t, err)
	defer d.Close()
	_, err = d.CreateKey(ctx, "blue")
	must(t, err)
	boxes := &things{names: map[string][]string{"blue": {"i1"}}}
	first := boxes.asset("sandbox")
	second := Asset{Kind: "disk", Remove: func(context.Context, string) error { return nil },
		List: func(context.Context, string) ([]string, error) {
			if len(boxes.names["blue"]) > 0 {
				return []string{"of i1"}, nil
			}
			return nil, nil
		}}
	p := &Purger{DB: d, Audit: audit.Nowhere{}, Assets: []Asset{first, second}}
	r, err := p.Purge(ctx, "blue")
	if err != nil || !r.Done() || len(r.Removed) != 2 {
		t.Errorf("%+v, %v", r, err)
	}
	// That it can't be known isn't that there is none.
	must(t, d.Close())
	if _, err := p.Purge(ctx, "blue"); err == nil || errdefs.IsNotFound(err) {
		t.Errorf("without a database: %v", err)
	}
}
