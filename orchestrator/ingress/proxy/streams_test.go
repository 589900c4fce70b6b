package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

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
