package e2b

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/audit"
)

// newTeam is a client with the name of his team, which nobody else has.
func newTeam(t *testing.T) (*client, string) {
	t.Helper()
	c := newClient(t)
	team := fmt.Sprintf("keep-%d", time.Now().UnixNano())
	r := s.Cube("key", "create", "--team", team)
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	c.key = strings.TrimSpace(r.Stdout)
	return c, team
}

// cube runs a command of cube's that has to end with that code.
func (c *client) cube(code int, args ...string) string {
	c.Helper()
	r := s.Cube(args...)
	if r.Code != code {
		c.Fatalf("cube %s: %d, not %d\n%s%s", strings.Join(args, " "), r.Code, code, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// snapshot makes one of a sandbox, and returns its id.
func (c *client) snapshot(id, name string) string {
	c.Helper()
	var made struct{ SnapshotID string }
	c.do("POST", "/sandboxes/"+id+"/snapshots", map[string]any{"name": name}, &made, 201)
	return made.SnapshotID
}

// snapshots lists the names of the team's.
func (c *client) snapshots() (ids []string) {
	c.Helper()
	var all []struct{ SnapshotID string }
	c.do("GET", "/snapshots", nil, &all, 200)
	for _, one := range all {
		ids = append(ids, one.SnapshotID)
	}
	slices.Sort(ids)
	return ids
}

// audited are a team's entries, in words.
func (c *client) audited(team string) (words []string) {
	c.Helper()
	for line := range strings.Lines(c.cube(0, "audit", "--team", team, "--since", "1h", "--json")) {
		e, err := audit.Parse([]byte(line))
		if err != nil {
			c.Fatal(err)
		}
		words = append(words, fmt.Sprintf("%s %s %s", e.Action, e.Via, e.Result))
	}
	return words
}

// TestPurge: of a team that is purged nothing is left on the host, and what was done is recorded, without what is secret.
func TestPurge(t *testing.T) {
	c, team := newTeam(t)
	before := footprint(t)
	const secret = "hush-hush-value"
	runs, paused := c.create(map[string]any{"envVars": map[string]string{"TOKEN": secret}}), c.create(nil)
	snap := c.snapshot(runs.ID, "kept")
	c.create(map[string]any{"templateID": snap})
	c.do("POST", "/sandboxes/"+paused.ID+"/pause", nil, nil, 204)
	for _, list := range [][]string{{"snapshot", "ls"}, {"df", "-v"}} {
		if got := c.cube(0, list...); strings.Count(got, team) != 2 { // the snapshot, and what one is paused with
			t.Errorf("cube %s says of the team:\n%s", strings.Join(list, " "), got)
		}
	}
	const image = "registry.test/private:1"
	for _, args := range [][]string{{"image", "tag", "cube.local/base:bookworm", image}, {"image", "label", image, "io.cube.image-of." + team + "=true"}} {
		if r := s.Ctr(args...); r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	if got := c.cube(0, "team", "ls"); !strings.Contains(got, team) {
		t.Errorf("team ls:\n%s", got)
	}
	if r := s.Cube("team", "purge", "default"); r.Code == 0 || !strings.Contains(r.Stderr, "--yes") {
		t.Errorf("purge of default: %d, %s", r.Code, r.Stderr)
	}
	purged := c.cube(0, "team", "purge", team)
	if strings.Contains(purged, "left") || strings.Count(purged, "removed") < 7 || !strings.Contains(purged, paused.ID) {
		t.Errorf("purge says:\n%s", purged)
	}
	asBefore(t, before)
	if got := s.Ctr("image", "ls", "-q").Stdout; strings.Contains(got, image) || !strings.Contains(got, "cube.local/base:bookworm") {
		t.Errorf("images:\n%s", got)
	}
	if code, _, err := c.call("GET", "/v2/sandboxes", nil, nil); err != nil || code != 401 {
		t.Errorf("the key of the team that is gone: %d, %v", code, err)
	}
	if r := s.Cube("team", "purge", team); r.Code == 0 || !strings.Contains(r.Stderr, "no team") {
		t.Errorf("purge once more: %d, %s", r.Code, r.Stderr)
	}
	want := []string{"key-create cli ok", "create api ok", "create api ok", "snapshot api ok", "restore api ok", "pause api ok",
		"kill purge ok", "kill purge ok", "kill purge ok", "purge cli ok", "purge cli failed"}
	if got := c.audited(team); !slices.Equal(got, want) {
		t.Errorf("recorded: %q", got)
	}
	text, err := os.ReadFile(s.Config.AuditFile())
	if err != nil || bytes.Contains(text, []byte(secret)) || bytes.Contains(text, []byte(c.key)) || bytes.Contains(text, []byte(runs.Token)) {
		t.Errorf("the record has a secret: %v", err)
	}
	if st, err := os.Stat(s.Config.AuditFile()); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the record's file: %v, %v", st.Mode(), err)
	}
}

// TestPurgeTemplate: with its team a template goes, with all of its builds and what they have kept of their steps.
func TestPurgeTemplate(t *testing.T) {
	if !long() {
		t.Skip("it builds templates; CUBE_TEST_LONG=1 has it run")
	}
	c, team := newTeam(t)
	before := footprint(t)
	for range 2 {
		c.cube(0, "template", "build", "--team", team, "--memory", "512", "own", "cube.local/base:bookworm")
	}
	c.says(c.create(map[string]any{"templateID": "own"}), "echo here", "here")
	if got := c.cube(0, "df", "-v"); !strings.Contains(got, team) {
		t.Errorf("df says nothing of the team's builds:\n%s", got)
	}
	t.Log(c.cube(0, "team", "purge", team))
	asBefore(t, before)
	for _, want := range []string{"build cli ok", "create api ok", "purge cli ok"} {
		if got := c.audited(team); !slices.Contains(got, want) {
			t.Errorf("recorded: %q, without %q", got, want)
		}
	}
}

// TestRetention: what isn't kept is shown, and goes when somebody says so, or by itself as the configuration says.
func TestRetention(t *testing.T) {
	c, team := newTeam(t)
	defer func() { c.cube(0, "team", "purge", team) }()
	sb := c.create(nil)
	one, two := c.snapshot(sb.ID, "n:one"), c.snapshot(sb.ID, "n:two")
	dry := c.cube(0, "prune", "--dry-run", "--snapshot-keep", "1")
	if !strings.Contains(dry, one) || strings.Contains(dry, two) || !strings.Contains(dry, "retention") {
		t.Errorf("a look at what would go:\n%s", dry)
	}
	if got := c.snapshots(); len(got) != 2 {
		t.Errorf("after a look there are %q", got)
	}
	if got := c.cube(0, "prune", "--snapshot-keep", "1"); !strings.Contains(got, one) {
		t.Errorf("pruned:\n%s", got)
	}
	if got := c.snapshots(); !slices.Equal(got, []string{two}) {
		t.Errorf("after a prune there are %q", got)
	}

	file := os.Getenv(config.FileEnv)
	for _, e := range s.Command("cube").Env {
		if path, ok := strings.CutPrefix(e, config.FileEnv+"="); ok {
			file = path
		}
	}
	written, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	configure := func(text []byte) {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		cube := victims(false)[0]
		cube.dies(t)
		cube.returns(t)
		c.serves()
	}
	paused := c.create(nil)
	c.do("POST", "/sandboxes/"+paused.ID+"/pause", nil, nil, 204)
	configure(append(slices.Clone(written), fmt.Sprintf("\n[retention.team.%s]\nsnapshot_keep = 1\npaused_ttl = \"1s\"\n", team)...))
	defer configure(written)
	three := c.snapshot(sb.ID, "n:three")
	s.Eventually(t, 30*time.Second, "what isn't kept to go", func() bool { return c.state(paused.ID) == "" && slices.Equal(c.snapshots(), []string{three}) })
	var why struct{ Message string }
	if code, message, err := c.call("GET", "/sandboxes/"+paused.ID, nil, nil); err != nil || code != 404 || json.Unmarshal([]byte(message), &why) != nil || !strings.Contains(why.Message, "retention") {
		t.Errorf("why the paused one is gone: %d %s, %v", code, message, err)
	}
	if got := c.state(sb.ID); got != "running" {
		t.Errorf("the one that runs is %q", got)
	}
	got := c.audited(team)
	for want, n := range map[string]int{"delete retention ok": 2, "kill retention ok": 1} {
		if count := len(slices.DeleteFunc(slices.Clone(got), func(w string) bool { return w != want })); count != n {
			t.Errorf("%d times %q in %q", count, want, got)
		}
	}
}
