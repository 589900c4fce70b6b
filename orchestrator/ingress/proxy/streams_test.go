package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/cubesandbox/cube/orchestrator/ingress"
)

// streamer has what stays open: events, a download, an upload, an echo by an upgraded connection.
type streamer struct {
	t    *testing.T
	tick chan struct{}
	open atomic.Int32
}

func (s *streamer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.open.Add(1)
	defer s.open.Add(-1)
	rc := http.NewResponseController(w)
	switch r.URL.Path {
	case "/events":
		w.Header().Set("Content-Type", "text/event-stream")
		for i := 0; ; i++ {
			if _, err := fmt.Fprintf(w, "data: %d\n\n", i); err != nil {
				return
			}
			_ = rc.Flush()
			select {
			case <-s.tick:
			case <-r.Context().Done():
				return
			}
		}
	case "/download":
		_, _ = io.Copy(w, &endless{})
	case "/upload":
		_, _ = io.Copy(io.Discard, r.Body)
	case "/wait":
		<-r.Context().Done()
	case "/socket":
		w.Header().Set("Connection", "Upgrade")
		w.Header().Set("Upgrade", "websocket")
		w.WriteHeader(http.StatusSwitchingProtocols)
		c, buf, err := rc.Hijack()
		if err != nil {
			s.t.Error(err)
			return
		}
		defer c.Close()
		_, _ = io.Copy(c, buf)
	default:
		_, _ = io.WriteString(w, "ok")
	}
}

func newStreamer(t *testing.T) *streamer { return &streamer{t: t, tick: make(chan struct{})} }

// socket is an upgraded connection.
type socket struct {
	net.Conn
	br *bufio.Reader
}

func (w *world) upgrade(t *testing.T) *socket {
	t.Helper()
	c := w.raw(t, "GET /socket HTTP/1.1\r\nHost: "+w.host()+"\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(resp, err)
	}
	return &socket{c, br}
}

func (s *socket) echo(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(s, text+"\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := s.br.ReadString('\n'); line != text+"\n" || err != nil {
		t.Fatalf("%q, %v", line, err)
	}
}

func (w *world) open(t *testing.T, path string) (*http.Response, *bufio.Reader) {
	t.Helper()
	resp, err := (&http.Client{}).Do(w.request(t, http.MethodGet, path, nil))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp, bufio.NewReader(resp.Body)
}

// TestCut has all kinds of streams open when the sandbox's machine ends, one way or another: all end at once, on both sides.
func TestCut(t *testing.T) {
	for name, endIt := range map[string]func(*world){
		"rolled back":  func(w *world) { r := w.route; r.Epoch = "e2"; w.put(r) },
		"paused":       func(w *world) { r := w.route; r.State, r.Addr, r.Epoch = "paused", netip.Addr{}, ""; w.put(r) },
		"killed":       func(w *world) { w.remove(id) },
		"re-addressed": func(w *world) { r := w.route; r.Addr = netip.MustParseAddr("127.0.0.2"); w.put(r) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStreamer(t)
			w := newWorld(t, s)
			ws := w.upgrade(t)
			ws.echo(t, "before")
			_, events := w.open(t, "/events")
			if line, err := events.ReadString('\n'); line != "data: 0\n" || err != nil {
				t.Fatal(line, err)
			}
			// A client that takes nothing, so that the proxy can't write any more.
			slow := w.raw(t, "GET /download HTTP/1.1\r\nHost: "+w.host()+"\r\n\r\n")
			// One that waits for an answer, and one that has begun to send.
			waits := w.raw(t, "GET /wait HTTP/1.1\r\nHost: "+w.host()+"\r\n\r\n")
			sends := w.raw(t, "POST /upload HTTP/1.1\r\nHost: "+w.host()+"\r\nContent-Length: 100\r\n\r\nabc")
			eventually(t, "not all are open", func() bool { return s.open.Load() == 5 })

			endIt(w)
			if b, err := io.ReadAll(ws.br); len(b) > 0 || err != nil && !isReset(err) {
				t.Errorf("the socket ends with %q, %v", b, err)
			}
			if b, err := io.ReadAll(events); err == nil {
				t.Errorf("the events end as if they were complete: %q", b)
			}
			for name, c := range map[string]net.Conn{"waits": waits, "sends": sends} {
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil {
					t.Errorf("%s: %v", name, err)
					continue
				}
				b, _ := io.ReadAll(resp.Body)
				if resp.StatusCode != 502 || answerOf(t, string(b)).Message != "The sandbox was not found" {
					t.Errorf("%s: %s %s", name, resp.Status, b)
				}
			}
			eventually(t, "the server still has streams", func() bool { return s.open.Load() == 0 })
			eventually(t, "the proxy still has streams", func() bool { return w.streams() == 0 })
			if _, err := io.Copy(io.Discard, slow); err != nil && !isReset(err) {
				t.Error(err)
			}
		})
	}
}

func isReset(err error) bool {
	return strings.Contains(err.Error(), "reset") || err == io.ErrUnexpectedEOF
}

// streams counts those of all lives that the table knows.
func (w *world) streams() (n int) {
	w.proxy.table.mu.Lock()
	defer w.proxy.table.mu.Unlock()
	for _, l := range w.proxy.table.lives {
		l.mu.Lock()
		n += len(l.streams)
		l.mu.Unlock()
	}
	return n
}

// TestNotCut: a snapshot, a change of what is allowed and a pause that fails cut nothing.
func TestNotCut(t *testing.T) {
	w := newWorld(t, newStreamer(t))
	ws := w.upgrade(t)
	for _, state := range []string{ingress.StateSnapshotting, ingress.StateRunning, ingress.StatePausing, ingress.StateRunning} {
		r := w.route
		r.State, r.AllowPublic = state, false
		w.put(r)
		ws.echo(t, state)
	}
	r := w.route
	r.State = ingress.StatePausing
	w.put(r)
	eventually(t, "requests begin while it is being paused", func() bool {
		resp, _ := w.get(t, "/")
		return resp.StatusCode == 502
	})
	ws.echo(t, "still")
}

// TestConnectionsArentReused: after a rollback no request goes by a connection into the machine before.
func TestConnectionsArentReused(t *testing.T) {
	var conns atomic.Int32
	backend := httptest.NewUnstartedServer(newStreamer(t))
	backend.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			conns.Add(1)
		}
	}
	backend.Start()
	defer backend.Close()
	c := newControl()
	w := worldOf(t, c, c, backend.Listener.Addr())
	c.put(w.route)
	for i := range int32(3) {
		for range 3 {
			if resp, body := w.get(t, "/"); resp.StatusCode != 200 {
				t.Fatal(resp.Status, body)
			}
		}
		if conns.Load() != i+1 {
			t.Errorf("%d connections in epoch %d", conns.Load(), i+1)
		}
		w.route.Epoch = fmt.Sprint("e", i+2)
		c.put(w.route)
		eventually(t, "the epoch doesn't change", func() bool {
			_, r := w.proxy.table.usable(id)
			return r.Epoch == w.route.Epoch
		})
	}
}

// TestControlPlaneAway: what is open and known goes on without the control plane, the rest is told to wait, and what has ended
// meanwhile is cut when it is back.
func TestControlPlaneAway(t *testing.T) {
	s := newStreamer(t)
	backend := httptest.NewServer(s)
	defer backend.Close()
	c := newControl()
	path := filepath.Join(t.TempDir(), "route.sock")
	start := func() *http.Server {
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		srv := &http.Server{Handler: ingress.Handler(c)}
		go srv.Serve(l)
		return srv
	}
	w := worldOf(t, c, &ingress.Client{Socket: path}, backend.Listener.Addr())
	w.route = c.put(w.route)
	other := w.route
	other.SandboxID = "iother"
	other = c.put(other)
	if resp, body := w.get(t, "/"); resp.StatusCode != 503 || resp.Header.Get("Retry-After") != "1" {
		t.Errorf("without any control plane: %s %s", resp.Status, body)
	}
	srv := start()
	eventually(t, "it isn't known", func() bool { l, _ := w.proxy.table.usable(id); return l != nil })

	ws := w.upgrade(t)
	ws.echo(t, "before")
	_, events := w.open(t, "/events")
	_, download := w.open(t, "/download")
	read := func() {
		t.Helper()
		s.tick <- struct{}{}
		for range 2 {
			if _, err := events.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := io.CopyN(io.Discard, download, 1<<20); err != nil {
			t.Fatal(err)
		}
		ws.echo(t, "on")
	}
	read()
	for range 3 {
		srv.Close()
		eventually(t, "it isn't missed", func() bool {
			w.proxy.table.mu.Lock()
			defer w.proxy.table.mu.Unlock()
			return !w.proxy.table.live
		})
		read()
		if resp, body := w.get(t, "/"); resp.StatusCode != 200 {
			t.Errorf("a known sandbox: %s %s", resp.Status, body)
		}
		if resp, body := w.get(t, "/", "Host", w.port+"-iunknown."+domain); resp.StatusCode != 503 || resp.Header.Get("Retry-After") != "1" {
			t.Errorf("an unknown sandbox: %s %s", resp.Status, body)
		}
		c.mu.Lock()
		c.seq = 0 // another process, which counts for itself
		c.mu.Unlock()
		c.put(w.route)
		srv = start()
		eventually(t, "it isn't found again", func() bool {
			w.proxy.table.mu.Lock()
			defer w.proxy.table.mu.Unlock()
			return w.proxy.table.live
		})
		read()
	}
	srv.Close()
	c.remove(id)
	srv = start()
	defer srv.Close()
	if _, err := io.ReadAll(ws.br); err != nil && !isReset(err) {
		t.Error(err)
	}
	if l, _ := w.proxy.table.usable("iother"); l == nil {
		t.Error("the other one isn't known any more")
	}
}

// TestUnreachableWhileAway: an address at which nobody is any more isn't used again until the control plane has said whose it is.
func TestUnreachableWhileAway(t *testing.T) {
	c := newControl()
	w := worldOf(t, c, c, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1})
	c.put(w.route)
	eventually(t, "it isn't known", func() bool { l, _ := w.proxy.table.usable(id); return l != nil })
	l, _ := w.proxy.table.usable(id)
	w.proxy.table.doubt(id, l)
	if l, _ := w.proxy.table.usable(id); l == nil {
		t.Error("it is doubted although the control plane tells of it")
	}
	w.proxy.table.mu.Lock()
	w.proxy.table.live = false
	w.proxy.table.mu.Unlock()
	if l, _ := w.proxy.table.usable(id); l != nil {
		t.Error("it is used")
	}
	c.put(w.route)
	eventually(t, "it isn't used again", func() bool { l, _ := w.proxy.table.usable(id); return l != nil })
}

// TestGRPC goes by HTTP/2 all the way, by TLS and without.
func TestGRPC(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	hs := health.NewServer()
	healthpb.RegisterHealthServer(srv, hs)
	go srv.Serve(l)
	defer srv.Stop()
	c := newControl()
	w := worldOf(t, c, c, l.Addr())
	c.put(w.route)
	conn, err := grpc.NewClient("passthrough:///"+w.server.Listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority(w.host()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	client := healthpb.NewHealthClient(conn)
	if _, err := client.Check(ctx, &healthpb.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	for range 100 { // an answer that has all in its header, by which it ends
		if _, err := client.Check(ctx, &healthpb.HealthCheckRequest{Service: "none"}); err == nil || !strings.Contains(err.Error(), "NotFound") {
			t.Fatalf("the status is lost: %v", err)
		}
	}
	watch, err := client.Watch(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, status := range []healthpb.HealthCheckResponse_ServingStatus{healthpb.HealthCheckResponse_SERVING, healthpb.HealthCheckResponse_NOT_SERVING} {
		if r, err := watch.Recv(); err != nil || r.Status != status {
			t.Fatal(r, err)
		}
		hs.SetServingStatus("", healthpb.HealthCheckResponse_NOT_SERVING)
	}
	w.route.Epoch = "e2"
	c.put(w.route)
	if _, err := watch.Recv(); err == nil {
		t.Error("the stream isn't cut")
	}
	if _, err := client.Check(ctx, &healthpb.HealthCheckRequest{}); err != nil {
		t.Errorf("in the next epoch: %v", err)
	}
}

func TestProtocolOfTheClient(t *testing.T) {
	w := newWorld(t, mirror)
	ts := httptest.NewUnstartedServer(w.proxy)
	ts.EnableHTTP2 = true
	ts.StartTLS()
	defer ts.Close()
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	for _, tc := range []struct {
		name, url, kind, want string
		transport             *http.Transport
	}{
		{"h2", ts.URL, "", "HTTP/1.1", &http.Transport{ForceAttemptHTTP2: true}},
		{"gRPC by h2", ts.URL, "application/grpc+proto", "HTTP/2.0", &http.Transport{ForceAttemptHTTP2: true}},
		{"gRPC by HTTP/1.1", ts.URL, "application/grpc-web", "HTTP/1.1", &http.Transport{}},
		{"prior knowledge", w.server.URL, "", "HTTP/2.0", &http.Transport{Protocols: h2c}},
		{"plain", w.server.URL, "", "HTTP/1.1", &http.Transport{}},
	} {
		tc.transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
		r, err := http.NewRequest(http.MethodPost, tc.url+"/", strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		r.Host = w.host()
		r.Header.Set("Content-Type", tc.kind)
		resp, err := (&http.Client{Transport: tc.transport, Timeout: timeout}).Do(r)
		if err != nil {
			t.Fatal(tc.name, err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if !strings.HasPrefix(string(b), "POST / "+tc.want+"\n") {
			t.Errorf("%s: %s", tc.name, b)
		}
		tc.transport.CloseIdleConnections()
	}
}

// TestManyAtOnce is for the race detector: streams open and end while lives do.
func TestManyAtOnce(t *testing.T) {
	w := newWorld(t, newStreamer(t))
	stop := time.Now().Add(time.Second)
	done := make(chan struct{})
	for range 8 {
		go func() {
			defer func() { done <- struct{}{} }()
			client := &http.Client{Timeout: timeout}
			defer client.CloseIdleConnections()
			for i := 0; time.Now().Before(stop); i++ {
				r, _ := http.NewRequest(http.MethodGet, w.server.URL+[]string{"/", "/download", "/events"}[i%3], nil)
				r.Host = w.host()
				resp, err := client.Do(r)
				if err != nil {
					continue
				}
				_, _ = io.CopyN(io.Discard, resp.Body, 1000)
				resp.Body.Close()
			}
		}()
	}
	for i := 0; time.Now().Before(stop); i++ {
		switch r := w.route; i % 3 {
		case 0:
			r.Epoch = fmt.Sprint("e", i)
			w.put(r)
		case 1:
			w.remove(id)
		case 2:
			w.put(r)
		}
		time.Sleep(2 * time.Millisecond)
	}
	for range 8 {
		<-done
	}
	w.put(w.route)
	eventually(t, "it doesn't work any more", func() bool { resp, _ := w.get(t, "/"); return resp.StatusCode == 200 })
	eventually(t, "streams are left", func() bool { return w.streams() == 0 })
}
