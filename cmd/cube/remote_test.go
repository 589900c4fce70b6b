package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
)

// outside is the command as who has a key of an API runs it.
func outside(t *testing.T, api http.HandlerFunc) (run func(args ...string) (code int, stdout, stderr string)) {
	t.Helper()
	configure(t)
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	srv := httptest.NewServer(api)
	t.Cleanup(srv.Close)
	t.Setenv("CUBE_API_URL", srv.URL)
	t.Setenv("CUBE_API_KEY", "e2b_secret")
	t.Setenv("CUBE_SANDBOX_URL", srv.URL)
	return func(args ...string) (int, string, string) {
		t.Helper()
		app := newApp()
		var stdout, stderr bytes.Buffer
		app.Writer, app.ErrWriter = &stdout, &stderr
		code := runApp(t.Context(), app, append([]string{"cube"}, args...), &stderr)
		if strings.Contains(stdout.String()+stderr.String(), "e2b_secret") {
			t.Errorf("cube %q tells the key", args)
		}
		return code, stdout.String(), stderr.String()
	}
}

func TestSandboxesFromOutside(t *testing.T) {
	const one = `{"sandboxID":"i1","templateID":"t","alias":"base","state":"running","startedAt":"2026-01-31T12:00:00Z","endAt":"2026-01-31T12:05:00Z","metadata":{"b":"2\u001b[2J","a":"1"}}`
	run := outside(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v2/sandboxes":
			fmt.Fprint(w, "["+one+"]")
		case "/sandboxes/events":
			fmt.Fprint(w, "event: sandboxes\ndata: ["+one+"]\n\nevent: gone\ndata: {\"sandboxID\":\"i1\"}\n\nevent: error\ndata: {\"code\":401,\"message\":\"the key is revoked\"}\n\n")
		case "/sandboxes/i1/logs/events":
			fmt.Fprintf(w, "event: log\ndata: {\"timestamp\":\"2026-01-31T12:00:00Z\",\"level\":\"warn\",\"message\":\"asked %s\\u001b[2J\",\"fields\":{\"b\":\"2\",\"a\":\"1\"}}\n\nevent: end\ndata: {}\n\n", r.URL.RawQuery)
		default:
			w.WriteHeader(404)
			fmt.Fprint(w, `{"code":404,"message":"sandbox 'i2' not found"}`)
		}
	})
	for _, c := range []struct {
		args  string
		code  int
		words []string
	}{
		{"ps", 0, []string{"ID", "METADATA\n", "i1   base", "running", "ago", "in Less than a second", "a=1 b=2 [2J\n"}},
		{"ps -q", 0, []string{"i1\n"}},
		{"ps --json", 0, []string{`"sandboxID": "i1"`}},
		{"ps -w", 1, []string{"STATE", "i1", "running", "gone", "-", "cube: ps: the API: the key is revoked\n"}},
		{"ps -w --json", 1, []string{`"state":"running"`, `"state":"gone"`}},
		{"ps x", 1, []string{"no arguments"}},
		{"logs i1 -n 3 -f", 0, []string{"WARN  asked follow=true&tail=3 [2J a=1 b=2\n"}},
		{"logs i1 -n -1", 1, []string{"negative"}},
		{"logs", 1, []string{"one id"}},
		{"logs ../i1", 1, []string{"isn't a sandbox's id"}},
		{"ssh", 1, []string{"ssh: which sandbox?"}},
		{"ssh -oProxyCommand=x", 1, []string{"cube ssh --help"}},
		{"ssh -l a ../x", 1, []string{"ssh: ", "isn't a sandbox's id"}},
		{"ssh --stdio i2", 1, []string{"ssh: the API: sandbox 'i2' not found"}},
		{"ssh --config", 0, []string{"Host *.cube\n", "User default\n", " ssh --stdio %n\n", "StrictHostKeyChecking yes\n", "cube/ssh_known_hosts\n"}},
		{"port-forward i1", 1, []string{"at least one port"}},
		{"port-forward i1 80:", 1, []string{`"80:" isn't`}},
		{"port-forward i1 65536", 1, []string{"65535"}},
		{"port-forward i1 8080:0", 1, []string{"isn't"}},
		{"port-forward i2 0:80", 1, []string{"port-forward: the API: sandbox 'i2' not found"}},
	} {
		code, stdout, stderr := run(strings.Fields(c.args)...)
		for _, w := range c.words {
			if !strings.Contains(stdout+stderr, w) {
				t.Errorf("cube %s: no %q in %q and %q", c.args, w, stdout, stderr)
			}
		}
		if code != c.code {
			t.Errorf("cube %s: %d", c.args, code)
		}
	}
	t.Setenv("E2B_API_KEY", "")
	if err := os.Unsetenv("CUBE_API_KEY"); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := run("ps"); code != 1 || !strings.Contains(stderr, "set CUBE_API_KEY to what `cube key create`") {
		t.Errorf("without a key: %d %s", code, stderr)
	}
	t.Setenv("CUBE_API_KEY", "e2b_secret")
	t.Setenv("CUBE_API_URL", "http://192.0.2.1:3000")
	if code, _, stderr := run("ps"); code != 1 || !strings.Contains(stderr, "CUBE_ALLOW_HTTP=1") {
		t.Errorf("in the clear: %d %s", code, stderr)
	}
}
