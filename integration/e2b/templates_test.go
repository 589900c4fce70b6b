package e2b

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/integration/sdks"
)

// TestTemplates has E2B's SDK build templates, by the domain alone, and what it has made be seen, built anew and deleted from here.
func TestTemplates(t *testing.T) {
	node, scripts := sdks.Path(t, "sdk/node"), sdks.Scripts(t, "sdk")
	cmd := byDomain(t, s.Host.Command(node, filepath.Join(scripts, "main.mjs"), "e2b", "templates"))
	cmd.Env = append(cmd.Env, "E2B_API_KEY="+key(t, "own"))
	sdks.Run(t, cmd, 8)

	team := []string{"--team", "ttesttemplatesown"}
	run := func(args ...string) string {
		t.Helper()
		r := s.Cube(append(append([]string{"template"}, args...), team...)...)
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		return r.Stdout
	}
	got := run("inspect", "whole") + run("inspect", "unready")
	for _, want := range []string{`"whole"`, `"production"`, `"state": "ready"`, `"state": "error"`, `"template": "whole:v1"`, `"digest": "sha256:`} {
		if !strings.Contains(got, want) {
			t.Errorf("there is no %s in %s", want, got)
		}
	}
	r := s.Cube(append([]string{"template", "rebuild", "--outdated", "child"}, team...)...)
	if r.Err != nil || r.Stdout != "" || !strings.Contains(r.Stderr, "isn't outdated") {
		t.Errorf("%+v", r)
	}
	run("rm", "child", "unready", "failing", "whole")
	if r := s.Cube("template", "ls", "--json"); r.Err != nil || strings.Contains(r.Stdout, "ttesttemplatesown") {
		t.Errorf("%+v", r)
	}
}
