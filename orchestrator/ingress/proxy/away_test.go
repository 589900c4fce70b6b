package proxy

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/orchestrator/ingress"
)

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
