package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/audit"
)

// TestAudit: what is asked for of the record is shown, of all of its files, also when its stack doesn't run.
func TestAudit(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(file, []byte("state_dir = '"+t.TempDir()+"'\nrun_dir = '/nonexistent/cube/run'\n[audit]\nmax_size = '64KiB'\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(config.FileEnv, file)
	run := func(args ...string) string {
		t.Helper()
		app := newApp()
		var stdout, stderr bytes.Buffer
		app.Writer = &stdout
		if code := runApp(t.Context(), app, append([]string{"cube"}, args...), &stderr); code != 0 {
			t.Fatalf("cube %q: %d, %s", args, code, stderr.String())
		}
		return stdout.String()
	}
	if got := run("audit"); strings.Count(got, "\n") != 1 {
		t.Errorf("before anything was done: %q", got)
	}
	run("key", "create", "--team", "blue")
	cfg, err := config.Load("")
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for n := range 600 { // of more than one file
		err := audit.Append(audit.FileOf(cfg), audit.Entry{Time: now.Add(time.Duration(n-600) * time.Second), Action: audit.Pause, Result: audit.OK, Team: "red", Sandbox: "ired", By: audit.By{Via: audit.Deadline}})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range []audit.Entry{
		{Action: audit.Restore, Result: audit.Failed, Error: "resource_exhausted", Team: "blue", Sandbox: "ichild", Origin: "iparent", Snapshot: "mine:v1", By: audit.By{Via: audit.API, Key: "k1", Request: "r1", From: "192.0.2.1:9"}},
		{Action: audit.Kill, Result: audit.OK, Team: "blue", Sandbox: "iold", By: audit.By{Via: audit.Retention}, Why: "retention: it is old"},
	} {
		if err := audit.Append(audit.FileOf(cfg), e); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		args  string
		lines int
		has   string
	}{
		{"--team blue", 4, "key-create"}, {"--sandbox iparent", 2, "restore     resource_exhausted    blue          ichild                api        k1"},
		{"--sandbox ichild", 2, "snapshot=mine:v1 of=iparent request=r1 from=192.0.2.1:9"}, {"--team blue --sandbox iold", 2, "retention: it is old"},
		{"--team red --since " + now.Add(-59500*time.Millisecond).Format(time.RFC3339Nano), 60, "deadline"}, {"--team red --since 1h", 601, "ired"}, {"--since 2999-01-01", 1, ""}, {"--team green", 1, ""}, {"", 604, "ired"},
	} {
		if got := run(append([]string{"audit"}, strings.Fields(c.args)...)...); strings.Count(got, "\n") != c.lines || !strings.Contains(got, c.has) {
			t.Errorf("cube audit %s has %d lines:\n%.1000s", c.args, strings.Count(got, "\n"), got)
		}
	}
	if e, err := audit.Parse([]byte(strings.TrimSpace(run("audit", "--sandbox", "iold", "--json")))); err != nil || e.Why != "retention: it is old" {
		t.Errorf("as JSON: %+v, %v", e, err)
	}
	if got := run("team", "ls"); !strings.Contains(got, "blue") || !strings.Contains(got, "good") {
		t.Errorf("teams:\n%s", got)
	}
	for args, want := range map[string]string{"audit --since yesterday": "is no time", "audit x": "no arguments", "team purge default": "--yes", "team purge": "which team", "team purge UP": "a-z", "team purge blue": "cube up"} {
		if code, msg := cube(t, strings.Fields(args)...); code != 1 || !strings.Contains(msg, want) {
			t.Errorf("cube %s: %d, %q", args, code, msg)
		}
	}
}
