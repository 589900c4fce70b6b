package guests

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

func quick(d time.Duration) time.Duration { return d / 10 }

// output is what is written by several.
type output struct {
	mu sync.Mutex
	b  strings.Builder
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// TestEnvd: the real one is told who it is, again with the token that it has, starts what goes on, and tells what it uses.
func TestEnvd(t *testing.T) {
	log := &output{}
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.NewJSONHandler(log, nil)))
	addr := netip.MustParseAddr("127.91.3.7") // whose port is nobody else's
	g, ctx := New(func(d time.Duration) time.Duration { return d }), t.Context()
	init := lifecycle.Init{SandboxID: "i1", TemplateID: "t1", Token: "first", Env: map[string]string{"GREETING": "hello"}, User: "root", Request: "r1"}
	told := make(chan error, 1)
	go func() { told <- g.Init(ctx, addr, init) }() // before there is anybody who listens
	life, end := context.WithCancel(ctx)
	defer end()
	ended := make(chan error, 1)
	time.AfterFunc(100*time.Millisecond, func() {
		ended <- envd.Run(life, envd.Config{Address: netip.AddrPortFrom(addr, Port).String(), User: "root"})
	})
	must(t, <-told)
	if v, err := g.Version(ctx, addr); err != nil || v != envd.Version {
		t.Errorf("version %q, %v", v, err)
	}
	out, err := g.Run(ctx, addr, "first", "echo $GREETING $E2B_SANDBOX_ID")
	if err != nil || out != "hello i1\n" {
		t.Errorf("its processes say %q, %v", out, err)
	}
	// A child of it has another token, and can't be told who it is without the former one.
	child := init
	child.SandboxID, child.Token, child.Request, child.Env = "i2", "second", "r2", nil
	if err := g.Init(ctx, addr, child); err == nil || !strings.Contains(err.Error(), "401") {
		t.Errorf("with a token that it doesn't have: %v", err)
	}
	child.Former = "first"
	must(t, g.Init(ctx, addr, child))
	must(t, g.Init(ctx, addr, child)) // it may have been told already
	if out, err := g.Run(ctx, addr, "second", "echo [$GREETING] $E2B_SANDBOX_ID"); err != nil || out != "[] i2\n" {
		t.Errorf("the child's processes say %q, %v", out, err)
	}
	if _, err := g.Run(ctx, addr, "first", "true"); err == nil {
		t.Error("the former token is good")
	}
	if out, err := g.Run(ctx, addr, "second", "echo why; exit 3"); err == nil || !strings.Contains(err.Error(), "exit status 3: why") {
		t.Errorf("a command that fails: %q, %v", out, err)
	}
	var stdout, stderr string
	exit, err := g.Exec(ctx, addr, "second", "printf %70000d 1; echo why >&2; exit 3", func(o lifecycle.Output) {
		if o.Stderr {
			stderr += string(o.Bytes)
		} else {
			stdout += string(o.Bytes)
		}
	})
	if err != nil || exit != (lifecycle.Exit{Code: 3, Status: "exit status 3"}) || len(stdout) != 70000 || stderr != "why\n" {
		t.Errorf("a command's output of %d bytes and %q, its end %+v, %v", len(stdout), stderr, exit, err)
	}
	if exit, err := g.Exec(ctx, addr, "second", "kill -9 $$", nil); err != nil || exit.Code != -1 || exit.Status != "signal: killed" {
		t.Errorf("a signal: %+v, %v", exit, err)
	}
	late, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := g.Exec(late, addr, "second", "exec sleep 36000", nil); err == nil || late.Err() == nil {
		t.Errorf("longer than it may: %v", err)
	}
	must(t, g.Start(ctx, addr, "second", "echo it is up; exec sleep 123.45"))
	if out, err := g.Run(ctx, addr, "second", "until pkill -xf 'sleep 123.45'; do sleep .05; done; echo ended"); err != nil || out != "ended\n" {
		t.Errorf("what was started doesn't go on: %q, %v", out, err)
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		text := log.String()
		if strings.Contains(text, `"msg":"it is up","command":"start","stream":"stdout"`) && strings.Contains(text, `"msg":"the command has ended","command":"start","how":"signal: terminated"`) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("envd's log:\n%s", text)
		}
	}
	if text := log.String(); strings.Contains(text, "hello i1") {
		t.Errorf("what others write is there, too:\n%s", text)
	}
	if m, err := g.Metrics(ctx, addr, "second"); err != nil || m.CPUs < 1 || m.MemTotal < 1<<20 || time.Since(m.At) > time.Minute {
		t.Errorf("metrics %+v, %v", m, err)
	}
	end()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// serve has a program of the sandbox answer, and returns where.
func serve(t *testing.T, h http.HandlerFunc) (netip.Addr, db.Hook) {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	at := srv.Listener.Addr().(*net.TCPAddr)
	return at.AddrPort().Addr(), db.Hook{Port: at.Port, Path: "/who"}
}

func TestHook(t *testing.T) {
	var mu sync.Mutex
	var bodies []lifecycle.HookBody
	connections := map[string]bool{}
	addr, hook := serve(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		var b lifecycle.HookBody
		if err := json.NewDecoder(r.Body).Decode(&b); err != nil {
			t.Error(err)
		}
		bodies = append(bodies, b)
		connections[r.RemoteAddr] = true
		if r.Method != http.MethodPost || r.URL.Path != "/who" || r.Header.Get(hookHeader) != "token" || r.Header.Get("Idempotency-Key") != "r1" || r.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%s %s with %v", r.Method, r.URL, r.Header)
		}
		// It isn't there yet, doesn't want to, goes away, and agrees.
		switch len(bodies) {
		case 1:
			w.WriteHeader(http.StatusNotFound)
		case 2:
			w.WriteHeader(http.StatusServiceUnavailable)
		case 3:
			panic(http.ErrAbortHandler)
		default:
			w.WriteHeader(http.StatusAccepted)
		}
	})
	body := lifecycle.HookBody{Event: "create", SandboxID: "i1", TemplateID: "t1", RequestID: "r1", Env: map[string]string{"A": "1"}, Metadata: map[string]string{"m": "2"}}
	must(t, New(quick).Hook(t.Context(), addr, hook, "token", body))
	if len(bodies) != 4 || len(connections) != 4 {
		t.Fatalf("%d requests by %d connections", len(bodies), len(connections))
	}
	for _, b := range bodies {
		if b.RequestID != "r1" || b.SandboxID != "i1" || b.Event != "create" || b.Env["A"] != "1" || b.Metadata["m"] != "2" {
			t.Errorf("it was told %+v", b)
		}
	}
}

// TestHookRefuses: what it says is told, in a line that does no harm, and isn't waited for where it won't change.
func TestHookRefuses(t *testing.T) {
	elsewhere, _ := serve(t, func(http.ResponseWriter, *http.Request) { t.Error("a redirect was followed") })
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		final  bool
		says   string
	}{
		"no": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusUnprocessableEntity)
			io.WriteString(w, "no such\r\n\x1b[31m\u009btenant\u202e")
		}, true, "it answers 422: no such ?[31m?tenant?"},
		"not now": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusInternalServerError)
			io.WriteString(w, "broken")
		}, false, "it answers 500: broken"},
		"elsewhere": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://"+elsewhere.String(), http.StatusTemporaryRedirect)
		}, true, "it answers 307"},
		"without end": {func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusForbidden)
			for r.Context().Err() == nil {
				if _, err := io.WriteString(w, strings.Repeat("blah ", 1000)); err != nil {
					return
				}
			}
		}, true, "blah"},
		"silence": {func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
		}, false, "no success in time"},
	} {
		t.Run(name, func(t *testing.T) {
			addr, hook := serve(t, c.answer)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			err := New(quick).Hook(ctx, addr, hook, "token", lifecycle.HookBody{})
			if errdefs.IsInvalidArgument(err) != c.final || errdefs.IsUnavailable(err) == c.final || !strings.Contains(err.Error(), c.says) || len(err.Error()) > 2*maxReason || strings.ContainsAny(err.Error(), "\r\n\x1b") {
				t.Errorf("the error is %q", err)
			}
			if (ctx.Err() == nil) != c.final {
				t.Errorf("it was given up early: %v", ctx.Err() == nil)
			}
		})
	}
	if err := New(quick).Hook(t.Context(), netip.MustParseAddr("127.0.0.1"), db.Hook{Port: 1, Path: "/\x00"}, "", lifecycle.HookBody{}); err == nil {
		t.Error("a path that is none")
	}
}
