package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/builds"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/health"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// machines are what sandboxes are made of, as far as the engine sees: the only thing that isn't real here, with guests.
type machines struct {
	mu    sync.Mutex
	all   map[string]lifecycle.Seen
	next  byte
	forks int // that are still made of snapshots, if short
	short bool
}

func (m *machines) Create(_ context.Context, w lifecycle.Machine) (netip.Addr, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.short && w.Snapshot != "base" {
		if m.forks--; m.forks < 0 {
			return netip.Addr{}, errdefs.ErrResourceExhausted.WithMessage("memory: 1 GiB is short")
		}
	}
	return m.runs(w.ID), nil
}

func (m *machines) Begin(_ context.Context, b lifecycle.Beginning) (netip.Addr, json.RawMessage, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.runs(b.ID), json.RawMessage(`{}`), nil
}

func (m *machines) runs(id string) netip.Addr {
	m.next++
	addr := netip.AddrFrom4([4]byte{10, 200, 0, m.next})
	m.all[id] = lifecycle.Seen{State: lifecycle.Runs, Addr: addr}
	return addr
}

func (m *machines) Pause(_ context.Context, id string, _ bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.all[id] = lifecycle.Seen{State: lifecycle.Still}
	return nil
}

func (m *machines) Resume(_ context.Context, id string, _ bool) (netip.Addr, string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.runs(id), "", nil
}

func (m *machines) Kill(_ context.Context, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.all, id)
	return nil
}

func (m *machines) Look(_ context.Context, id string) (lifecycle.Seen, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.all[id], nil
}

func (m *machines) All(context.Context) (map[string]lifecycle.Seen, error) { return nil, nil }

func (m *machines) Watch(ctx context.Context, ready func(), _ func(string)) error {
	ready()
	<-ctx.Done()
	return ctx.Err()
}

func (*machines) Save(context.Context, string, string) error                       { return nil }
func (*machines) Sweep(context.Context) error                                      { return nil }
func (*machines) Hold(context.Context, string) error                               { return nil }
func (*machines) Release(context.Context, string) error                            { return nil }
func (*machines) Rollback(context.Context, string, string) error                   { return nil }
func (*machines) Forget(context.Context, string) error                             { return nil }
func (*machines) SetNetwork(context.Context, string, lifecycle.Egress) error       { return nil }
func (*machines) Traffic(context.Context, string) (t lifecycle.Traffic, err error) { return t, nil }

func (*machines) Use(context.Context) (map[string]lifecycle.HostUse, error) { return nil, nil }

func (*machines) FollowLog(context.Context, string, lifecycle.LogStart, <-chan struct{}, func(lifecycle.LogEntry) error) error {
	return nil
}

func (*machines) Log(context.Context, string, lifecycle.LogQuery) ([]lifecycle.LogEntry, error) {
	return []lifecycle.LogEntry{{At: time.Now(), Message: "hello", Level: lifecycle.Info}}, nil
}

type guests struct{}

func (guests) Init(context.Context, netip.Addr, lifecycle.Init) error { return nil }
func (guests) Line(context.Context, netip.Addr) (lifecycle.Line, error) {
	return nil, errdefs.ErrNotImplemented // there is no pool
}
func (guests) Hook(context.Context, netip.Addr, db.Hook, string, lifecycle.HookBody) error {
	return nil
}
func (guests) Start(context.Context, netip.Addr, string, string) error { return nil }
func (guests) Exec(_ context.Context, _ netip.Addr, _, line string, out func(lifecycle.Output)) (lifecycle.Exit, error) {
	out(lifecycle.Output{Bytes: []byte(line)})
	return lifecycle.Exit{}, nil
}

func (guests) Version(context.Context, netip.Addr) (string, error) { return "0.6.13", nil }
func (guests) Metrics(context.Context, netip.Addr, string) (lifecycle.Metric, error) {
	return lifecycle.Metric{At: time.Now(), CPUs: 2, CPUUsedPercent: 12.5, MemTotal: 1 << 30}, nil
}

// whole is the API with its engine and database, with a template base and another one, name1. Keys are of the teams blue and
// green.
type whole struct {
	http.Handler
	machines    *machines
	builder     *builder
	builds      *builds.Service
	blue, green string
	stop        func() // the engine
}

func newWhole(t *testing.T) *whole {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	d, err := db.Open(t.Context(), filepath.Join(dir, "cube.db"))
	must(err)
	t.Cleanup(func() { d.Close() })
	w := &whole{machines: &machines{all: map[string]lifecycle.Seen{}}}
	w.blue, err = d.CreateKey(t.Context(), "blue")
	must(err)
	w.green, err = d.CreateKey(t.Context(), "green")
	must(err)
	_, err = d.CreateKey(t.Context(), db.DefaultTeam)
	must(err)
	for name, team := range map[string]string{"base": db.DefaultTeam, "name1": "blue"} {
		must(d.BeginBuild(t.Context(), db.Build{ID: "build-" + name, Snapshot: name, CreatedAt: time.Now(), CPUs: 2, MemoryMB: 1024, DiskMB: 512, Settings: db.Settings{EnvdVersion: "0.6.13"}}))
		_, err = d.Publish(t.Context(), db.Publication{Build: "build-" + name, Team: team, Name: name, Template: "tpl" + name, Tag: db.DefaultTag, Public: team == db.DefaultTeam})
		must(err)
	}
	log := slog.New(slog.DiscardHandler)
	e, err := lifecycle.New(t.Context(), d, w.machines, guests{}, filepath.Join(dir, "seed"),
		lifecycle.Options{Log: log, MaxTimeout: 24 * time.Hour, Host: roomy{}})
	must(err)
	must(e.Open(t.Context()))
	w.stop = sync.OnceFunc(e.Close)
	t.Cleanup(w.stop)
	s := New(Options{
		Domain: "sandbox.localhost:3002", MaxTimeout: 24 * time.Hour, MaxBatch: 1000, Metrics: prometheus.NewRegistry(), MetricsFrom: loopback, Log: log,
		Ready:   func(context.Context) health.Report { return health.Report{Ready: true} },
		Timeout: func(d time.Duration) time.Duration { return d },
	})
	uploads, err := builds.OpenUploads(filepath.Join(dir, "uploads"), 64<<10, 256<<10)
	must(err)
	w.builder = &builder{}
	w.builds = builds.New(d, e, w.builder, uploads, builds.Options{
		Log: log, Audit: audit.Nowhere{}, Timeout: func(d time.Duration) time.Duration { return d }, Concurrency: 1, Limits: &config.Limits{Templates: 5, Builds: 3}, MaxCPUs: 16, MaxMemoryMB: 8192, DiskMB: 512, Version: "test",
		Digest: func(context.Context, string) (string, error) { return "sha256:one", nil },
	})
	must(w.builds.Open(t.Context()))
	t.Cleanup(w.builds.Close)
	s.Open(e, d, d, w.builds)
	w.Handler = s.Handler()
	return w
}

// roomy is a host that has room for anything.
type roomy struct{}

func (roomy) Read() (admission.Reading, error) {
	return admission.Reading{CPUs: 1 << 10, MemoryTotal: 1 << 40, MemoryAvailable: 1 << 40, DiskTotal: 1 << 40, DiskFree: 1 << 40}, nil
}

func (roomy) CPUUsed() (float64, error) { return 1, nil }

// do does a request with a key and decodes the answer into to, unless that is nil.
func (w *whole) do(t *testing.T, key, method, target, body string, status int, to any) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	r.Header.Set("X-API-KEY", key)
	rec := httptest.NewRecorder()
	w.ServeHTTP(rec, r)
	if rec.Code != status {
		t.Fatalf("%s %s %s: %d %s", method, target, body, rec.Code, rec.Body)
	}
	if to != nil {
		if err := json.Unmarshal(rec.Body.Bytes(), to); err != nil {
			t.Fatalf("%s %s: %s: %v", method, target, rec.Body, err)
		}
	}
	return rec
}

// TestWhole: teams see what is theirs, through the engine and the database.
func TestWhole(t *testing.T) {
	w := newWhole(t)
	var box, child sandboxBody
	w.do(t, w.blue, "POST", "/v2/sandboxes", `{"templateID":"base","metadata":{"a":"b"}}`, 201, &box)
	if box.TemplateID != "tplbase" || box.Alias != "base" || box.EnvdAccessToken == "" || box.EnvdVersion != "0.6.13" {
		t.Errorf("%+v", box)
	}
	at := "/sandboxes/" + box.SandboxID
	for _, do := range [][3]string{{"GET", at}, {"DELETE", at}, {"POST", at + "/pause"}, {"POST", at + "/connect", `{"timeout":5}`}, {"POST", at + "/timeout", `{"timeout":1}`},
		{"POST", at + "/fork"}, {"POST", at + "/snapshots"}, {"PUT", at + "/network", `{}`}, {"GET", at + "/metrics"}, {"GET", at + "/logs"}, {"POST", at + "/refreshes"}, {"POST", at + "/init", `{"envVars":{}}`},
		{"POST", at + "/rollback", `{"snapshotID":"base"}`}} {
		refused(t, w.do(t, w.green, do[0], do[1], do[2], 404, nil), 404, "not found")
	}
	var list []listedBody
	w.do(t, w.green, "GET", "/v2/sandboxes", ``, 200, &list)
	if len(list) > 0 {
		t.Errorf("another team's list has %+v", list)
	}
	refused(t, w.do(t, w.green, "POST", "/v2/sandboxes", `{"templateID":"blue/name1"}`, 404, nil), 404, "template 'blue/name1' not found")
	refused(t, w.do(t, w.blue, "POST", "/v2/sandboxes", `{"templateID":"base:v9"}`, 404, nil), 404, "template 'base:v9' not found")
	refused(t, w.do(t, w.blue, "POST", "/v2/sandboxes", `{"templateID":"base","timeout":86401}`, 400, nil), 400, "timeout: ")
	refused(t, w.do(t, w.blue, "POST", at+"/init", `{"envVars":{"E2B_SANDBOX_ID":"x"}}`, 400, nil), 400, "E2B_SANDBOX_ID")
	w.do(t, w.blue, "POST", at+"/init", `{"envVars":{"KEY":"new"}}`, 204, nil)

	var made snapshotBody
	w.do(t, w.blue, "POST", at+"/snapshots", `{"name":"mine:v1"}`, 201, &made)
	if made.SnapshotID != "blue/mine:v1" {
		t.Errorf("%+v", made)
	}
	refused(t, w.do(t, w.green, "POST", "/v2/sandboxes", `{"templateID":"blue/mine:v1"}`, 404, nil), 404, "not found")
	w.do(t, w.blue, "POST", at+"/rollback", `{"snapshotID":"blue/mine:v1"}`, 204, nil)
	refused(t, w.do(t, w.blue, "POST", at+"/rollback", `{"snapshotID":"base"}`, 400, nil), 400, "was not made of sandbox")
	refused(t, w.do(t, w.blue, "POST", at+"/rollback", `{"snapshotID":"nope"}`, 404, nil), 404, "template 'nope' not found")
	w.do(t, w.blue, "POST", "/v2/sandboxes", `{"templateID":"blue/mine:v1"}`, 201, &child)
	refused(t, w.do(t, w.blue, "DELETE", "/templates/blue%2Fmine%3Av1", ``, 400, nil), 400, "can't be deleted")
	w.do(t, w.blue, "DELETE", "/sandboxes/"+child.SandboxID, ``, 204, nil)
	refused(t, w.do(t, w.green, "DELETE", "/templates/blue%2Fmine%3Av1", ``, 404, nil), 404, "not found")
	w.do(t, w.blue, "DELETE", "/templates/blue%2Fmine%3Av1", ``, 204, nil)
	refused(t, w.do(t, w.blue, "DELETE", "/templates/default%2Fbase", ``, 404, nil), 404, "not found")

	var templates []templateBody
	w.do(t, w.blue, "GET", "/templates", ``, 200, &templates)
	if len(templates) != 2 {
		t.Errorf("%+v", templates)
	}
	w.do(t, w.green, "GET", "/v2/templates", ``, 200, &templates)
	if len(templates) != 1 || templates[0].Names[0] != "default/base" || !templates[0].Public || templates[0].BuildID != "build-base" {
		t.Errorf("%+v", templates)
	}
	w.do(t, w.green, "GET", "/templates/aliases/name1", ``, 404, nil)

	// While the engine isn't there, that is what is told.
	w.stop()
	rec := w.do(t, w.blue, "GET", at, ``, 503, nil)
	if refused(t, rec, 503, "cube is being stopped"); rec.Header().Get("Retry-After") != "5" {
		t.Errorf("%v", rec.Header())
	}
}

// TestWholeBatch: a batch is done by the engine's sandboxes, and of the team that asks.
func TestWholeBatch(t *testing.T) {
	w := newWhole(t)
	refused(t, w.do(t, w.green, "POST", "/batch", `{"template":"blue/name1","cmd":"hello","count":1}`, 404, nil), 404, "not found")
	rec := w.do(t, w.blue, "POST", "/batch", `{"template":"blue/name1","cmd":"hello","count":40,"concurrency":8}`, 200, nil)
	boxes := map[string]bool{}
	last := told{}
	for line := range strings.Lines(rec.Body.String()) {
		last = told{}
		if err := json.Unmarshal([]byte(line), &last); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if last.Type == "result" && last.Stdout == "hello" && last.Status == "ok" {
			boxes[last.SandboxID] = true
		}
	}
	if len(boxes) != 40 || last.Type != "summary" || last.OK != 40 || len(w.machines.all) != 0 {
		t.Errorf("%d boxes, %+v, %d machines are left", len(boxes), last, len(w.machines.all))
	}
	var list []listedBody
	if w.do(t, w.blue, "GET", "/v2/sandboxes", ``, 200, &list); len(list) != 0 {
		t.Errorf("left: %+v", list)
	}
}

// TestTrace: a create is one trace, from the client's span to the stages of the engine, and tells no secrets.
func TestTrace(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	before := otel.GetTracerProvider()
	otel.SetTracerProvider(trace.NewTracerProvider(trace.WithSpanProcessor(spans)))
	defer otel.SetTracerProvider(before)
	w := newWhole(t)
	r := httptest.NewRequest("POST", "/v2/sandboxes", strings.NewReader(`{"templateID":"base","envVars":{"A":"confidential"}}`))
	r.Header.Set("X-API-KEY", w.blue)
	r.Header.Set("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	rec := httptest.NewRecorder()
	if w.ServeHTTP(rec, r); rec.Code != 201 {
		t.Fatalf("%d %s", rec.Code, rec.Body)
	}
	names := map[string]bool{}
	var all bytes.Buffer
	for _, s := range spans.Ended() {
		names[s.Name()] = true
		if s.SpanContext().TraceID().String() != "0af7651916cd43dd8448eb211c80319c" {
			t.Errorf("%s is of another trace", s.Name())
		}
		for _, a := range s.Attributes() {
			_, _ = io.WriteString(&all, string(a.Key)+"="+a.Value.String()+" ")
		}
	}
	for _, want := range []string{"POST /v2/sandboxes", "sandbox create", "sandbox machine", "sandbox envd"} {
		if !names[want] {
			t.Errorf("there is no span %q: %v", want, names)
		}
	}
	if s := all.String(); !strings.Contains(s, "http.response.status_code=201") || strings.Contains(s, "confidential") || strings.Contains(s, w.blue) {
		t.Errorf("%s", s)
	}
}
