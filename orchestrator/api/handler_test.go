package api

import (
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
)

func testConfig(t *testing.T) *config.Config {
	cfg := config.Default()
	cfg.StateDir, cfg.RunDir = t.TempDir(), t.TempDir()
	return cfg
}

// TestBadRequests: what isn't a request is refused, by its class and in a line, before anything is done.
func TestBadRequests(t *testing.T) {
	h := New(testConfig(t), slog.New(slog.DiscardHandler)).Handler()
	for _, r := range []struct {
		method, path, body string
		status             int
		says               string
	}{
		{"POST", "/v1/containers/a/snapshots", `{"name": "../up"}`, 400, "snapshot name"},
		{"POST", "/v1/containers/a/snapshots", `{"nam": "x"}`, 400, "unknown field"},
		{"POST", "/v1/containers/a/snapshots", `{"name": 1}`, 400, "body"},
		{"POST", "/v1/containers/a/snapshots", `{"name": "x"} {}`, 400, "more than one"},
		{"POST", "/v1/containers/a/snapshots", `{"name": "x`, 400, "body"},
		{"POST", "/v1/containers/a/snapshots?force=1", `{}`, 400, "no query"},
		{"POST", "/v1/containers/a%2F..%2Fb/snapshots", `{}`, 400, "can't be a container's id"},
		{"POST", "/v1/containers/%2e%2e%00/rollback", `{"snapshot": "x"}`, 400, "can't be a container's id"},
		{"POST", "/v1/containers/" + strings.Repeat("a", 100) + "/clone", ``, 400, "can't be a container's id"},
		{"POST", "/v1/containers/a/rollback", `{}`, 400, "snapshot name"},
		{"POST", "/v1/containers/a/clone", `{"count": 0}`, 400, "1 to 100"},
		{"POST", "/v1/containers/a/clone", `{"count": 101}`, 400, "1 to 100"},
		{"POST", "/v1/containers/a/clone", `{"count": -1}`, 400, "1 to 100"},
		{"POST", "/v1/containers/a/clone", `{"count": 1.5}`, 400, "body"},
		{"POST", "/v1/containers/a/clone", `{"count": 1e30}`, 400, "body"},
		{"GET", "/v1/snapshots/x", ``, 404, "no snapshot x"},
		{"GET", "/v1/snapshots/..%2Fx", ``, 400, "snapshot name"},
		{"DELETE", "/v1/snapshots/x", ``, 404, "no snapshot x"},
		{"DELETE", "/v1/snapshots/.tmp-x", ``, 400, "snapshot name"},
		{"GET", "/v1/containers/a/clone", ``, 404, "the API has no GET"},
		{"POST", "/v1/secrets", ``, 404, "the API has no POST"},
		{"POST", "/v1/containers/a/clone", ``, 503, "isn't ready"},
		{"POST", "/v1/containers/a/rollback", `{"snapshot": "x"}`, 503, "isn't ready"},
		{"GET", "/v1/templates", ``, 503, "isn't ready"},
		{"POST", "/v1/templates", `{"name": "a", "plan": {"image": "b"}}`, 503, "isn't ready"},
		{"POST", "/v1/templates", `{"colour": "red"}`, 400, "unknown field"},
		{"POST", "/v1/templates", `{"plan": {"steps": [{"Kind": "RUN"}]}}`, 400, "unknown field"},
		{"POST", "/v1/templates/default/a/rebuild", `{"outdated": "yes"}`, 400, "body"},
		{"POST", "/v1/builds/b/log", `{"offset": "1"}`, 400, "body"},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(r.method, r.path, strings.NewReader(r.body)))
		if line := w.Body.String(); w.Code != r.status || !strings.Contains(line, r.says) || strings.Count(line, "\n") != 1 {
			t.Errorf("%s %s %s: %d %s", r.method, r.path, r.body, w.Code, line)
		}
	}
}

// TestClient: what the daemon refuses is of the same class on the client's side; what can't be part of a path isn't sent.
func TestClient(t *testing.T) {
	cfg := testConfig(t)
	c := NewClient(cfg)
	if _, err := c.Snapshots(t.Context()); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "cube up") {
		t.Errorf("without a daemon: %v", err)
	}
	l, err := net.Listen("unix", cfg.ControlSocket())
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	h := New(cfg, slog.New(slog.DiscardHandler)).Handler()
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		h.ServeHTTP(w, r)
	})}
	go srv.Serve(l)
	defer srv.Close()
	for _, id := range []string{"..", ".", "", "a/b", "a?b", "a b"} {
		if _, err := c.Save(t.Context(), id, ""); !errdefs.IsInvalidArgument(err) {
			t.Errorf("save %q: %v", id, err)
		}
		if _, err := c.DeleteSnapshot(t.Context(), id); !errdefs.IsInvalidArgument(err) {
			t.Errorf("delete %q: %v", id, err)
		}
		if _, err := c.Snapshot(t.Context(), id); !errdefs.IsInvalidArgument(err) {
			t.Errorf("inspect %q: %v", id, err)
		}
	}
	if asked > 0 {
		t.Errorf("%d of them were sent", asked)
	}
	if list, err := c.Snapshots(t.Context()); err != nil || list == nil || len(list) > 0 {
		t.Errorf("%v, %v", list, err)
	}
	if _, err := c.Snapshot(t.Context(), "none"); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	for _, name := range []string{"", "..", "a/b", "a b", "a:"} {
		if _, err := c.Template(t.Context(), "default", name); !errdefs.IsInvalidArgument(err) {
			t.Errorf("template %q: %v", name, err)
		}
	}
	if _, failed := c.Clone(t.Context(), "a", 101); len(failed) != 1 || !errdefs.IsInvalidArgument(failed[0]) {
		t.Error(failed)
	}
	if err := c.Rollback(t.Context(), "a", "x"); !errdefs.IsUnavailable(err) {
		t.Error(err)
	}
	// One that can't be read is told of, and can be deleted.
	if err := os.MkdirAll(filepath.Join(cfg.SnapshotDir(), "broken"), 0o700); err != nil {
		t.Fatal(err)
	}
	if list, err := c.Snapshots(t.Context()); err != nil || len(list) != 1 || list[0].Damage == "" {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := c.DeleteSnapshot(t.Context(), "broken"); err != nil {
		t.Error(err)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", "/v1/snapshots", nil))
	if w.Body.String() != "[]\n" {
		t.Errorf("an empty list is %q", w.Body)
	}
}
