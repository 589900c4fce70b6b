package db

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func TestTemplates(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	base := build(t, d, "default", "base")
	own := build(t, d, "blue", "own")
	for _, c := range []struct{ team, ref, build string }{
		{"default", "base", base.ID}, {"blue", "base", base.ID}, {"blue", "default/BASE:default", base.ID}, {"blue", base.Template, base.ID},
		{"blue", "own", own.ID}, {"blue", "blue/own", own.ID}, {"blue", own.Template + ":default", own.ID},
		{"default", "own", ""}, {"default", "blue/own", ""}, {"default", own.Template, ""}, {"blue", "own:v2", ""}, {"blue", "nosuch", ""},
	} {
		r, err := ParseRef(c.ref)
		must(t, err)
		_, b, err := d.Resolve(ctx, c.team, r)
		if b.ID != c.build || errdefs.IsNotFound(err) != (c.build == "") {
			t.Errorf("%s's %s: build %q, %v", c.team, c.ref, b.ID, err)
		}
		if c.build == base.ID && (b.Settings.Hook == nil || b.Settings.Hook.Port != 8080 || b.MemoryMB != 512) {
			t.Errorf("the build is %+v", b)
		}
	}
	for _, bad := range []string{"", "a b", "a/b/c", "a:b:c", "a:", ":b", "/a", "a/", "ä", "a\x00", "../x", strings.Repeat("x", 129)} {
		if r, err := ParseRef(bad); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q is %+v, %v", bad, r, err)
		}
	}
	all, err := d.Templates(ctx, "blue", Page{Limit: 10})
	must(t, err)
	if len(all) != 2 || all[0].Names[0] != "own" || all[1].Names[0] != "base" || !all[1].Public || all[1].Builds != 1 {
		t.Errorf("templates %+v", all)
	}

	// A snapshot by the same name is another build of the same template; the one before goes when no sandbox is of it.
	snap := func(id, name, tag string) (string, error) {
		must(t, d.BeginBuild(ctx, Build{ID: id, Snapshot: id, Origin: "i1", CreatedAt: time.Now()}))
		return d.Publish(ctx, Publication{Build: id, Team: "blue", Name: name, Template: "t" + id, Tag: tag, Snapshot: true})
	}
	if _, err := snap("s0", "own", DefaultTag); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a snapshot by a template's name: %v", err)
	}
	must(t, d.DropBuild(ctx, "s0"))
	first, err := snap("s1", "mine", DefaultTag)
	must(t, err)
	must(t, d.AddSandbox(ctx, row(Build{ID: "s1", Template: first}, "blue", "child")))
	second, err := snap("s2", "mine", DefaultTag)
	must(t, err)
	_, err = snap("s3", "mine", "v2")
	must(t, err)
	if first != second {
		t.Errorf("templates %s and %s", first, second)
	}
	loose := func() (ids []string) {
		t.Helper()
		bs, err := d.Loose(ctx)
		must(t, err)
		for _, b := range bs {
			ids = append(ids, b.ID)
		}
		return ids
	}
	if got := loose(); len(got) != 0 {
		t.Errorf("loose while a sandbox is of it: %v", got)
	}
	must(t, d.AddSandbox(ctx, row(Build{ID: "s1", Template: first}, "blue", "fork"))) // of the child
	must(t, d.DropSandbox(ctx, "fork", ""))
	must(t, d.DropSandbox(ctx, "child", ""))
	if got := loose(); !slices.Equal(got, []string{"s1"}) {
		t.Errorf("loose: %v", got)
	}
	// What was seen to be loose may be being deleted.
	if err := d.AddSandbox(ctx, row(Build{ID: "s1", Template: first}, "blue", "late")); !errors.As(err, new(*BuildGone)) || !errdefs.IsNotFound(err) {
		t.Errorf("a sandbox of a build that is loose: %v", err)
	}
	unnamed, err := snap("s4", "", DefaultTag)
	must(t, err)
	list, err := d.Snapshots(ctx, "blue", SnapshotFilter{Page: Page{Limit: 2}})
	must(t, err)
	if len(list) != 2 || list[0].Template.ID != unnamed || list[1].Tag.Name != "v2" || list[1].Origin != "i1" {
		t.Fatalf("snapshots %+v", list)
	}
	rest, err := d.Snapshots(ctx, "blue", SnapshotFilter{Origin: "i1", Page: Page{Limit: 2, After: list[1].Tag.AssignedAt, AfterID: list[1].Template.ID + ":" + list[1].Tag.Name}})
	must(t, err)
	if len(rest) != 1 || rest[0].Tag.Build != "s2" {
		t.Errorf("the rest is %+v", rest)
	}
	named, err := d.Snapshots(ctx, "blue", SnapshotFilter{Ref: &Ref{Name: "mine", Tag: "v2"}, Page: Page{Limit: 9}})
	must(t, err)
	if len(named) != 1 || named[0].Tag.Build != "s3" {
		t.Errorf("by name %+v", named)
	}
	if none, err := d.Snapshots(ctx, "default", SnapshotFilter{Page: Page{Limit: 9}}); err != nil || len(none) != 0 {
		t.Errorf("another team's: %+v, %v", none, err)
	}

	// What sandboxes are of isn't deleted, nor what is another team's.
	must(t, d.AddSandbox(ctx, row(Build{ID: "s3", Template: first}, "blue", "child2")))
	if err := d.DeleteTemplate(ctx, "blue", Ref{Name: "mine", Tag: "v2"}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("deleted in use: %v", err)
	}
	if err := d.DeleteTemplate(ctx, "default", Ref{Team: "blue", Name: "mine"}); !errdefs.IsNotFound(err) {
		t.Errorf("deleted by another team: %v", err)
	}
	must(t, d.DeleteTemplate(ctx, "blue", Ref{Name: "mine", Tag: DefaultTag}))
	if _, _, err := d.Resolve(ctx, "blue", Ref{Name: "mine"}); !errdefs.IsNotFound(err) {
		t.Errorf("resolved after its deletion: %v", err)
	}
	must(t, d.DropSandbox(ctx, "child2", ""))
	must(t, d.DeleteTemplate(ctx, "blue", Ref{Name: "mine", Tag: "v2"}))
	if _, err := d.Template(ctx, "blue", Ref{Name: "mine"}); !errdefs.IsNotFound(err) {
		t.Errorf("a template without tags: %v", err)
	}
	if got := loose(); !slices.Equal(got, []string{"s1", "s2", "s3"}) {
		t.Errorf("loose: %v", got)
	}
	for _, id := range loose() {
		must(t, d.DropBuild(ctx, id))
	}
	if err := d.AddSandbox(ctx, row(Build{ID: "s3", Template: first}, "blue", "late")); !errors.As(err, new(*BuildGone)) || !errdefs.IsNotFound(err) {
		t.Errorf("a sandbox of a build that is no more: %v", err)
	}
}

// TestPublishNew: of those who make the same at the same time, the first one's is what is made.
func TestPublishNew(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	b := build(t, d, "blue", "own")
	must(t, d.BeginBuild(ctx, Build{ID: "second", Team: "blue", Snapshot: "second", CreatedAt: time.Now()}))
	p := Publication{Build: "second", Team: "blue", Name: "own", Template: "other", Tag: DefaultTag, New: true}
	if _, err := d.Publish(ctx, p); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a second one: %v", err)
	}
	if _, is, err := d.Resolve(ctx, "blue", Ref{Name: "own"}); err != nil || is.ID != b.ID {
		t.Errorf("it is %s, %v", is.ID, err)
	}
	p.Tag = "v2"
	if id, err := d.Publish(ctx, p); err != nil || id != b.Template {
		t.Errorf("by another tag: %s, %v", id, err)
	}
}
