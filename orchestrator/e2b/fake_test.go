package e2b

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cubesandbox/cube/orchestrator/builds"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/health"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

const (
	testKey  = "e2b_0123456789abcdef0123456789abcdef01234567"
	otherKey = "e2b_ffffffffffffffffffffffffffffffffffffffff"
	testTeam = "blue"
)

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
