package e2b

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cubesandbox/cube/orchestrator/health"
)

// panicking is an engine that does.
type panicking struct{ *fakeEngine }

func (panicking) Kill(context.Context, string, string) error { panic("it is broken") }

// TestPanic: a bug is an answer and a line in the log, and the next request is served.
func TestPanic(t *testing.T) {
	var log lockedBuffer
	s, engine := newTestServer(t, func(o *Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	s.engine = panicking{engine}
	h := s.Handler()
	refused(t, ask(h, "DELETE", "/sandboxes/iabc", ""), 500, "internal error")
	if !strings.Contains(log.String(), "it is broken") || !strings.Contains(log.String(), "observe_test.go") {
		t.Errorf("%s", log.String())
	}
	if w := ask(h, "GET", "/sandboxes", ""); w.Code != 200 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// TestLog: each request has a line, and nothing that lets anybody in is in it.
func TestLog(t *testing.T) {
	var log lockedBuffer
	s, engine := newTestServer(t, func(o *Options) {
		o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	h := s.Handler()
	do := func(target, body string, headers ...string) {
		r := httptest.NewRequest("POST", target, strings.NewReader(body))
		for i := 0; i < len(headers); i += 2 {
			r.Header.Set(headers[i], headers[i+1])
		}
		h.ServeHTTP(httptest.NewRecorder(), r)
	}
	do("/v2/sandboxes", `{"templateID":"base","envVars":{"SECRET":"topsecret"},"metadata":{"a":"confidential"}}`, "X-API-KEY", testKey, "X-Request-Id", "r1")
	do("/v2/sandboxes", `{"templateID":"base","envVars":{"SECRET":1,"x":"topsecret"}}`, "Authorization", "Bearer "+testKey, "X-Request-Id", "r2")
	do("/"+testKey+"?key="+testKey, ``, "X-API-KEY", "e2b_feedfeedfeedfeedfeedfeedfeedfeedfeedfeed", "X-Request-Id", testKey, "User-Agent", "curl "+testKey)
	engine.fails = fmt.Errorf("key %s", testKey)
	do("/v2/sandboxes", `{"templateID":"base"}`, "X-API-KEY", testKey, "X-Request-Id", "r4")
	all := log.String()
	for _, secret := range []string{testKey, "topsecret", "confidential", "envd-secret", "traffic-secret", "feedfeed"} {
		if strings.Contains(all, secret) {
			t.Errorf("%s is in the log:\n%s", secret, all)
		}
	}
	for _, want := range []string{`request=r1 method=POST path=/v2/sandboxes status=201`, `team=blue`, `request=r2 method=POST path=/v2/sandboxes status=400`, `status=404`, `status=500`, `error="key e2b_…"`} {
		if !strings.Contains(all, want) {
			t.Errorf("%s isn't in the log:\n%s", want, all)
		}
	}
}

var loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}

// TestMetrics: requests are counted by route, not by what clients make up, and nobody from elsewhere is told.
func TestMetrics(t *testing.T) {
	s, _ := newTestServer(t, nil)
	h := s.Handler()
	for i := range 20 {
		ask(h, "GET", fmt.Sprintf("/sandboxes/i%d", i), "")
		ask(h, "GET", fmt.Sprintf("/made-up-%d", i), "")
	}
	get := func(from string, headers ...string) *httptest.ResponseRecorder {
		r := httptest.NewRequest("GET", "http://127.0.0.1:3000/metrics", nil)
		r.RemoteAddr = from
		for i := 0; i < len(headers); i += 2 {
			if r.Header.Set(headers[i], headers[i+1]); headers[i] == "Host" {
				r.Host = headers[i+1]
			}
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	w := get("127.0.0.1:1234")
	for _, want := range []string{`cube_api_request_seconds_count{code="404",route="GET /sandboxes/{sandboxID}"} 20`, `cube_api_request_seconds_count{code="404",route="none"} 20`, `cube_api_requests_pending 1`} {
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("%s isn't in\n%s", want, w.Body)
		}
	}
	refused(t, get("192.0.2.1:1234"), 403, "api.metrics_from")
	refused(t, get("127.0.0.1:1234", "X-Forwarded-For", "192.0.2.1"), 403, "api.metrics_from")
	for _, host := range []string{"127.0.0.1:3000", "127.0.0.1", "[::1]:3000", "[::1]", "192.0.2.7:3000", "localhost:3000", "LocalHost"} {
		if w := get("[::1]:1234", "Host", host); w.Code != 200 {
			t.Errorf("%s: %d %s", host, w.Code, w.Body)
		}
	}
	// A page's server may have its name lead here: whoever reads the answer is the page then.
	for _, host := range []string{"rebound.example:3000", "127.0.0.1.rebound.example", "localhost.example", "api.sandbox.localhost", "127.0.0.1:3000@rebound.example", ""} {
		refused(t, get("127.0.0.1:1234", "Host", host), 403, "by address")
	}
}

// TestReady: what is missing is named.
func TestReady(t *testing.T) {
	ready := false
	s, _ := newTestServer(t, func(o *Options) {
		o.Ready = func(context.Context) health.Report {
			return health.Report{Ready: ready, Dependencies: []health.Dependency{{Name: "containerd", State: health.Failed, Reason: "it doesn't answer"}}}
		}
	})
	h := s.Handler()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", "/readyz", nil))
	if w.Code != 503 || w.Header().Get("Retry-After") == "" || !strings.Contains(w.Body.String(), `"name":"containerd","state":"failed","reason":"it doesn't answer"`) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	ready = true
	w = httptest.NewRecorder()
	if h.ServeHTTP(w, httptest.NewRequest("GET", "/readyz", nil)); w.Code != 200 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// TestBeforeOpen: what can't be done yet is to be tried again, whoever asks for it, and is said to wait for what is missing.
func TestBeforeOpen(t *testing.T) {
	missing := "containerd"
	o := Options{Awaited: func() string { return missing }, Ready: func(context.Context) health.Report { return health.Report{} },
		Metrics: prometheus.NewRegistry(), MetricsFrom: loopback, Log: slog.New(slog.DiscardHandler), Timeout: func(d time.Duration) time.Duration { return d }}
	s, engine := New(o), newFakeEngine()
	h := s.Handler()
	for _, missing = range []string{"containerd", "network"} {
		for _, call := range [][3]string{{"POST", "/v2/sandboxes", `{"templateID":"base"}`}, {"POST", "/v2/sandboxes", "{"}, {"GET", "/sandboxes", ""}, {"DELETE", "/sandboxes/iabc", ""}} {
			w := ask(h, call[0], call[1], call[2])
			if refused(t, w, 503, "waits for: "+missing); w.Header().Get("Retry-After") != "1" {
				t.Errorf("%v", w.Header())
			}
		}
	}
	for target, status := range map[string]int{"/health": 200, "/readyz": 503, "/nothing": 404} {
		if w := ask(h, "GET", target, ""); w.Code != status {
			t.Errorf("%s: %d %s", target, w.Code, w.Body)
		}
	}
	s.Open(engine, &fakeKeys{}, fakeTemplates{}, fakeBuilds{fakeEngine: engine})
	if w := ask(h, "POST", "/v2/sandboxes", `{"templateID":"base"}`); w.Code != 201 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
