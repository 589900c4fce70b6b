package client

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

const testKey = "e2b_0123456789abcdef0123456789abcdef01234567"

// newTestClient makes a client of an API that a handler is.
func newTestClient(t *testing.T, api http.Handler, change func(*Options)) *Client {
	t.Helper()
	srv := httptest.NewServer(api)
	t.Cleanup(srv.Close)
	o := Options{API: srv.URL, Key: testKey, Sandbox: srv.URL}
	if change != nil {
		change(&o)
	}
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// TestSecretsStayHere: a key isn't sent in the clear to another machine, whatever names it, nor to where an answer points.
func TestSecretsStayHere(t *testing.T) {
	for _, u := range []string{"http://api.example.com", "http://192.0.2.1:3000", "http://localhost.example.com", "http://user:secret@192.0.2.1", "ftp://127.0.0.1", "api.example.com", "https://a/?x=1"} {
		for _, o := range []Options{{API: u, Key: testKey}, {API: "https://a", Sandbox: u, Key: testKey}} {
			_, err := New(o)
			if !errdefs.IsFailedPrecondition(err) && !errdefs.IsInvalidArgument(err) {
				t.Errorf("%s: %v", u, err)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("a password is told: %v", err)
			}
		}
	}
	for _, u := range []string{"https://api.example.com/base/", "http://127.0.0.1:3000", "http://[::1]:3000", "http://localhost", "http://api.sandbox.localhost:3002"} {
		if _, err := New(Options{API: u, Key: testKey}); err != nil {
			t.Errorf("%s: %v", u, err)
		}
	}
	if _, err := New(Options{API: "http://api.example.com", Key: testKey, AllowHTTP: true}); err != nil {
		t.Errorf("allowed: %v", err)
	}
	if _, err := New(Options{API: "https://a"}); !errdefs.IsUnauthorized(err) {
		t.Errorf("no key: %v", err)
	}
	var elsewhere atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	defer other.Close()
	c := newTestClient(t, http.RedirectHandler(other.URL, http.StatusFound), nil)
	if _, err := c.List(t.Context()); err == nil || elsewhere.Load() != 0 {
		t.Errorf("a redirection is followed: %v", err)
	}
}

// TestErrors are told with the API's words, of the class of its status, and so that no terminal obeys.
func TestErrors(t *testing.T) {
	var status int
	var body string
	c := newTestClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-API-KEY") != testKey {
			t.Error("no key")
		}
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	}), nil)
	for _, e := range []struct {
		status int
		body   string
		is     func(error) bool
		says   string
	}{
		{404, `{"code":404,"message":"sandbox 'i' not found"}`, errdefs.IsNotFound, "the API: sandbox 'i' not found; try again in 7 s"},
		{401, `{"code":401,"message":"no\u001b[2J key"}`, errdefs.IsUnauthorized, "the API: no [2J key"},
		{429, `{"message":"too many"}`, errdefs.IsResourceExhausted, "too many"},
		{503, `<html>`, errdefs.IsUnavailable, "503 Service Unavailable"},
		{502, `{"message":"The sandbox was not found"}`, errdefs.IsUnavailable, "was not found"},
		{500, `{"message":"` + strings.Repeat("x", 10000) + `"}`, errdefs.IsInternal, "xxx…"},
		{418, `{}`, func(err error) bool { return err != nil }, "418"},
	} {
		status, body = e.status, e.body
		_, err := c.Enter(t.Context(), "iabc")
		if !e.is(err) || !strings.Contains(err.Error(), e.says) || len(err.Error()) > 2*lineLimit {
			t.Errorf("%d %.50s: %v", e.status, e.body, err)
		}
	}
	if _, err := c.Enter(t.Context(), "../x"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("not an id: %v", err)
	}
	c.api.Host = "127.0.0.1:1"
	if _, err := c.List(t.Context()); !errdefs.IsUnavailable(err) || strings.Contains(err.Error(), testKey) {
		t.Errorf("nobody there: %v", err)
	}
}

func TestList(t *testing.T) {
	c := newTestClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch token := r.URL.Query().Get("nextToken"); token {
		case "":
			w.Header().Set("X-Next-Token", "t=1")
			fmt.Fprint(w, `[{"sandboxID":"i1","state":"running","metadata":{"a":"b"}}]`)
		case "t=1":
			fmt.Fprint(w, `[{"sandboxID":"i2","state":"paused","startedAt":"2026-01-31T12:00:00Z"}]`)
		default:
			t.Errorf("token %q", token)
		}
	}), nil)
	all, err := c.List(t.Context())
	if err != nil || len(all) != 2 || all[0].Metadata["a"] != "b" || all[1].State != "paused" || all[1].StartedAt.IsZero() {
		t.Errorf("%+v, %v", all, err)
	}
}

// TestWatch: a stream that breaks off is taken up again, and what has happened meanwhile is told.
func TestWatch(t *testing.T) {
	var streams atomic.Int32
	c := newTestClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch streams.Add(1) {
		case 1:
			fmt.Fprint(w, ":\n\nevent: sandboxes\ndata: [{\"sandboxID\":\"i1\",\"state\":\"running\"},{\"sandboxID\":\"i2\",\"state\":\"running\"}]\n\n"+
				"event: changed\ndata: {\"sandboxID\":\"i1\",\"state\":\"running\"}\n\n"+ // nothing that shows
				"event: changed\ndata: {\"sandboxID\":\"i1\",\"state\":\"paused\"}\n\n"+
				"event: gone\ndata: {\"sandboxID\":\"inone\"}\n\nevent: else\ndata: {}\n\n")
		case 2:
			fmt.Fprint(w, "event: error\ndata: {\"code\":503,\"message\":\"the API is being stopped\"}\n\n")
		case 3:
			w.WriteHeader(503)
		case 4:
			fmt.Fprint(w, "event: sandboxes\ndata: [{\"sandboxID\":\"i1\",\"state\":\"paused\"},{\"sandboxID\":\"i3\",\"state\":\"running\"}]\n\n")
		default:
			fmt.Fprint(w, "event: error\ndata: {\"code\":401,\"message\":\"the key is revoked\"}\n\n")
		}
	}), nil)
	var told []string
	err := c.Watch(t.Context(), func(change Change) error {
		text := fmt.Sprint(change.All)
		for _, sb := range change.Sandboxes {
			text += " " + sb.ID + " " + sb.State
		}
		for _, sb := range change.Gone {
			text += " " + sb.ID + " gone"
		}
		told = append(told, text)
		return nil
	})
	if !errdefs.IsUnauthorized(err) {
		t.Errorf("its end: %v", err)
	}
	if got, want := strings.Join(told, "\n"), "true i1 running i2 running\nfalse i1 paused\nfalse i3 running i2 gone"; got != want {
		t.Errorf("told:\n%s", got)
	}
}

// TestWatchFails: what can't be had at all isn't asked for again.
func TestWatchFails(t *testing.T) {
	c := newTestClient(t, http.NotFoundHandler(), nil)
	if err := c.Watch(t.Context(), nil); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	stop := errors.New("enough")
	c = newTestClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "event: sandboxes\ndata: []\n\n") }), nil)
	if err := c.Watch(t.Context(), func(Change) error { return stop }); !errors.Is(err, stop) {
		t.Error(err)
	}
}

// TestLogsGoOn: a log's stream that breaks off is taken up again after the last entry that was told, also where that was none.
func TestLogsGoOn(t *testing.T) {
	var streams atomic.Int32
	entry := func(id, message string) string {
		return fmt.Sprintf("id: %s\nevent: log\ndata: {\"message\":%q,\"level\":\"info\"}\n\n", id, message)
	}
	c := newTestClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := streams.Add(1)
		last := map[int32]string{1: "", 2: "", 3: "a-2", 4: "a-2", 5: "a-2"}[n]
		if got := r.Header.Get("Last-Event-ID"); got != last || r.URL.Query().Get("tail") != "5" {
			t.Errorf("stream %d begins after %q, %s", n, got, r.URL.RawQuery)
		}
		switch n {
		case 1:
			w.(http.Flusher).Flush() // nothing was written yet
			panic(http.ErrAbortHandler)
		case 2:
			fmt.Fprint(w, entry("a-1", "one")+":\n\n"+entry("a-2", "two")+"event: error\ndata: {\"code\":503,\"message\":\"cube is being stopped\"}\n\n")
		case 3:
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(503)
		case 4:
			panic(http.ErrAbortHandler)
		default:
			fmt.Fprint(w, entry("b-1", "three")+"event: end\ndata: {}\n\n")
		}
	}), nil)
	var lines []string
	err := c.Logs(t.Context(), "iabc", 5, true, func(e LogEntry) error { lines = append(lines, e.Message); return nil })
	if got := strings.Join(lines, " "); err != nil || got != "one two three" || streams.Load() != 5 {
		t.Errorf("%q by %d streams, %v", got, streams.Load(), err)
	}
	// One that can't be had any more isn't asked for for ever.
	streams.Store(1)
	c = newTestClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if streams.Add(1) > 2 {
			w.WriteHeader(503)
			return
		}
		fmt.Fprint(w, entry("a-1", "one"))
	}), func(o *Options) { o.Timeout = func(d time.Duration) time.Duration { return d / 300 } })
	began := time.Now()
	if err := c.Logs(t.Context(), "iabc", -1, true, func(LogEntry) error { return nil }); !errdefs.IsUnavailable(err) || time.Since(began) > 20*time.Second {
		t.Errorf("%v after %v", err, time.Since(began))
	}
}

// TestSilence: a stream that says nothing any more isn't waited for.
func TestSilence(t *testing.T) {
	gone := make(chan struct{})
	c := newTestClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "event: log\ndata: {\"message\":\"one\",\"level\":\"info\"}\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(gone)
	}), func(o *Options) { o.Timeout = func(d time.Duration) time.Duration { return d / 200 } })
	var lines []string
	err := c.Logs(t.Context(), "iabc", 3, true, func(e LogEntry) error { lines = append(lines, e.Message); return nil })
	if !errdefs.IsUnavailable(err) || len(lines) != 1 {
		t.Errorf("%q, %v", lines, err)
	}
	<-gone
}

func TestEnv(t *testing.T) {
	for _, name := range []string{EnvAPI, EnvKey, EnvSandbox, EnvCA, EnvAllowHTTP, envE2BAPI, envE2BKey, envE2BSandbox, envE2BDomain} {
		t.Setenv(name, "")
	}
	if o := FromEnv(); o.API != defaultAPI || o.Key != "" || o.AllowHTTP {
		t.Errorf("nothing set: %+v", o)
	}
	t.Setenv(envE2BDomain, "example.com")
	t.Setenv(envE2BKey, "their key")
	if o := FromEnv(); o.API != "https://api.example.com" || o.Key != "their key" {
		t.Errorf("E2B's: %+v", o)
	}
	t.Setenv(envE2BAPI, "https://a")
	t.Setenv(EnvKey, "key")
	t.Setenv(EnvAllowHTTP, "1")
	if o := FromEnv(); o.API != "https://a" || o.Key != "key" || !o.AllowHTTP {
		t.Errorf("%+v", o)
	}
	t.Setenv(EnvAPI, "https://b")
	if o := FromEnv(); o.API != "https://b" {
		t.Errorf("%+v", o)
	}
}

// hosts is an API and a proxy behind one TLS port, each by its host name.
func hosts(t *testing.T, detail string, port http.HandlerFunc) (*Client, *httptest.Server) {
	t.Helper()
	var srv *httptest.Server
	srv = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.Host, "api.") {
			fmt.Fprintf(w, detail, strings.Replace(srv.Listener.Addr().String(), "127.0.0.1", "example.localhost", 1))
			return
		}
		port(w, r)
	}))
	t.Cleanup(srv.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := New(Options{API: "https://api." + strings.Replace(srv.Listener.Addr().String(), "127.0.0.1", "example.localhost", 1), Key: testKey, CA: ca})
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range []*http.Client{c.http, c.upgrades} {
		h.Transport.(*http.Transport).TLSClientConfig.ServerName = "example.com" // the test's certificate is for that
	}
	t.Cleanup(c.Close)
	return c, srv
}

// TestDial: a port is reached by its host name and TLS, shown the token, and each side ends by itself.
func TestDial(t *testing.T) {
	c, _ := hosts(t, `{"sandboxID":"iabc","state":"running","domain":%q,"envdAccessToken":"token"}`, func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.Host, "5432-iabc.example.localhost:") || r.Header.Get(tokenHeader) != "token" || r.Header.Get("X-API-KEY") != "" || r.Header.Get("Upgrade") != "cube-tcp" {
			t.Errorf("%s %v", r.Host, r.Header)
		}
		w.Header().Set("Connection", "Upgrade")
		w.Header().Set("Upgrade", "cube-tcp")
		w.WriteHeader(http.StatusSwitchingProtocols)
		conn, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		said, err := io.ReadAll(buf)
		if err != nil {
			t.Error(err)
		}
		fmt.Fprint(conn, strings.ToUpper(string(said)))
	})
	g, err := c.Enter(t.Context(), "iabc")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	conn, err := g.Dial(ctx, 5432)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	cancel() // of the dialling alone
	if _, err := io.WriteString(conn, "hello"); err != nil {
		t.Fatal(err)
	}
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if back, err := io.ReadAll(conn); string(back) != "HELLO" || err != nil {
		t.Errorf("%q, %v", back, err)
	}
}

// TestDialRefused: the proxy's words get to the user.
func TestDialRefused(t *testing.T) {
	c, _ := hosts(t, `{"sandboxID":"iabc","state":"running","domain":%q}`, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusBadGateway)
		fmt.Fprint(w, `{"message":"The sandbox is running but port is not open","code":502}`)
	})
	g, err := c.Enter(t.Context(), "iabc")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Dial(t.Context(), 1); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "port is not open") {
		t.Error(err)
	}
}

// TestEnter: a paused sandbox isn't one to get into, unless a request wakes it.
func TestEnter(t *testing.T) {
	var body string
	c := newTestClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, body) }), nil)
	body = `{"sandboxID":"iabc","state":"paused"}`
	if _, err := c.Enter(t.Context(), "iabc"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("paused: %v", err)
	}
	body = `{"sandboxID":"iabc","state":"paused","lifecycle":{"autoResume":true}}`
	if _, err := c.Enter(t.Context(), "iabc"); err != nil {
		t.Errorf("paused, with autoResume: %v", err)
	}
	c.proxy = nil
	for _, domain := range []string{"", "evil.example/x", "a@b", "a b"} {
		body = fmt.Sprintf(`{"sandboxID":"iabc","state":"running","domain":%q}`, domain)
		if _, err := c.Enter(t.Context(), "iabc"); err == nil {
			t.Errorf("domain %q is taken", domain)
		}
	}
}
