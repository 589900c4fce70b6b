package e2b

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/builds"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/health"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

const (
	testKey  = "e2b_0123456789abcdef0123456789abcdef01234567"
	otherKey = "e2b_ffffffffffffffffffffffffffffffffffffffff"
	testTeam = "blue"
)

// fakeEngine has sandboxes that are nothing but what is told of them.
type fakeEngine struct {
	mu        sync.Mutex
	boxes     map[string]*lifecycle.Sandbox
	snapshots []lifecycle.Snapshot
	made      int
	began     time.Time
	// last is what was asked for last, in words that tests compare.
	last any
	// fails is what everything fails with, unless it is nil.
	fails error
	// hold keeps a create until it is closed, unless it is nil; entered is told of it.
	hold, entered chan struct{}
	// changes are what Watch tells.
	changes chan lifecycle.Change
}

func newFakeEngine() *fakeEngine {
	return &fakeEngine{boxes: map[string]*lifecycle.Sandbox{}, changes: make(chan lifecycle.Change), began: time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)}
}

// asked is called by each method, with the lock held.
func (f *fakeEngine) asked(what string, args ...any) error {
	f.last = strings.TrimSpace(what + " " + fmt.Sprintln(args...))
	return f.fails
}

func (f *fakeEngine) find(team, id string) (*lifecycle.Sandbox, error) {
	if sb := f.boxes[id]; sb != nil && sb.Team == team {
		return sb, nil
	}
	return nil, errdefs.ErrNotFound.WithMessage("sandbox " + id + " not found")
}

func (f *fakeEngine) add(c lifecycle.Create) lifecycle.Sandbox {
	f.made++
	start := f.began.Add(time.Duration(f.made) * time.Second)
	sb := &lifecycle.Sandbox{
		ID: fmt.Sprintf("i%020d", f.made), Team: c.Team, TemplateID: "tplbase", Alias: c.Template, BuildID: "b", State: lifecycle.Running,
		StartedAt: start, EndAt: start.Add(c.Timeout), CPUs: 2, MemoryMB: 1024, DiskMB: 512, Metadata: c.Metadata, Env: c.Env,
		Network: c.Network, AllowInternet: c.AllowInternet, AutoPause: c.AutoPause, AutoPauseMemory: c.AutoPauseMemory,
		AutoResume: c.AutoResume, Secure: c.Secure, EnvdVersion: "0.6.13",
	}
	if c.Secure {
		sb.EnvdToken = "envd-secret"
	}
	if p := c.Network.AllowPublicTraffic; p != nil && !*p {
		sb.TrafficToken = "traffic-secret"
	}
	f.boxes[sb.ID] = sb
	return *sb
}

func (f *fakeEngine) Create(ctx context.Context, c lifecycle.Create) (lifecycle.Sandbox, error) {
	if f.hold != nil {
		f.entered <- struct{}{}
		select {
		case <-f.hold:
		case <-ctx.Done():
			return lifecycle.Sandbox{}, ctx.Err()
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last = c
	if f.fails != nil {
		return lifecycle.Sandbox{}, f.fails
	}
	if c.Template == "nope" {
		return lifecycle.Sandbox{}, db.Ref{Name: c.Template}.NotFound()
	}
	return f.add(c), nil
}

func (f *fakeEngine) Get(_ context.Context, team, id string) (lifecycle.Sandbox, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.asked("get", team, id); err != nil {
		return lifecycle.Sandbox{}, err
	}
	sb, err := f.find(team, id)
	if err != nil {
		return lifecycle.Sandbox{}, err
	}
	return *sb, nil
}

func (f *fakeEngine) List(_ context.Context, team string, l lifecycle.Filter) (page []lifecycle.Sandbox, next lifecycle.Cursor, running int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last = l
	if f.fails != nil {
		return nil, next, 0, f.fails
	}
	var all []lifecycle.Sandbox
	for _, sb := range f.boxes {
		fits := sb.Team == team && slices.Contains(l.States, sb.State.Shown()) && (l.Template == "" || l.Template == sb.Alias || l.Template == sb.TemplateID) && sb.StartedAt.After(l.StartedAfter)
		for k, v := range l.Metadata {
			fits = fits && sb.Metadata[k] == v
		}
		if fits {
			all = append(all, *sb)
			if sb.State.Shown() == lifecycle.Running {
				running++
			}
		}
	}
	order := func(a, b lifecycle.Sandbox) int {
		c := cmp.Or(a.StartedAt.Compare(b.StartedAt), cmp.Compare(a.ID, b.ID))
		if !l.Ascending {
			c = -c
		}
		return c
	}
	slices.SortFunc(all, order)
	for _, sb := range all {
		if l.After != (lifecycle.Cursor{}) && order(sb, lifecycle.Sandbox{ID: l.After.ID, StartedAt: l.After.At}) <= 0 {
			continue
		}
		if len(page) == l.Limit {
			last := page[len(page)-1]
			return page, lifecycle.Cursor{At: last.StartedAt, ID: last.ID}, running, nil
		}
		page = append(page, sb)
	}
	return page, lifecycle.Cursor{}, running, nil
}

// change does something to a sandbox that is there.
func (f *fakeEngine) change(team, id string, how func(*lifecycle.Sandbox) error, what string, args ...any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.asked(what, append([]any{team, id}, args...)...); err != nil {
		return err
	}
	sb, err := f.find(team, id)
	if err != nil {
		return err
	}
	return how(sb)
}

func (f *fakeEngine) Kill(_ context.Context, team, id string) error {
	return f.change(team, id, func(*lifecycle.Sandbox) error { delete(f.boxes, id); return nil }, "kill")
}

func (f *fakeEngine) SetTimeout(_ context.Context, team, id string, d time.Duration) error {
	return f.change(team, id, func(sb *lifecycle.Sandbox) error { sb.EndAt = f.began.Add(d); return nil }, "timeout", d)
}

func (f *fakeEngine) Refresh(_ context.Context, team, id string, d time.Duration) error {
	return f.change(team, id, func(*lifecycle.Sandbox) error { return nil }, "refresh", d)
}

func (f *fakeEngine) Connect(_ context.Context, team, id string, d time.Duration, memory *bool) (sb lifecycle.Sandbox, resumed bool, err error) {
	err = f.change(team, id, func(of *lifecycle.Sandbox) error {
		resumed, of.State = of.State == lifecycle.Paused, lifecycle.Running
		sb = *of
		return nil
	}, "connect", d, word(memory))
	return sb, resumed, err
}

func (f *fakeEngine) Resume(_ context.Context, team, id string, d time.Duration, memory *bool) (sb lifecycle.Sandbox, err error) {
	err = f.change(team, id, func(of *lifecycle.Sandbox) error {
		if of.State != lifecycle.Paused {
			return errdefs.ErrFailedPrecondition.WithMessage("sandbox " + id + " is running already")
		}
		of.State = lifecycle.Running
		sb = *of
		return nil
	}, "resume", d, word(memory))
	return sb, err
}

func (f *fakeEngine) Pause(_ context.Context, team, id string, memory bool) error {
	return f.change(team, id, func(sb *lifecycle.Sandbox) error {
		if sb.State == lifecycle.Paused {
			return errdefs.ErrFailedPrecondition.WithMessage("sandbox " + id + " is paused already")
		}
		sb.State = lifecycle.Paused
		return nil
	}, "pause", memory)
}

// Fork has every third child fail.
func (f *fakeEngine) Fork(_ context.Context, team, id string, d time.Duration, n int) (children []lifecycle.ForkResult, err error) {
	err = f.change(team, id, func(sb *lifecycle.Sandbox) error {
		for i := range n {
			if i%3 == 2 {
				children = append(children, lifecycle.ForkResult{Err: errdefs.ErrResourceExhausted.WithMessage("no memory is left")})
				continue
			}
			children = append(children, lifecycle.ForkResult{Sandbox: f.add(lifecycle.Create{Team: team, Template: sb.Alias, Timeout: d, Secure: sb.Secure})})
		}
		return nil
	}, "fork", d, n)
	return children, err
}

func (f *fakeEngine) Snapshot(_ context.Context, team, id, name string) (s lifecycle.Snapshot, err error) {
	err = f.change(team, id, func(*lifecycle.Sandbox) error {
		s = lifecycle.Snapshot{ID: fmt.Sprintf("tplsnap%d:default", len(f.snapshots)), CreatedAt: f.began.Add(time.Duration(len(f.snapshots)) * time.Second)}
		if name != "" {
			s.ID = team + "/" + name + ":default"
			s.Names = []string{s.ID}
		}
		f.snapshots = append(f.snapshots, s)
		return nil
	}, "snapshot", name)
	return s, err
}

func (f *fakeEngine) Snapshots(_ context.Context, team string, l lifecycle.SnapshotFilter) (page []lifecycle.Snapshot, next lifecycle.Cursor, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last = l
	for _, s := range slices.Backward(f.snapshots) {
		if l.After.ID != "" && !s.CreatedAt.Before(l.After.At) {
			continue
		}
		if len(page) == l.Limit {
			last := page[len(page)-1]
			return page, lifecycle.Cursor{At: last.CreatedAt, ID: last.ID}, f.fails
		}
		page = append(page, s)
	}
	return page, next, f.fails
}

func (f *fakeEngine) DeleteSnapshot(_ context.Context, team, id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.asked("delete snapshot", team, id); err != nil {
		return err
	}
	i := slices.IndexFunc(f.snapshots, func(s lifecycle.Snapshot) bool { return s.ID == id })
	switch {
	case id == "base":
		return errdefs.ErrInvalidArgument.WithMessage("sandboxes are made of it")
	case i < 0:
		return errdefs.ErrNotFound.WithMessage("template '" + id + "' not found")
	}
	f.snapshots = slices.Delete(f.snapshots, i, i+1)
	return nil
}

func (f *fakeEngine) UpdateNetwork(_ context.Context, team, id string, n lifecycle.Network, allow *bool) error {
	return f.change(team, id, func(sb *lifecycle.Sandbox) error {
		sb.Network.AllowOut, sb.Network.DenyOut, sb.AllowInternet = n.AllowOut, n.DenyOut, allow
		return nil
	}, "network", n.AllowOut, n.DenyOut, word(allow))
}

func (f *fakeEngine) Rollback(_ context.Context, team, id, snapshot string) error {
	return f.change(team, id, func(*lifecycle.Sandbox) error { return nil }, "rollback", snapshot)
}

func (f *fakeEngine) InitAgain(_ context.Context, team, id string, env map[string]string, request string) error {
	return f.change(team, id, func(sb *lifecycle.Sandbox) error { sb.Env = env; return nil }, "init", env, request)
}

// Exec says what it is told and what the sandbox has been, and does what the command's first word is: fail, end, hang.
func (f *fakeEngine) Exec(ctx context.Context, team, id, line string, out func(lifecycle.Output)) (exit lifecycle.Exit, err error) {
	var env map[string]string
	if err := f.change(team, id, func(sb *lifecycle.Sandbox) error { env = sb.Env; return nil }, "exec", line); err != nil {
		return exit, err
	}
	out(lifecycle.Output{Bytes: fmt.Appendf(nil, "%s %v", line, env)})
	out(lifecycle.Output{Stderr: true, Bytes: []byte("warned\n")})
	switch what, _, _ := strings.Cut(line, " "); what {
	case "fail":
		return lifecycle.Exit{Code: 3, Status: "exit status 3"}, nil
	case "end":
		return exit, errdefs.ErrUnavailable.WithMessage("the machine has ended")
	case "hang":
		<-ctx.Done()
		return exit, context.Cause(ctx)
	}
	return exit, nil
}

func (f *fakeEngine) Metrics(_ context.Context, team, id string, from, to time.Time) (all []lifecycle.Metric, err error) {
	err = f.change(team, id, func(*lifecycle.Sandbox) error {
		for i := range 3 {
			all = append(all, lifecycle.Metric{At: f.began.Add(time.Duration(i) * 5 * time.Second), CPUs: 2, CPUUsedPercent: 12.5, MemUsed: 100, MemTotal: 1 << 30, DiskUsed: 5, DiskTotal: 1 << 33})
		}
		return nil
	}, "metrics", from.Unix(), to.Unix())
	return all, err
}

func (f *fakeEngine) Logs(_ context.Context, team, id string, q lifecycle.LogQuery) (all []lifecycle.LogEntry, err error) {
	err = f.change(team, id, func(*lifecycle.Sandbox) error {
		all = []lifecycle.LogEntry{{At: f.began, Message: "it is \"up\"", Level: lifecycle.Info, Fields: map[string]string{"pid": "7"}}, {At: f.began, Message: "hm", Level: lifecycle.Warn}}
		return nil
	}, "logs", q.From.UnixMilli(), q.Backward, q.Limit, q.Level, q.Search)
	return all, err
}

// FollowLog has what Logs has, and then ends with follow when changes is closed.
func (f *fakeEngine) FollowLog(ctx context.Context, team, id string, from lifecycle.LogStart, follow bool, each func(lifecycle.LogEntry) error) error {
	all, err := f.Logs(ctx, team, id, lifecycle.LogQuery{Limit: from.Tail})
	if err != nil {
		return err
	}
	for i, e := range all {
		if e.Place = fmt.Sprint("place-", i); e.Place <= from.After {
			continue
		}
		if err := each(e); err != nil {
			return err
		}
	}
	if follow {
		<-f.changes
	}
	return ctx.Err()
}

// Capacity has room for as many of a shape as that has vCPUs.
func (f *fakeEngine) Capacity(team string, shapes []admission.Shape) (lifecycle.Capacity, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.asked("capacity", team, shapes); err != nil {
		return lifecycle.Capacity{}, err
	}
	c := lifecycle.Capacity{
		Reading:  admission.Reading{CPUs: 4, MemoryTotal: 1000, MemoryAvailable: 400, DiskTotal: 2000, DiskFree: 1500, Pressure: admission.Pressure{CPU: 12.5, Known: true}},
		CPUsUsed: 1.5, Total: admission.Amount{MilliCPU: 4000, Memory: 900, Disk: 2000}, Reserved: admission.Amount{MilliCPU: 3500, Memory: 100, Disk: 50},
		Spare: admission.Amount{MilliCPU: 500, Memory: 10, Disk: 5}, Running: 7, Paused: 3,
		Use: admission.Use{Running: 2, Paused: 1, VCPUs: 4, Memory: 60, Disk: 30}, Limits: config.Limits{Running: 5},
	}
	for _, s := range shapes {
		c.Rooms = append(c.Rooms, lifecycle.Room{Reserved: admission.Amount{MilliCPU: 250, Memory: 96, Disk: 8}, Count: s.VCPUs, Short: admission.ReasonCPU})
	}
	return c, nil
}

// Watch tells of what is sent to changes, after all that there is.
func (f *fakeEngine) Watch(ctx context.Context, team string, each func(lifecycle.Change) error) error {
	f.mu.Lock()
	c := lifecycle.Change{Full: true}
	for _, sb := range f.boxes {
		if sb.Team == team {
			c.Sandboxes = append(c.Sandboxes, *sb)
		}
	}
	err := f.asked("watch", team)
	f.mu.Unlock()
	for err == nil {
		if err = each(c); err != nil {
			break
		}
		select {
		case c = <-f.changes:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	return err
}

func word(b *bool) string {
	if b == nil {
		return "-"
	}
	return fmt.Sprint(*b)
}

// fakeKeys knows two.
type fakeKeys struct {
	fails   error
	revoked atomic.Bool
}

func (k *fakeKeys) Authenticate(_ context.Context, key string) (team, id string, err error) {
	switch {
	case k.fails != nil:
		return "", "", k.fails
	case k.revoked.Load():
		return "", "", errdefs.ErrUnauthenticated.WithMessage("the API key is revoked")
	case key == testKey:
		return testTeam, "key-blue", nil
	case key == otherKey:
		return "green", "key-green", nil
	}
	return "", "", errdefs.ErrUnauthenticated.WithMessage("the API key is not valid")
}

// fakeTemplates are three of the team, each with as many builds as its number.
type fakeTemplates struct{}

func fakeTemplate(i int) db.Template {
	at := time.Date(2026, 1, i, 0, 0, 0, 0, time.UTC)
	return db.Template{ID: fmt.Sprintf("tpl%d", i), Team: testTeam, Names: []string{fmt.Sprintf("name%d", i)}, CreatedAt: at, UpdatedAt: at, Builds: i}
}

func (fakeTemplates) Template(_ context.Context, team string, r db.Ref) (db.Template, error) {
	for i := 1; i <= 3; i++ {
		if t := fakeTemplate(i); team == testTeam && (r.Name == t.ID || r.Name == t.Names[0]) {
			return t, nil
		}
	}
	return db.Template{}, r.NotFound()
}

func (fakeTemplates) Templates(_ context.Context, team string, p db.Page) (page []db.Template, _ error) {
	for i := 3; i > 0 && team == testTeam; i-- {
		if t := fakeTemplate(i); len(page) < p.Limit && (p.After.IsZero() || t.CreatedAt.Before(p.After)) {
			page = append(page, t)
		}
	}
	return page, nil
}

func (fakeTemplates) Builds(_ context.Context, id string) (all []db.BuildInfo, _ error) {
	for i := int(id[3] - '0'); i > 0; i-- {
		at := time.Date(2026, 2, 1, i, 0, 0, 0, time.UTC)
		all = append(all, db.BuildInfo{ID: fmt.Sprintf("00000000-0000-4000-8000-00000000000%d", i), State: db.JobReady, CreatedAt: at, UpdatedAt: at, FinishedAt: at, CPUs: 2, MemoryMB: 512, DiskMB: 1024, EnvdVersion: "0.6.13"})
	}
	return all, nil
}

func (fakeTemplates) Tags(context.Context, string) ([]db.Tag, error) {
	return []db.Tag{{Name: "default", Build: "00000000-0000-4000-8000-000000000001", AssignedAt: time.Unix(0, 0)}}, nil
}

// fakeBuilds only knows the engine's snapshots.
type fakeBuilds struct {
	Builds
	*fakeEngine
}

func (f fakeBuilds) Delete(ctx context.Context, team, id string) error {
	return f.DeleteSnapshot(ctx, team, id)
}

func (f fakeBuilds) Create(context.Context, builds.Request) (builds.Created, error) {
	return builds.Created{}, f.note("create build")
}
func (f fakeBuilds) Start(context.Context, string, db.Ref, string, builds.Plan, *templates.Registry) error {
	return f.note("start build")
}
func (f fakeBuilds) SetPublic(context.Context, string, db.Ref, bool) (db.Template, error) {
	return db.Template{}, f.note("publish")
}
func (f fakeBuilds) AddTags(context.Context, string, db.Ref, []string) (string, error) {
	return "", f.note("tag")
}
func (f fakeBuilds) RemoveTags(context.Context, string, db.Ref, []string) error {
	return f.note("untag")
}

func (f fakeBuilds) note(what string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked(what)
}

// newTestServer makes a server of fakes, whose log goes to the test's, and to log unless that is nil.
func newTestServer(t testing.TB, change func(*Options)) (*Server, *fakeEngine) {
	engine := newFakeEngine()
	o := Options{
		Domain:     "sandbox.localhost:3002",
		MaxTimeout: 24 * time.Hour, MaxBatch: 1000,
		Ready: func(context.Context) health.Report {
			return health.Report{Dependencies: []health.Dependency{{Name: "containerd", State: health.Starting, Reason: "it doesn't answer"}}}
		},
		Awaited: func() string { return "containerd" },
		Metrics: prometheus.NewRegistry(), MetricsFrom: loopback,
		MaxConnections: 100,
		Log:            slog.New(slog.DiscardHandler),
		Timeout:        func(d time.Duration) time.Duration { return d },
	}
	if change != nil {
		change(&o)
	}
	s := New(o)
	s.Open(engine, &fakeKeys{}, fakeTemplates{}, fakeBuilds{fakeEngine: engine})
	return s, engine
}
