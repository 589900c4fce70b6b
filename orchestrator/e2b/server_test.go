package e2b

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

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
	t.Cleanup(func() {
		stop()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
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

// TestStop: what is under way when the server ends is finished, and nothing begins any more: who asks is told so, by connections
// from before, too, until the server is closed.
func TestStop(t *testing.T) {
	s, engine := newTestServer(t, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	addr := l.Addr().String()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	get := func(path string) *http.Response {
		t.Helper()
		resp, err := client.Get("http://" + addr + path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Error(err)
		}
		resp.Body.Close()
		return resp
	}
	if resp := get("/health"); resp.StatusCode != 200 {
		t.Error(resp.Status)
	}
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
	<-s.stopping
	for _, path := range []string{"/health", "/readyz", "/metrics", "/sandboxes", "/nothing"} {
		if resp := get(path); resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" || !resp.Close {
			t.Errorf("%s: %s %v", path, resp.Status, resp.Header)
		}
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
	if resp := get("/health"); resp.StatusCode != 503 {
		t.Error(resp.Status)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if conn, err := net.Dial("tcp", addr); err == nil {
		conn.Close()
		t.Error("it is still there")
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
