package builds

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// engine owns snapshots that are nothing but rows.
type engine struct {
	db   *db.DB
	mu   sync.Mutex
	kept int // builds that must stay
}

func (e *engine) Ready() error { return nil }

func (e *engine) keep() func() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.kept++
	return sync.OnceFunc(func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.kept--
	})
}

func (e *engine) Begin(ctx context.Context, b db.Build) (string, func(), error) {
	b.Snapshot = "of-" + b.ID
	return b.Snapshot, e.keep(), e.db.BeginBuild(ctx, b)
}

func (e *engine) Keep(ctx context.Context, build string) (func(), error) {
	_, err := e.db.Build(ctx, build)
	return e.keep(), err
}

// Snapshot makes one of a sandbox called box; by a name, for a build that has it written down.
func (e *engine) Snapshot(ctx context.Context, team, id, name string) (lifecycle.Snapshot, error) {
	if id != "box" {
		return lifecycle.Snapshot{}, errdefs.ErrNotFound.WithMessage("sandbox '" + id + "' not found")
	}
	jobs, err := e.db.JobsUnderWay(ctx)
	if err != nil || name != "" && !slices.ContainsFunc(jobs, func(j db.Job) bool { return strings.Contains(string(j.Plan), name) }) {
		return lifecycle.Snapshot{}, fmt.Errorf("no build knows of the snapshot %s: %v", name, err)
	}
	b := db.Build{ID: "of-box", Team: team, Snapshot: "of-box", Origin: id, CPUs: 1, MemoryMB: 128}
	if err := e.db.BeginBuild(ctx, b); err != nil {
		return lifecycle.Snapshot{}, err
	}
	t, err := e.db.Publish(ctx, db.Publication{Build: b.ID, Team: team, Name: name, Template: "tbox", Tag: db.DefaultTag, Snapshot: true})
	return lifecycle.Snapshot{ID: t + ":" + db.DefaultTag}, err
}

func (e *engine) DeleteSnapshot(ctx context.Context, team, id string) error {
	ref, err := db.ParseRef(id)
	if err != nil {
		return err
	}
	return e.db.DeleteTemplate(ctx, team, ref)
}

func (e *engine) Tidy() {}

func (e *engine) SignUpload(to string) string { return "signed " + to }

// maker makes what tests tell it to: each of its builds waits for its outcome, by the image.
type maker struct {
	mu    sync.Mutex
	turns []string // images, in the order in which they have had their turn
	going map[string]chan func(tell templates.Report) error
}

func (m *maker) of(image string) chan func(tell templates.Report) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.going == nil {
		m.going = map[string]chan func(templates.Report) error{}
	}
	if m.going[image] == nil {
		m.going[image] = make(chan func(templates.Report) error)
	}
	return m.going[image]
}

func (m *maker) Make(ctx context.Context, r templates.Recipe, _ templates.Files, tell templates.Report, snapshot string) (templates.Made, error) {
	m.mu.Lock()
	m.turns = append(m.turns, r.Image)
	m.mu.Unlock()
	select {
	case f := <-m.of(r.Image):
		return templates.Made{DiskMB: r.DiskMB, Builder: "v1", Digest: "d-" + r.Image, Settings: db.Settings{EnvdVersion: "1"}}, f(tell)
	case <-ctx.Done():
		return templates.Made{}, fmt.Errorf("it was given up: %w", context.Cause(ctx))
	}
}

func (m *maker) had() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return strings.Join(m.turns, " ")
}

func fine(templates.Report) error { return nil }

// stand is a service on a database that outlives it.
type stand struct {
	*Service
	t      *testing.T
	dir    string
	engine *engine
	maker  *maker
}

func newStand(t *testing.T) *stand {
	s := &stand{t: t, dir: t.TempDir()}
	d, err := db.Open(t.Context(), filepath.Join(s.dir, "cube.db"))
	s.must(err)
	t.Cleanup(func() { d.Close() })
	for _, team := range []string{"blue", "green"} {
		_, err := d.CreateKey(t.Context(), team)
		s.must(err)
	}
	s.engine = &engine{db: d}
	s.boot()
	t.Cleanup(func() { s.Close() })
	return s
}

// boot has a service go on with what the one before has left.
func (s *stand) boot() {
	s.maker = &maker{}
	u, err := OpenUploads(filepath.Join(s.dir, "uploads"), 1<<20, 4<<20)
	s.must(err)
	s.Service = New(s.engine.db, s.engine, s.maker, u, Options{
		Log: slog.New(slog.DiscardHandler), Audit: audit.Nowhere{}, Timeout: func(d time.Duration) time.Duration { return d }, Concurrency: 2, Limits: &config.Limits{}, DiskMB: 512, Version: "v1",
		Digest: func(_ context.Context, image string) (string, error) {
			if image == "unknown" {
				return "", errdefs.ErrNotFound
			}
			return "d-" + image, nil
		},
	})
	s.must(s.Open(s.t.Context()))
}

func (s *stand) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// begin has a build of an image begin, or be of that template if it has a colon at the end.
func (s *stand) begin(team, name string, plan Plan) Created {
	s.t.Helper()
	c, err := s.Create(s.t.Context(), Request{Team: team, Name: name, CPUs: 2, MemoryMB: 512})
	s.must(err)
	s.must(s.Start(s.t.Context(), team, db.Ref{Name: c.Template}, c.Build, plan, nil))
	return c
}

// let has a build of an image, whose turn it is or will be soon, come to that end.
func (s *stand) let(image string, end func(templates.Report) error) {
	s.t.Helper()
	select {
	case s.maker.of(image) <- end:
	case <-time.After(20 * time.Second):
		s.t.Fatalf("a build of %q hasn't had its turn", image)
	}
}

func (s *stand) state(c Created) Build {
	s.t.Helper()
	j, err := s.db.Job(s.t.Context(), c.Build)
	s.must(err)
	b, err := buildOf(j)
	s.must(err)
	return b
}

// ended waits for the end of a build, with all that it has told.
func (s *stand) ended(c Created) (Build, []Line) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 20*time.Second)
	defer cancel()
	var all []Line
	for {
		b, lines, err := s.Follow(ctx, c.Build, len(all), 1000)
		s.must(err)
		all = append(all, lines...)
		if !b.FinishedAt.IsZero() && len(lines) < 1000 {
			return b, all
		}
	}
}

// TestTurns: so many builds go on at once, and no team keeps the others from theirs.
func TestTurns(t *testing.T) {
	s := newStand(t)
	a := s.begin("blue", "a", Plan{Image: "a"})
	b := s.begin("blue", "b", Plan{Image: "b"})
	c := s.begin("blue", "c", Plan{Image: "c"})
	d := s.begin("green", "d", Plan{Image: "d"})
	s.let("a", fine)
	if got, _ := s.ended(a); got.State != db.JobReady || got.Product.Digest != "d-a" {
		t.Errorf("%+v", got)
	}
	s.let("d", fine) // which has come last, of a team of which none was going on
	s.ended(d)
	s.let("c", fine)
	s.ended(c)
	s.let("b", fine)
	s.ended(b)
	if got := s.maker.had(); !strings.HasSuffix(got, "d c") {
		t.Errorf("they had their turns as %s", got)
	}
	if s.engine.kept != 0 {
		t.Errorf("%d builds are still kept", s.engine.kept)
	}
	metrics := prometheus.NewPedanticRegistry()
	s.must(metrics.Register(s))
	if all, err := metrics.Gather(); err != nil || len(all) != 2 || all[0].Metric[0].GetHistogram().GetSampleCount() != 4 {
		t.Errorf("%v, %v", all, err)
	}
	if loose, err := s.db.Loose(t.Context()); err != nil || len(loose) > 0 {
		t.Errorf("%+v, %v", loose, err)
	}
}

// TestReasons: what a build has failed of is told as far as it is the user's to know.
func TestReasons(t *testing.T) {
	s := newStand(t)
	for name, c := range map[string]struct {
		err  error
		want Reason
	}{
		"step":     {fmt.Errorf("make: %w", &templates.Failure{Step: "3", What: "RUN x", Last: []string{"a", "b"}, Err: errors.New("exit status 1")}), Reason{Message: "step 3: RUN x: exit status 1; the end of its output: a | b", Step: "3", Last: []string{"a", "b"}}},
		"class":    {errdefs.ErrNotFound.WithMessage("there is no image"), Reason{Message: "there is no image", Step: "base"}},
		"internal": {errors.New("open /secret/place: permission denied"), Reason{Message: "internal error: the log of cube up has it under build "}},
	} {
		b := s.begin("blue", name, Plan{Image: name})
		s.let(name, func(tell templates.Report) error { tell("1", lifecycle.Info, "one\ntwo"); return c.err })
		got, lines := s.ended(b)
		if got.State != db.JobError || got.Reason == nil || !strings.HasPrefix(got.Reason.Message, c.want.Message) || got.Reason.Step != c.want.Step || strings.Join(got.Reason.Last, ",") != strings.Join(c.want.Last, ",") {
			t.Errorf("%s: %+v", name, got.Reason)
		}
		if len(lines) != 2 || lines[1].Message != "two" || lines[1].Step != "1" {
			t.Errorf("%s: %+v", name, lines)
		}
	}
	if s.engine.kept != 0 {
		t.Errorf("%d builds are still kept", s.engine.kept)
	}
}

// TestCancel: in each state a build can be given up, and with its template.
func TestCancel(t *testing.T) {
	s, ctx := newStand(t), t.Context()
	waits, err := s.Create(ctx, Request{Team: "blue", Name: "waits"})
	s.must(err)
	a, b := s.begin("blue", "a", Plan{Image: "a"}), s.begin("blue", "b", Plan{Image: "b"})
	queued, gone := s.begin("blue", "queued", Plan{Image: "queued"}), s.begin("blue", "gone", Plan{Image: "gone"})
	s.must(s.Delete(ctx, "blue", "gone"))
	for _, c := range []Created{waits, queued, a} {
		s.must(s.Cancel(ctx, c.Build))
		if got := s.state(c); got.State != db.JobError || got.Reason.Message != canceled {
			t.Errorf("%s: %+v %+v", c.Name, got, got.Reason)
		}
		if err := s.Cancel(ctx, c.Build); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s again: %v", c.Name, err)
		}
	}
	if err := s.Cancel(ctx, "none"); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	s.must(s.Delete(ctx, "blue", "b"))
	s.Close()
	if strings.Contains(s.maker.had(), "queued") || strings.Contains(s.maker.had(), "gone") || s.engine.kept != 0 {
		t.Errorf("%s had their turn, %d are kept", s.maker.had(), s.engine.kept)
	}
	if _, err := s.db.Job(ctx, b.Build); !errdefs.IsNotFound(err) {
		t.Errorf("of a template that is no more: %v", err)
	}
	_ = gone
}

// TestRestart: what was going on has come to nothing, what was waiting for its turn has it, and a password that nobody has any more
// is said to be missing.
func TestRestart(t *testing.T) {
	for _, killed := range []bool{false, true} {
		s, ctx := newStand(t), t.Context()
		a, b := s.begin("blue", "a", Plan{Image: "a"}), s.begin("blue", "b", Plan{Image: "b"})
		queued := s.begin("blue", "queued", Plan{Image: "queued"})
		secret, err := s.Create(ctx, Request{Team: "blue", Name: "secret"})
		s.must(err)
		s.must(s.Start(ctx, "blue", db.Ref{Name: "secret"}, secret.Build, Plan{Image: "secret"}, &templates.Registry{User: "u", Password: "hidden"}))
		waits, err := s.Create(ctx, Request{Team: "blue", Name: "waits"})
		s.must(err)
		if j, err := s.db.Job(ctx, secret.Build); err != nil || strings.Contains(string(j.Plan), "hidden") {
			t.Errorf("%s, %v", j.Plan, err)
		}
		for s.maker.had() != "a b" && s.maker.had() != "b a" {
			time.Sleep(time.Millisecond)
		}
		if killed { // what the service does in the end isn't written
			was := s.engine.db
			d, err := db.Open(ctx, filepath.Join(s.dir, "cube.db"))
			s.must(err)
			t.Cleanup(func() { d.Close() })
			s.must(was.Close())
			s.Close()
			s.engine.db, s.engine.kept = d, 0
		} else {
			s.Close()
		}
		s.boot()
		for _, c := range []Created{a, b, secret} {
			if got := s.state(c); got.State != db.JobError || got.Reason.Message != interrupted {
				t.Errorf("killed %v: %s: %+v %+v", killed, c.Name, got, got.Reason)
			}
		}
		if got := s.state(waits); got.State != db.JobWaiting {
			t.Errorf("%+v", got)
		}
		s.let("queued", fine)
		if got, _ := s.ended(queued); got.State != db.JobReady {
			t.Errorf("%+v %+v", got, got.Reason)
		}
		s.Close()
	}
}

// TestLog: a build that tells too much is bounded, and what it has told is told once.
func TestLog(t *testing.T) {
	s := newStand(t)
	b := s.begin("blue", "a", Plan{Image: "a"})
	s.maker.of("a") <- func(tell templates.Report) error {
		tell("1", lifecycle.Warn, strings.Repeat("x", 10*maxLine))
		tell("1", lifecycle.Info, "a\x00\xff\n")
		for i := range maxLines {
			tell("2", lifecycle.Info, fmt.Sprint(i))
		}
		return nil
	}
	got, lines := s.ended(b)
	last := lines[len(lines)-1]
	if got.State != db.JobReady || len(lines) != maxLines+1 || len(lines[0].Message) > maxLine+3 || lines[1].Message != "a\ufffd\ufffd" || lines[3].Message != "1" || !strings.HasPrefix(last.Message, "2 more lines were not kept") {
		t.Errorf("%+v: %d lines, the last is %+v", got, len(lines), last)
	}
	b = s.begin("blue", "a", Plan{Image: "a"})
	s.maker.of("a") <- func(tell templates.Report) error {
		for range 200 {
			tell("1", lifecycle.Info, strings.Repeat("x", maxLine))
		}
		return nil
	}
	if _, lines = s.ended(b); len(lines) != maxBytes/maxLine+1 {
		t.Errorf("%d lines", len(lines))
	}
}

// TestRebuild: another build is of the same, and only of what is outdated if that is asked for.
func TestRebuild(t *testing.T) {
	s, ctx := newStand(t), t.Context()
	of := db.Ref{Name: "a"}
	if _, err := s.Rebuild(ctx, "blue", of, false); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	a := s.begin("blue", "a", Plan{Image: "a", Run: "serve", Ready: "true"})
	s.let("a", fine)
	s.ended(a)
	child := s.begin("blue", "child", Plan{Template: "a"})
	s.let("", fine)
	if got, _ := s.ended(child); got.Product.Base != a.Build {
		t.Errorf("%+v", got.Product)
	}
	for _, name := range []string{"a", "child"} {
		if c, err := s.Rebuild(ctx, "blue", db.Ref{Name: name}, true); err != nil || c.Build != "" {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
	}
	again, err := s.Rebuild(ctx, "blue", of, false)
	s.must(err)
	s.let("a", fine)
	if got, _ := s.ended(again); got.State != db.JobReady || got.Plan.Run != "serve" || again.Template != a.Template || got.CPUs != 2 || got.MemoryMB != 512 {
		t.Errorf("%+v", got)
	}
	// A tag that is another build's by now stays that one's.
	old, err := s.Create(ctx, Request{Team: "blue", Name: "b:v1", Tags: []string{"latest"}})
	s.must(err)
	s.must(s.Start(ctx, "blue", db.Ref{Name: "b"}, old.Build, Plan{Image: "b"}, nil))
	s.let("b", fine)
	s.ended(old)
	s.must(s.RemoveTags(ctx, "blue", db.Ref{Name: "b"}, []string{"latest"}))
	if c, err := s.Rebuild(ctx, "blue", db.Ref{Name: "b", Tag: "v1"}, false); err != nil || strings.Join(c.Tags, " ") != "v1" {
		t.Errorf("%+v, %v", c, err)
	}
	s.must(s.Delete(ctx, "blue", "b"))
	tell := func() map[string]string {
		all, err := s.Templates(ctx)
		s.must(err)
		why := map[string]string{}
		for _, one := range all {
			for _, b := range one.Builds {
				w, err := s.Outdated(ctx, b)
				s.must(err)
				if b.ID == one.Tags[0].Build {
					why[one.Names[0]] = w
				}
			}
		}
		return why
	}
	if why := tell(); why["a"] != "" || why["child"] != "template a has another build since" {
		t.Errorf("%q", why)
	}
	s.Version = "v2"
	if why := tell(); why["a"] != "it was made by v1, and this is v2" {
		t.Errorf("%q", why)
	}
	if c, err := s.Rebuild(ctx, "blue", of, true); err != nil || c.Build == "" {
		t.Errorf("%+v, %v", c, err)
	} else {
		s.must(s.Cancel(ctx, c.Build))
	}
	s.Version = "v1"
	s.Digest = func(context.Context, string) (string, error) { return "another", nil }
	if why := tell(); why["a"] != "image a is another one since" {
		t.Errorf("%q", why)
	}
}

// TestOfSandbox: the snapshot that a template is made of is there for that alone, however that ends.
func TestOfSandbox(t *testing.T) {
	for _, end := range []string{"ready", "failed", "canceled", "queued", "interrupted", "killed"} {
		s, ctx := newStand(t), t.Context()
		if _, err := s.OfSandbox(ctx, Request{Team: "blue", Name: "none"}, "none"); !errdefs.IsNotFound(err) {
			t.Error(err)
		}
		if end == "queued" {
			s.begin("blue", "a", Plan{Image: "a"})
			s.begin("blue", "b", Plan{Image: "b"})
		}
		ask := s.OfSandbox
		if end == "killed" { // before the build could be started
			ask = func(ctx context.Context, r Request, sandbox string) (Created, error) {
				c, err := s.Create(ctx, r)
				plan := Plan{Template: "saved", Sandbox: sandbox}
				s.must(err)
				s.must(s.db.MoveJob(ctx, c.Build, db.JobWaiting, db.JobWaiting, plan.encode()))
				_, err = s.engine.Snapshot(ctx, r.Team, sandbox, plan.Template)
				return c, err
			}
		}
		c, err := ask(ctx, Request{Team: "blue", Name: "app"}, "box")
		s.must(err)
		switch end {
		case "ready":
			s.let("", fine)
		case "failed":
			s.let("", func(templates.Report) error { return errors.New("it broke") })
		case "canceled", "queued":
			s.must(s.Cancel(ctx, c.Build))
		}
		if end != "interrupted" && end != "killed" {
			s.ended(c)
		}
		s.Close()
		s.boot()
		if b := s.state(c); (b.State == db.JobReady) != (end == "ready") || b.Plan.Sandbox != "box" {
			t.Errorf("%s: %+v", end, b)
		}
		if _, _, err := s.db.Resolve(ctx, "blue", db.Ref{Name: "tbox"}); !errdefs.IsNotFound(err) {
			t.Errorf("%s: its snapshot is still there: %v", end, err)
		}
		if _, err := s.Rebuild(ctx, "blue", db.Ref{Name: "app"}, false); end == "ready" && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", end, err)
		}
		s.Close()
	}
}

// TestDeadline: a build that takes too long is given up, and says so.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t)
		b := s.begin("blue", "a", Plan{Image: "a"})
		time.Sleep(buildTimeout + time.Second)
		synctest.Wait()
		if got := s.state(b); got.State != db.JobError || got.Reason.Message != "not done within 1h0m0s" {
			t.Errorf("%+v %+v", got, got.Reason)
		}
		s.Close()
	})
}
