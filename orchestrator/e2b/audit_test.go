package e2b

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/orchestrator/audit"
)

// listener hears on whose behalf it is asked.
type listener struct {
	*fakeEngine
	by audit.By
}

func (l *listener) Kill(ctx context.Context, team, id string) error {
	l.by = audit.Of(ctx)
	return l.fakeEngine.Kill(ctx, team, id)
}

// TestOnBehalf: the engine is told who asks, by the key's id and never the key.
func TestOnBehalf(t *testing.T) {
	s, engine := newTestServer(t, nil)
	l := &listener{fakeEngine: engine}
	s.engine = l
	r := httptest.NewRequest(http.MethodDelete, "/sandboxes/i00000000000000000001", nil)
	r.Header.Set("X-API-Key", testKey)
	r.Header.Set("X-Request-Id", "of-"+testKey)
	r.Header.Set("X-Forwarded-For", "198.51.100.1") // which anybody may write
	r.RemoteAddr = "192.0.2.7:4711"
	s.Handler().ServeHTTP(httptest.NewRecorder(), r)
	if want := (audit.By{Via: audit.API, Key: "key-blue", Request: "of-e2b_…", From: "192.0.2.7:4711"}); l.by != want {
		t.Errorf("on behalf of %+v, not %+v", l.by, want)
	}
	if strings.Contains(l.by.Request, testKey) {
		t.Error("the key is told")
	}
}
