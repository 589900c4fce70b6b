package health

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"testing"
	"time"
)

func get(t *testing.T, h http.Handler, path string) int {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w.Code
}

func TestAliveIsNotReady(t *testing.T) {
	b := NewBoard("test", 1, time.Second, "store", "containerd")
	h := Handler(b)
	steps := []struct {
		name    string
		do      func()
		ready   int
		awaited string
	}{
		{"at the start", func() {}, 503, "store"},
		{"one of two", func() { b.Set("store", Ready, "") }, 503, "containerd"},
		{"both", func() { b.Set("containerd", Ready, "") }, 200, ""},
		{"one has failed", func() { b.Set("containerd", Failed, "exit status 1") }, 503, "containerd"},
		{"and is back", func() { b.Set("containerd", Ready, "") }, 200, ""},
		{"but doesn't answer", func() {
			b.SetProbe("containerd", func(context.Context) error { return errors.New("connection refused") })
		}, 503, ""}, // which isn't known without asking
	}
	for _, s := range steps {
		s.do()
		if got := get(t, h, "/readyz"); got != s.ready {
			t.Errorf("%s: /readyz = %d, want %d", s.name, got, s.ready)
		}
		if got := b.Awaited(); got != s.awaited {
			t.Errorf("%s: %q is awaited, not %q", s.name, got, s.awaited)
		}
		if got := get(t, h, "/healthz"); got != 200 {
			t.Errorf("%s: /healthz = %d, want 200", s.name, got)
		}
	}
}

func TestProbeThatHangsIsBounded(t *testing.T) {
	b := NewBoard("test", 1, 20*time.Millisecond, "containerd")
	b.Set("containerd", Ready, "")
	b.SetProbe("containerd", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
	if r := b.Report(t.Context()); r.Ready || r.Dependencies[0].State != Failed {
		t.Errorf("a dependency that hangs must not be ready: %+v", r)
	}
}

func TestQuery(t *testing.T) {
	b := NewBoard("1.2", 42, time.Second, "store", "containerd")
	b.Set("store", Ready, "")
	b.Set("containerd", Failed, "exit status 1")
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: Handler(b)}
	go srv.Serve(l)
	defer srv.Close()

	r, err := Query(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	if r.Ready || r.Version != "1.2" || r.PID != 42 {
		t.Errorf("unexpected report %+v", r)
	}
	if want := []string{"containerd: failed (exit status 1)"}; !reflect.DeepEqual(r.Missing(), want) {
		t.Errorf("missing %q, want %q", r.Missing(), want)
	}
	if _, err := Query(t.Context(), socket+"-none"); err == nil {
		t.Error("a socket that isn't there must be an error")
	}
}
