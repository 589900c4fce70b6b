package proxy

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cubesandbox/cube/orchestrator/ingress"
)

// napping is a world whose sandbox is paused, and woken by requests to where its server is.
func napping(t *testing.T, handler http.Handler) (w *world, paused ingress.Route, wakes *atomic.Int32) {
	w = newWorld(t, handler)
	w.route.AutoResume = true
	w.route = w.put(w.route)
	paused = w.route
	paused.State, paused.Addr, paused.Epoch = "paused", netip.Addr{}, ""
	wakes = new(atomic.Int32)
	w.wake = func(context.Context, string) (ingress.Route, error) {
		wakes.Add(1)
		r := w.route
		r.Epoch = "e2"
		return w.put(r), nil
	}
	eventually(t, "it isn't known", func() bool { l, _ := w.proxy.table.usable(id); return l != nil })
	return w, paused, wakes
}

// TestPausedUnderway: what is under way when a sandbox that wakes is paused begins anew if it only reads, and waits for it; what may
// have changed something is told.
func TestPausedUnderway(t *testing.T) {
	var asked atomic.Int32
	hold := make(chan struct{})
	w, paused, wakes := napping(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if asked.Add(1) <= 2 { // those of before the pause
			select {
			case <-hold:
			case <-r.Context().Done():
			}
			return
		}
		_, _ = io.WriteString(rw, r.Method+" "+r.URL.Path)
	}))
	defer close(hold)
	reads := w.raw(t, "GET /a HTTP/1.1\r\nHost: "+w.host()+"\r\n\r\n")
	writes := w.raw(t, "POST /b HTTP/1.1\r\nHost: "+w.host()+"\r\nContent-Length: 3\r\n\r\nabc")
	eventually(t, "they aren't there", func() bool { return asked.Load() == 2 })
	w.put(paused)
	answered := func(c net.Conn) (int, string) {
		t.Helper()
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	if code, body := answered(reads); code != 200 || body != "GET /a" {
		t.Errorf("what reads: %d %s", code, body)
	}
	if code, body := answered(writes); code != 502 {
		t.Errorf("what may have changed something: %d %s", code, body)
	}
	if n := wakes.Load(); n != 1 {
		t.Errorf("woken %d times", n)
	}
	if n := asked.Load(); n != 3 {
		t.Errorf("the server has got %d requests", n)
	}
	// The client's connection is as before.
	if _, err := io.WriteString(reads, "GET /c HTTP/1.1\r\nHost: "+w.host()+"\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if code, body := answered(reads); code != 200 || body != "GET /c" {
		t.Errorf("the next one: %d %s", code, body)
	}
	eventually(t, "streams are left", func() bool { return w.streams() == 0 && w.proxy.Streams() == 0 })
}

// TestRolledBack: what begins while a sandbox is rolled back waits for its next life, whether or not requests wake it, and whatever
// the proxy has heard last; what is open stays until then. Who wouldn't be let in isn't let wait.
func TestRolledBack(t *testing.T) {
	hold := make(chan struct{})
	var asked atomic.Int32
	w := newWorld(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if asked.Add(1) == 1 {
			_ = http.NewResponseController(rw).Flush()
			<-r.Context().Done()
			return
		}
		_, _ = io.Copy(rw, r.Body)
	}))
	open := w.raw(t, "GET /a HTTP/1.1\r\nHost: "+w.host()+"\r\n\r\n")
	eventually(t, "it isn't there", func() bool { return asked.Load() == 1 })
	w.route.State = ingress.StateRewinding
	w.route = w.put(w.route)
	w.wake = func(context.Context, string) (ingress.Route, error) {
		<-hold
		w.mu.Lock()
		w.muted = true // the answer is what tells of it
		w.mu.Unlock()
		r := w.route
		r.State, r.Epoch = ingress.StateRunning, "e2"
		return w.put(r), nil
	}
	answers := make(chan string, 1)
	eventually(t, "it takes what begins", func() bool { l, _ := w.proxy.table.usable(id); return l == nil })
	req := w.request(t, http.MethodPost, "/b", strings.NewReader("all of it"))
	go func() {
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			answers <- err.Error()
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		answers <- resp.Status + " " + string(b)
	}()
	eventually(t, "nobody waits", func() bool { return w.proxy.Streams() == 2 })
	if n := asked.Load(); n != 1 {
		t.Errorf("%d requests have got through", n)
	}
	close(hold)
	if got := <-answers; got != "200 OK all of it" {
		t.Error(got)
	}
	if _, err := io.ReadAll(open); err != nil { // the stream of before is cut
		t.Error(err)
	}
}

// TestPausedBefore: a request that hasn't got to the sandbox when that is paused, of which the proxy hasn't heard, goes to the one
// that is woken for it, whatever it is.
func TestPausedBefore(t *testing.T) {
	w, paused, wakes := napping(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { _, _ = io.Copy(rw, r.Body) }))
	gone := w.route
	l, err := net.Listen("tcp", "127.0.0.3:0") // nobody takes its connections, and then nobody listens
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	gone.Addr = netip.MustParseAddr("127.0.0.3")
	w.put(gone)
	eventually(t, "it isn't known", func() bool { _, r := w.proxy.table.usable(id); return r.Addr == gone.Addr })
	w.mu.Lock()
	w.muted = true
	w.mu.Unlock()
	w.put(paused)
	resp, body := do(t, w.request(t, http.MethodPost, "/upload", strings.NewReader("all of it")))
	if resp.StatusCode != 200 || body != "all of it" {
		t.Errorf("%s %s", resp.Status, body)
	}
	if n := wakes.Load(); n != 1 {
		t.Errorf("woken %d times", n)
	}
}
