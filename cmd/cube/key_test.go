package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// TestKeys: what `cube key create` prints is the key alone, which is nowhere else, and what is revoked is worth nothing.
func TestKeys(t *testing.T) {
	state := t.TempDir()
	file := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(file, []byte("state_dir = '"+state+"'\nrun_dir = '/nonexistent/cube/run'\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(config.FileEnv, file)
	run := func(args ...string) string {
		t.Helper()
		app := newApp()
		var stdout, stderr bytes.Buffer
		app.Writer = &stdout
		if code := runApp(t.Context(), app, append([]string{"cube", "key"}, args...), &stderr); code != 0 || stderr.Len() > 0 {
			t.Fatalf("cube key %q: %d, %s", args, code, stderr.String())
		}
		return stdout.String()
	}
	first, second := run("create"), run("create", "--team", "blue")
	for _, out := range []string{first, second} {
		if !regexp.MustCompile(`^e2b_[0-9a-f]{40}\n$`).MatchString(out) {
			t.Errorf("created %q", out)
		}
	}
	var lines []keyLine
	if err := json.Unmarshal([]byte(run("ls", "--json")), &lines); err != nil || len(lines) != 2 || lines[1].Team != "blue" {
		t.Fatalf("listed %+v, %v", lines, err)
	}
	run("revoke", lines[0].ID)
	table := run("ls")
	if strings.Contains(table, strings.TrimSpace(first)) || strings.Count(table, "revoked") != 1 || strings.Count(table, "good") != 1 {
		t.Errorf("the table is\n%s", table)
	}
	cfg, err := config.Load("")
	if err != nil {
		t.Fatal(err)
	}
	d, err := db.Open(t.Context(), cfg.DatabaseFile())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if team, _, err := d.Authenticate(t.Context(), strings.TrimSpace(second)); err != nil || team != "blue" {
		t.Errorf("the good one: %q, %v", team, err)
	}
	if _, _, err := d.Authenticate(t.Context(), strings.TrimSpace(first)); err == nil {
		t.Error("a revoked key is good")
	}
	code, msg := cube(t, "key", "revoke", strings.TrimSpace(first))
	if code != 1 || strings.Contains(msg, strings.TrimSpace(first)) || !strings.Contains(msg, "cube key ls") {
		t.Errorf("revoked twice: %d, %q", code, msg)
	}
}
