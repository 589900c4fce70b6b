package e2b

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cubesandbox/cube/orchestrator/health"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// serving is a server on a port of its own, until stop; ended is what Serve returns.
func serving(t *testing.T, change func(*Options)) (engine *fakeEngine, addr string, stop context.CancelFunc, ended chan error) {
	s, engine := newTestServer(t, change)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended = make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	t.Cleanup(stop)
	return engine, l.Addr().String(), stop, ended
}

// quick makes all deadlines of a server short.
func quick(o *Options) {
	o.Timeout = func(d time.Duration) time.Duration { return min(d, 200*time.Millisecond) }
}

// TestSlowClients: who sends a part of its request, and no more, is hung up on.
func TestSlowClients(t *testing.T) {
	engine, addr, _, _ := serving(t, quick)
	for _, sent := range []string{
		"GET /health HTTP/1.1\r\nHos",
		"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: " + testKey + "\r\nContent-Length: 100\r\n\r\n{\"templ",
		"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: " + testKey + "\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"te",
		"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", // without a key
		"DELETE /sandboxes/iabc HTTP/1.1\r\nHost: x\r\nX-API-KEY: " + testKey + "\r\nContent-Length: 100\r\n\r\n",
		"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"GET /readyz HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
	} {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, sent); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		_, err = io.Copy(io.Discard, conn)
		if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
			t.Errorf("%q: it is still waited for", sent)
		}
		conn.Close()
	}
	if engine.last != nil {
		t.Errorf("the engine was asked %v", engine.last)
	}
}

// TestSlowEngine: a request takes as long as it takes, whatever the deadlines for clients; the next one on its connection has an
// answer, too.
func TestSlowEngine(t *testing.T) {
	engine, addr, _, _ := serving(t, quick)
	engine.hold, engine.entered = make(chan struct{}), make(chan struct{}, 1)
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	create := func() (*http.Response, error) {
		r, err := http.NewRequest("POST", "http://"+addr+"/v2/sandboxes", io.MultiReader(strings.NewReader(`{"templateID":"base"}`)))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("X-API-KEY", testKey)
		return client.Do(r)
	}
	for range 2 {
		go func() {
			<-engine.entered
			time.Sleep(500 * time.Millisecond) // longer than all deadlines
			engine.hold <- struct{}{}
		}()
		resp, err := create()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 201 {
			t.Errorf("%s, %v", resp.Status, err)
		}
		resp.Body.Close()
	}
}

// TestClientGone: what is made for a client that has gone away is given up.
func TestClientGone(t *testing.T) {
	engine, addr, _, _ := serving(t, nil)
	engine.hold, engine.entered = make(chan struct{}), make(chan struct{}, 1)
	ctx, cancel := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, "POST", "http://"+addr+"/v2/sandboxes", strings.NewReader(`{"templateID":"base"}`))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-API-KEY", testKey)
	go func() {
		<-engine.entered
		cancel()
	}()
	if _, err := http.DefaultClient.Do(r); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	// Its context has ended, so the engine isn't in there any more, or soon not to be.
	http.DefaultClient.CloseIdleConnections()
	r2, _ := http.NewRequest("GET", "http://"+addr+"/sandboxes", nil)
	r2.Header.Set("X-API-KEY", testKey)
	resp, err := http.DefaultClient.Do(r2)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); string(b) != "[]\n" {
		t.Errorf("%s", b)
	}
}

// TestStop: what is under way when the server ends is finished, and nothing begins any more.
func TestStop(t *testing.T) {
	engine, addr, stop, ended := serving(t, nil)
	engine.hold, engine.entered = make(chan struct{}), make(chan struct{}, 1)
	answered := make(chan int, 1)
	go func() {
		r, _ := http.NewRequest("POST", "http://"+addr+"/v2/sandboxes", strings.NewReader(`{"templateID":"base"}`))
		r.Header.Set("X-API-KEY", testKey)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Error(err)
			answered <- 0
			return
		}
		resp.Body.Close()
		answered <- resp.StatusCode
	}()
	<-engine.entered
	stop()
	for { // until the listener is closed
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			break
		}
		conn.Close()
	}
	select {
	case err := <-ended:
		t.Fatalf("it has ended before its request: %v", err)
	default:
	}
	close(engine.hold)
	if status := <-answered; status != 201 {
		t.Errorf("%d", status)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestStopCuts: a request that isn't finished in time is given up, and its client told, so that the server ends.
func TestStopCuts(t *testing.T) {
	engine, addr, stop, ended := serving(t, quick)
	engine.hold, engine.entered = make(chan struct{}), make(chan struct{}, 1)
	answered := make(chan *http.Response, 1)
	go func() {
		r, _ := http.NewRequest("POST", "http://"+addr+"/v2/sandboxes", strings.NewReader(`{"templateID":"base"}`))
		r.Header.Set("X-API-KEY", testKey)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Error(err)
			close(answered)
			return
		}
		resp.Body.Close()
		answered <- resp
	}()
	<-engine.entered
	stop()
	if resp := <-answered; resp != nil && (resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "") {
		t.Errorf("%s %v", resp.Status, resp.Header)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestListenerBroken: that it can't be served any more is told.
func TestListenerBroken(t *testing.T) {
	s, _ := newTestServer(t, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := s.Serve(t.Context(), l); err == nil || errors.Is(err, http.ErrServerClosed) {
		t.Error(err)
	}
}

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
	if !strings.Contains(log.String(), "it is broken") || !strings.Contains(log.String(), "server_test.go") {
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

// TestMetrics: requests are counted by route, not by what clients make up, and nobody from elsewhere is told.
func TestMetrics(t *testing.T) {
	s, _ := newTestServer(t, nil)
	h := s.Handler()
	for i := range 20 {
		ask(h, "GET", fmt.Sprintf("/sandboxes/i%d", i), "")
		ask(h, "GET", fmt.Sprintf("/made-up-%d", i), "")
	}
	get := func(from string, headers ...string) *httptest.ResponseRecorder {
		r := httptest.NewRequest("GET", "/metrics", nil)
		r.RemoteAddr = from
		for i := 0; i < len(headers); i += 2 {
			r.Header.Set(headers[i], headers[i+1])
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
	refused(t, get("192.0.2.1:1234"), 403, "this machine only")
	refused(t, get("127.0.0.1:1234", "X-Forwarded-For", "192.0.2.1"), 403, "this machine only")
	if w := get("[::1]:1234"); w.Code != 200 {
		t.Errorf("%d", w.Code)
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
		Metrics: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler), Timeout: func(d time.Duration) time.Duration { return d }}
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
	s.Open(engine, &fakeKeys{}, fakeTemplates{})
	if w := ask(h, "POST", "/v2/sandboxes", `{"templateID":"base"}`); w.Code != 201 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// TestShortMax: a client that asks for nothing gets the longest that there is, if that is less than E2B's default.
func TestShortMax(t *testing.T) {
	s, engine := newTestServer(t, func(o *Options) { o.MaxTimeout = time.Minute })
	ask(s.Handler(), "POST", "/v2/sandboxes", `{"templateID":"base"}`)
	if got := engine.last.(lifecycle.Create).Timeout; got != time.Minute {
		t.Errorf("%v", got)
	}
}

// TestMany: requests at once, for the race detector.
func TestMany(t *testing.T) {
	_, addr, _, _ := serving(t, nil)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for _, do := range [][2]string{{"POST", "/v2/sandboxes"}, {"GET", "/v2/sandboxes"}, {"GET", "/metrics"}, {"POST", "/sandboxes/i00000000000000000001/pause"}} {
				r, _ := http.NewRequest(do[0], "http://"+addr+do[1], nil)
				if do[1] == "/v2/sandboxes" && do[0] == "POST" {
					r.Body = io.NopCloser(strings.NewReader(`{"templateID":"base"}`))
				}
				r.Header.Set("X-API-KEY", testKey)
				resp, err := http.DefaultClient.Do(r)
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
				if resp.StatusCode >= 500 {
					t.Errorf("%v: %s", do, resp.Status)
				}
			}
		})
	}
	wg.Wait()
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

// TestSlowReader: who asks and asks, and takes no answer, is hung up on.
func TestSlowReader(t *testing.T) {
	engine, addr, _, _ := serving(t, quick)
	for range 500 {
		engine.add(lifecycle.Create{Team: testTeam, Template: "base", Metadata: map[string]string{"a": strings.Repeat("x", 4096)}})
	}
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetWriteDeadline(time.Now().Add(20 * time.Second))
	for err == nil {
		_, err = fmt.Fprintf(conn, "GET /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: %s\r\n\r\n", testKey)
	}
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		t.Error("it is still waited for")
	}
}
