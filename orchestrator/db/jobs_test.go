package db

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// job asks for one of a team's template.
func job(t *testing.T, d *DB, team, name, id string, tags ...string) (template string) {
	t.Helper()
	if len(tags) == 0 {
		tags = []string{DefaultTag}
	}
	template, err := d.CreateJob(t.Context(), JobRequest{ID: id, Team: team, Name: name, Template: "t" + name, Tags: tags, CPUs: 2, MemoryMB: 512, DiskMB: 1024})
	must(t, err)
	return template
}

// begin has a job build.
func begin(t *testing.T, d *DB, id string) {
	t.Helper()
	must(t, d.MoveJob(t.Context(), id, JobWaiting, JobQueued, json.RawMessage(`{"image":"a"}`)))
	must(t, d.MoveJob(t.Context(), id, JobQueued, JobBuilding, nil))
	must(t, d.BeginBuild(t.Context(), Build{ID: id, Snapshot: "snap-" + id, CreatedAt: time.Now()}))
}

// TestJobs: a job has its template from the first moment on, and becomes what its tags stand for at the last.
func TestJobs(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	old := build(t, d, "blue", "app")
	if _, err := d.CreateJob(ctx, JobRequest{ID: "x", Team: "nobody", Name: "a", Tags: []string{"a"}}); !errdefs.IsNotFound(err) {
		t.Errorf("for a team that isn't there: %v", err)
	}
	if got := job(t, d, "blue", "app", "j1", "v1", "v2"); got != old.Template {
		t.Errorf("the template is %s, not %s", got, old.Template)
	}
	if got := job(t, d, "blue", "other", "j2"); got != "tother" {
		t.Errorf("the template is %s", got)
	}
	if _, err := d.Template(ctx, "blue", Ref{Name: "other"}); err != nil {
		t.Error(err)
	}
	if _, _, err := d.Resolve(ctx, "blue", Ref{Name: "other"}); !errdefs.IsNotFound(err) {
		t.Errorf("before it is built: %v", err)
	}
	begin(t, d, "j1")
	if err := d.MoveJob(ctx, "j1", JobWaiting, JobQueued, nil); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("started twice: %v", err)
	}
	if err := d.MoveJob(ctx, "none", JobWaiting, JobQueued, nil); !errdefs.IsNotFound(err) {
		t.Errorf("one that isn't there: %v", err)
	}
	if loose, err := d.Loose(ctx); err != nil || len(loose) != 1 || loose[0].ID != "j1" {
		t.Errorf("loose: %+v, %v", loose, err)
	}
	must(t, d.AddLog(ctx, "j1", []LogLine{{Seq: 0, At: time.Now(), Level: 1, Step: "base", Message: "a"}, {Seq: 1, At: time.Now(), Level: 0, Step: "1", Message: "b"}}))
	must(t, d.PublishJob(ctx, "j1", 2048, Settings{EnvdVersion: "9", User: "u"}, json.RawMessage(`{"digest":"d"}`), []LogLine{{Seq: 2, At: time.Now(), Level: 3, Message: "c"}}))
	for _, tag := range []string{"v1", "v2"} {
		if _, b, err := d.Resolve(ctx, "blue", Ref{Name: "app", Tag: tag}); err != nil || b.ID != "j1" || b.Settings.User != "u" || b.DiskMB != 2048 {
			t.Errorf("%s is %+v, %v", tag, b, err)
		}
	}
	if _, b, err := d.Resolve(ctx, "blue", Ref{Name: "app"}); err != nil || b.ID != old.ID {
		t.Errorf("the default is %+v, %v", b, err)
	}
	for f, want := range map[LogFilter]string{
		{Limit: 9}: "a b c ", {Limit: 9, Level: 1}: "a c ", {Limit: 1, Offset: 1}: "b ", {Limit: 2, Backward: true}: "c b ", {Limit: 9, Offset: 3}: "",
		{Limit: 9, From: time.Now().Add(time.Hour)}: "", {Limit: 9, From: time.Now().Add(time.Hour), Backward: true}: "c b a ", {Limit: 0}: "",
	} {
		lines, err := d.JobLog(ctx, "j1", f)
		must(t, err)
		got := ""
		for _, l := range lines {
			got += l.Message + " "
		}
		if got != want {
			t.Errorf("%+v: %q", f, got)
		}
	}
	all, err := d.Builds(ctx, old.Template)
	must(t, err)
	if len(all) != 2 || all[0].ID != "j1" || all[0].State != JobReady || all[0].EnvdVersion != "9" || all[1].ID != old.ID || all[1].State != JobReady || all[1].FinishedAt.IsZero() {
		t.Errorf("builds %+v", all)
	}
	if tpl, err := d.Template(ctx, "blue", Ref{Name: "app"}); err != nil || tpl.Builds != 2 {
		t.Errorf("%+v, %v", tpl, err)
	}

	// What replaces it lets it go.
	job(t, d, "blue", "app", "j3", "v1", "v2", DefaultTag)
	begin(t, d, "j3")
	must(t, d.PublishJob(ctx, "j3", 1, Settings{}, json.RawMessage(`{}`), nil))
	loose, err := d.Loose(ctx)
	must(t, err)
	if len(loose) != 2 {
		t.Errorf("loose: %+v", loose)
	}
	// One that comes to nothing leaves what there is.
	job(t, d, "blue", "app", "j4")
	begin(t, d, "j4")
	must(t, d.EndJob(ctx, "j4", json.RawMessage(`{"message":"no"}`), []LogLine{{Seq: 0, At: time.Now(), Message: "last"}}))
	if err := d.PublishJob(ctx, "j4", 1, Settings{}, json.RawMessage(`{}`), nil); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("published after its end: %v", err)
	}
	if err := d.EndJob(ctx, "j3", json.RawMessage(`{}`), nil); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("ended after it was ready: %v", err)
	}
	if j, err := d.Job(ctx, "j4"); err != nil || j.State != JobError || string(j.Reason) != `{"message":"no"}` || j.FinishedAt.IsZero() || string(j.Plan) != `{"image":"a"}` {
		t.Errorf("%+v, %v", j, err)
	}
	if under, err := d.JobsUnderWay(ctx); err != nil || len(under) != 1 || under[0].ID != "j2" {
		t.Errorf("under way: %+v, %v", under, err)
	}
	// A template that is built stays when its last tag goes, and not otherwise; with it go its jobs.
	job(t, d, "blue", "app", "j5")
	must(t, d.DeleteTemplate(ctx, "blue", Ref{Name: "app"}))
	if _, err := d.Job(ctx, "j5"); !errdefs.IsNotFound(err) {
		t.Errorf("a job without a template: %v", err)
	}
	if err := d.PublishJob(ctx, "j5", 1, Settings{}, json.RawMessage(`{}`), nil); !errdefs.IsNotFound(err) {
		t.Errorf("published without a template: %v", err)
	}
	if lines, err := d.JobLog(ctx, "j1", LogFilter{Limit: 9}); err != nil || len(lines) > 0 {
		t.Errorf("the log of a job that isn't there: %v, %v", lines, err)
	}
}

// TestJobBounds: how many there may be of a team, and how many are remembered.
func TestJobBounds(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	for _, team := range []string{"blue", "green"} {
		_, err := d.CreateKey(ctx, team)
		must(t, err)
	}
	ask := func(team, name string, n int, tags ...string) error {
		if len(tags) == 0 {
			tags = []string{fmt.Sprint("x", n)}
		}
		_, err := d.CreateJob(ctx, JobRequest{ID: fmt.Sprintf("%s-%s-%d", team, name, n), Team: team, Name: name, Template: "t" + team + name, Tags: tags, MaxTemplates: 2, MaxJobs: 3,
			Expired: json.RawMessage(`{"message":"late"}`), Replaced: json.RawMessage(`{"message":"again"}`)})
		return err
	}
	must(t, ask("blue", "a", 0))
	must(t, ask("blue", "b", 0))
	if err := ask("blue", "c", 0); !errdefs.IsResourceExhausted(err) {
		t.Errorf("a third template: %v", err)
	}
	must(t, ask("blue", "a", 1))
	if err := ask("blue", "a", 2); !errdefs.IsResourceExhausted(err) {
		t.Errorf("a fourth build: %v", err)
	}
	must(t, ask("green", "a", 0, "x0", "y"))
	ended := func(id, reason string) {
		t.Helper()
		if j, err := d.Job(ctx, id); err != nil || j.State != JobError || string(j.Reason) != reason || j.FinishedAt.IsZero() {
			t.Errorf("%+v, %v", j, err)
		}
	}
	// Who begins again by the same tag isn't kept from it by what was never started, nor by anybody else's.
	must(t, ask("blue", "a", 3, "y", "x0"))
	ended("blue-a-0", `{"message":"again"}`)
	if j, err := d.Job(ctx, "green-a-0"); err != nil || j.State != JobWaiting {
		t.Errorf("%+v, %v", j, err)
	}
	// Who has said nothing for a day is waited for no longer.
	_, err := d.write.ExecContext(ctx, "UPDATE build_jobs SET created = ? WHERE id = 'blue-a-3'", stamp(time.Now().Add(-25*time.Hour)))
	must(t, err)
	must(t, ask("blue", "a", 2))
	ended("blue-a-3", `{"message":"late"}`)
	// What was started goes on beside another one by its tag.
	begin(t, d, "blue-a-1")
	must(t, d.EndJob(ctx, "blue-a-2", json.RawMessage(`{}`), nil))
	must(t, ask("blue", "a", 2+keepJobs, "x1"))
	must(t, d.PublishJob(ctx, "blue-a-1", 1, Settings{}, json.RawMessage(`{}`), nil))
	// A build that would be kept beside those that are is one template more; one that takes their place isn't.
	if err := ask("blue", "a", 4); !errdefs.IsResourceExhausted(err) {
		t.Errorf("a second build beside the first: %v", err)
	}
	// The newest that are over are remembered, and those that tags stand for.
	for n := 20; n < 20+keepJobs+5; n++ {
		must(t, ask("blue", "a", n, "x1"))
		must(t, d.EndJob(ctx, fmt.Sprintf("blue-a-%d", n), json.RawMessage(`{}`), nil))
	}
	must(t, ask("blue", "a", 5, "x1"))
	must(t, ask("green", "a", 1))
	all, err := d.Builds(ctx, "tbluea")
	must(t, err)
	i := slices.IndexFunc(all, func(b BuildInfo) bool { return b.ID == "blue-a-1" })
	if len(all) != keepJobs+2 || i < 0 { // and the one that waits
		t.Errorf("%d are remembered: %+v", len(all), all)
	}
}

// TestTags: tags of the team's own templates are moved and removed, but for the last.
func TestTags(t *testing.T) {
	d, ctx := fresh(t), t.Context()
	b := build(t, d, "blue", "app")
	build(t, d, "default", "base")
	if got, err := d.AddTags(ctx, "blue", Ref{Name: "app"}, []string{"v1", "v2"}); err != nil || got != b.ID {
		t.Errorf("%s, %v", got, err)
	}
	for _, err := range []error{
		func() error { _, err := d.AddTags(ctx, "blue", Ref{Name: "app", Tag: "v9"}, []string{"x"}); return err }(),
		func() error { _, err := d.AddTags(ctx, "blue", Ref{Name: "base"}, []string{"x"}); return err }(),
		d.RemoveTags(ctx, "default", Ref{Team: "blue", Name: "app"}, []string{"v1"}),
		d.RemoveTags(ctx, "blue", Ref{Name: "app"}, []string{"v1", "v9"}),
		d.SetPublic(ctx, "default", Ref{Team: "blue", Name: "app"}, true),
	} {
		if !errdefs.IsNotFound(err) {
			t.Error(err)
		}
	}
	if err := d.RemoveTags(ctx, "blue", Ref{Name: "app"}, []string{"v1", "v2", DefaultTag}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("all of them: %v", err)
	}
	must(t, d.RemoveTags(ctx, "blue", Ref{Name: "app"}, []string{"v1", DefaultTag}))
	if tags, err := d.Tags(ctx, b.Template); err != nil || len(tags) != 1 || tags[0].Name != "v2" {
		t.Errorf("%+v, %v", tags, err)
	}
	must(t, d.SetPublic(ctx, "blue", Ref{Name: "app"}, true))
	if tpl, err := d.Template(ctx, "default", Ref{Team: "blue", Name: "app"}); err != nil || !tpl.Public {
		t.Errorf("%+v, %v", tpl, err)
	}
	if all, err := d.AllTemplates(ctx); err != nil || len(all) != 2 || all[1].Names[0] != "app" {
		t.Errorf("%+v, %v", all, err)
	}
	for _, bad := range []string{"", "A", "a b", "a/b", "a:b"} {
		if err := ParseTag(bad); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
