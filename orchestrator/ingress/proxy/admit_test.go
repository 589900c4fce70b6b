package proxy

import (
	"context"
	"crypto/sha256"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/auth"
	"github.com/cubesandbox/cube/orchestrator/ingress"
)

func TestTrafficToken(t *testing.T) {
	w := newWorld(t, mirror)
	sum := sha256.Sum256([]byte("token"))
	w.route.AllowPublic, w.route.TrafficToken = false, sum[:]
	w.put(w.route)
	const missing = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
	const invalid = "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"
	eventually(t, "it stays public", func() bool {
		resp, body := w.get(t, "/")
		return resp.StatusCode == 403 && answerOf(t, body).Message == missing
	})
	if resp, body := w.get(t, "/", "E2B-TRAFFIC-ACCESS-TOKEN", "tokem"); resp.StatusCode != 403 || answerOf(t, body).Message != invalid {
		t.Error(resp.Status, body)
	}
	if resp, body := w.get(t, "/", "e2b-traffic-access-token", "token"); resp.StatusCode != 200 || strings.Contains(body, "oken") {
		t.Error(resp.Status, body)
	}
	// envd's port asks for its own.
	if resp, body := w.get(t, "/health", "Host", "49983-"+id+"."+domain); resp.StatusCode != 502 || answerOf(t, body).Port != 49983 {
		t.Error(resp.Status, body)
	}
	w.route.TrafficToken = nil
	w.put(w.route)
	eventually(t, "it opens without a token to compare with", func() bool {
		resp, _ := w.get(t, "/", "e2b-traffic-access-token", "token")
		return resp.StatusCode == 403
	})
}

func TestWake(t *testing.T) {
	w := newWorld(t, mirror)
	paused := w.route
	paused.State, paused.Addr, paused.Epoch = "paused", netip.Addr{}, ""
	w.put(paused)
	eventually(t, "a paused sandbox that isn't woken is found", func() bool {
		resp, body := w.get(t, "/")
		return resp.StatusCode == 502 && answerOf(t, body).Message == "The sandbox was not found"
	})
	paused.AutoResume, paused.Secure, paused.EnvdToken = true, true, "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"
	w.put(paused)
	var wakes atomic.Int32
	for class, status := range map[error]int{
		errdefs.ErrPermissionDenied: 403, errdefs.ErrFailedPrecondition: 409, errdefs.ErrConflict: 409, errdefs.ErrResourceExhausted: 429,
		errdefs.ErrUnavailable: 503, errdefs.ErrNotFound: 502,
	} {
		w.wake = func(context.Context, string) (ingress.Route, error) { return ingress.Route{}, class }
		resp, body := w.get(t, "/")
		if resp.StatusCode != status || answerOf(t, body).Code != status || (status == 429 || status == 503) != (resp.Header.Get("Retry-After") != "") {
			t.Errorf("%v: %s %s", class, resp.Status, body)
		}
	}
	envd := "49983-" + id + "." + domain
	w.wake = func(context.Context, string) (ingress.Route, error) {
		wakes.Add(1)
		return ingress.Route{}, errdefs.ErrConflict
	}
	for _, tc := range []struct {
		path   string
		header []string
		wakes  bool
	}{
		{"/health", nil, false},
		{"/health", []string{"X-Access-Token", "wrong"}, false},
		{"/health", []string{"X-Access-Token", paused.EnvdToken}, true},
		{"/files?path=hello.txt&username=user", nil, false},
		{"/files?path=hello.txt&username=user&signature=v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E", nil, true},
		{"/files?path=hello.txt&username=root&signature=v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E", nil, false},
		{"/envs?path=hello.txt&username=user&signature=v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E", nil, false},
		{"/files?path=x&signature_expiration=1&signature=" + auth.Sign("x", auth.Read, "", paused.EnvdToken, new(int64(1))), nil, false},
	} {
		before := wakes.Load()
		resp, body := w.get(t, tc.path, append(tc.header, "Host", envd)...)
		if woken := wakes.Load() > before; woken != tc.wakes || !woken && resp.StatusCode != 403 {
			t.Errorf("%s %q: woken %v, %s %s", tc.path, tc.header, woken, resp.Status, body)
		}
	}
	// Many ask, one wakes; all get there.
	wakes.Store(0)
	release := make(chan struct{})
	w.wake = func(context.Context, string) (ingress.Route, error) {
		wakes.Add(1)
		<-release
		r := w.route
		r.Epoch = "e2"
		w.put(ingress.Route{SandboxID: id, State: "resuming", AutoResume: true})
		return w.put(r), nil
	}
	const n = 30
	results := make(chan int, n)
	for range n {
		go func() {
			r := w.request(t, http.MethodGet, "/", nil)
			resp, err := w.server.Client().Do(r)
			if err != nil {
				results <- 0
				return
			}
			resp.Body.Close()
			results <- resp.StatusCode
		}()
	}
	eventually(t, "nobody wakes it", func() bool { return wakes.Load() == 1 })
	close(release)
	for range n {
		if status := <-results; status != 200 {
			t.Error(status)
		}
	}
	if wakes.Load() != 1 {
		t.Errorf("woken %d times", wakes.Load())
	}
}
