package proxy

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"
)

func TestAPI(t *testing.T) {
	api := httptest.NewServer(mirror)
	c := newControl()
	p := New(Options{
		Domain: domain, API: netip.MustParseAddrPort(api.Listener.Addr().String()), Routes: c,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Scale: func(d time.Duration) time.Duration { return d },
	})
	w := &world{control: c, proxy: p, server: httptest.NewServer(p)}
	defer w.server.Close()
	resp, got := w.get(t, "/v2/sandboxes?metadata=k%253Dv&x;y", "Host", "api."+domain+":3002", "X-API-KEY", "e2b_0", "Connection", "Upgrade", "Upgrade", "x")
	if resp.StatusCode != 200 || !strings.HasPrefix(got, "GET /v2/sandboxes?metadata=k%253Dv&x;y HTTP/1.1\nHost: api."+domain+":3002\n") ||
		!strings.Contains(got, "X-Api-Key: e2b_0") || strings.Contains(got, "Upgrade") {
		t.Error(resp.Status, got)
	}
	api.Close()
	resp, got = w.get(t, "/v2/sandboxes", "Host", "api."+domain)
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || answerOf(t, got).Code != 503 {
		t.Error(resp.Status, got)
	}
}
