package e2b

import (
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// hooked makes the template of TestHook: its server runs when it is saved, and a command is started in each sandbox.
func hooked(t *testing.T) {
	t.Helper()
	server, err := os.ReadFile("testdata/hook.py")
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"template", "build", "--public", "--memory", "512", "--hook-port", "8000", "--hook-path", "/who",
		"--run", "cat > server.py <<'EOF'\n" + string(server) + "EOF\nexec python3 server.py", "--ready", "pgrep -f '^python3 server'",
		"--start", `echo "$KEY $E2B_SANDBOX_ID" | tee -a started; exec sleep 7654`, "hooked", "cube.local/base:bookworm"}
	if r := s.Cube(args...); r.Err != nil {
		t.Fatal(r.Err)
	}
}

// told is what a sandbox's hook has been told and took, in order.
type told struct {
	Event      string            `json:"event"`
	SandboxID  string            `json:"sandboxId"`
	TemplateID string            `json:"templateId"`
	RequestID  string            `json:"requestId"`
	Env        map[string]string `json:"env"`
	Metadata   map[string]string `json:"metadata"`
	Tries      int               `json:"tries"` // until it took it
}

// hooks sees that a sandbox's hook has taken those events, and returns what it was told by the last one.
func (c *client) hooks(sb sandbox, events ...string) told {
	c.Helper()
	out, err := c.run(sb, "cat taken")
	if err != nil {
		c.Fatal(err)
	}
	var got []string
	var last told
	for line := range strings.Lines(out) {
		last = told{}
		if err := json.Unmarshal([]byte(line), &last); err != nil {
			c.Fatalf("%q: %v", line, err)
		}
		got = append(got, last.Event)
	}
	if strings.Join(got, " ") != strings.Join(events, " ") {
		c.Errorf("%s: its hook has taken %q, not %q", sb.ID, got, events)
	}
	if last.SandboxID != sb.ID || last.RequestID == "" {
		c.Errorf("%s: its hook was told %+v", sb.ID, last)
	}
	return last
}

// started sees that the start command of each of a sandbox's lives has come so far as to write those lines.
func (c *client) started(sb sandbox, lines string) {
	c.Helper()
	var got string
	var err error
	defer func() {
		if c.Failed() {
			c.Logf("its start command has written %q, %v", got, err)
		}
	}()
	s.Eventually(c, time.Minute, "its start command", func() bool {
		got, err = c.run(sb, "cat started")
		return err == nil && got == lines+"\n"
	})
}

// TestHook: a program that was saved with the template hears of each new life of a sandbox, from the control plane alone, before
// anybody else gets there. The template's start command is started for each sandbox, once.
func TestHook(t *testing.T) {
	hooked(t)
	c := newClient(t)
	sb := c.create(map[string]any{"templateID": "hooked", "envVars": map[string]string{"KEY": "one", "HOOK": "later"}, "metadata": map[string]string{"of": "mine"}})
	at := "/sandboxes/" + sb.ID
	if got := c.hooks(sb, "create"); got.Env["KEY"] != "one" || got.Metadata["of"] != "mine" || got.TemplateID == "" || got.Tries != 3 {
		t.Errorf("by a create it was told %+v", got)
	}
	c.started(sb, "one "+sb.ID)
	const running = "for i in $(seq 100); do pgrep -x -f 'sleep 7654' >/dev/null && break; sleep .1; done; pgrep -c -x -f 'sleep 7654'; pgrep -c -f '^python3 server'"
	c.says(sb, running, "1\n1")
	var log struct{ Logs []struct{ Message string } }
	s.Eventually(t, time.Minute, "what the start command writes", func() bool {
		c.do("GET", "/v2"+at+"/logs?search=one", nil, &log, 200)
		return len(log.Logs) > 0
	})
	if len(log.Logs) != 1 || log.Logs[0].Message != "one "+sb.ID {
		t.Errorf("of what the start command writes, its log has %+v", log.Logs)
	}
	// Others don't have the token.
	c.says(sb, `curl -s -o /dev/null -w '%{http_code}' -H 'X-Cube-Hook-Token: guess' -d '{}' localhost:8000/who; stat -c ' %U %a' /run/e2b/.E2B_HOOK_TOKEN`, "401 user 400")

	// Without its memory it boots with the server, which isn't there at once.
	c.do("POST", at+"/pause", map[string]any{"memory": false}, nil, 204)
	c.do("POST", "/v2"+at+"/connect", map[string]any{"timeout": 3600}, &sb, 201)
	c.hooks(sb, "create", "resume")
	started := "one " + sb.ID + "\none " + sb.ID
	c.started(sb, started)
	c.says(sb, running, "1\n1")

	// Keys are changed while it runs.
	named := *c
	named.request = "rotation-1"
	for range 2 {
		named.do("POST", at+"/init", map[string]any{"envVars": map[string]string{"KEY": "two"}}, nil, 204)
	}
	if got := c.hooks(sb, "create", "resume", "init"); got.Env["KEY"] != "two" || got.RequestID != "rotation-1" {
		t.Errorf("by an init it was told %+v", got)
	}
	c.says(sb, "echo $KEY", "two")
	for body, field := range map[string]map[string]any{
		"E2B_SANDBOX_ID": {"envVars": map[string]string{"E2B_SANDBOX_ID": "iother"}},
		"sandboxId":      {"envVars": map[string]string{}, "sandboxId": "iother"},
		"metadata":       {"envVars": map[string]string{}, "metadata": map[string]string{"of": "others"}},
	} {
		if code, message, err := c.call("POST", at+"/init", field, nil); err != nil || code != 400 || !strings.Contains(message, body) {
			t.Errorf("%s: %d %s, %v", body, code, message, err)
		}
	}

	// Each child is told for itself, and the parent nothing.
	var children []struct{ Sandbox sandbox }
	c.do("POST", at+"/fork", map[string]any{"count": 2, "timeout": 3600}, &children, 201)
	tokens := map[string]bool{}
	for _, child := range children {
		if got := c.hooks(child.Sandbox, "create", "resume", "init", "fork"); got.Env["KEY"] != "two" {
			t.Errorf("by a fork it was told %+v", got)
		}
		c.started(child.Sandbox, started+"\ntwo "+child.Sandbox.ID)
		token, err := c.run(child.Sandbox, "cat /run/e2b/.E2B_HOOK_TOKEN")
		if tokens[token] || err != nil {
			t.Errorf("two have the token %q, %v", token, err)
		}
		tokens[token] = true
		c.do("DELETE", "/sandboxes/"+child.Sandbox.ID, nil, nil, 204)
	}
	c.hooks(sb, "create", "resume", "init")

	var saved struct {
		ID string `json:"snapshotID"`
	}
	c.do("POST", at+"/snapshots", nil, &saved, 201)
	c.says(sb, "touch later; echo done", "done")
	c.do("POST", at+"/rollback", map[string]any{"snapshotID": saved.ID}, nil, 204)
	c.hooks(sb, "create", "resume", "init", "rollback")
	c.says(sb, "ls later 2>/dev/null; echo $KEY; cat started", "two\n"+started)

	// A sandbox whose hook refuses isn't there, nor is one that comes back.
	code, message, err := c.call("POST", "/v2/sandboxes", map[string]any{"templateID": "hooked", "envVars": map[string]string{"HOOK": "refuse"}}, nil)
	if err != nil || code != http.StatusBadRequest || !strings.Contains(message, "init hook of its template, port 8000, path /who: it answers 422: no such tenant") {
		t.Errorf("refused: %d %s, %v", code, message, err)
	}
	if all := c.list(); len(all) != 1 {
		t.Errorf("there are %v", all)
	}
	c.says(sb, "touch refuse-resume; echo done", "done")
	c.do("POST", at+"/pause", nil, nil, 204)
	if code, message, err := c.call("POST", "/v2"+at+"/connect", nil, nil); err != nil || code != http.StatusBadRequest || !strings.Contains(message, "no such tenant") {
		t.Errorf("refused: %d %s, %v", code, message, err)
	}
	if got := c.state(sb.ID); got != "paused" {
		t.Errorf("it is %q", got)
	}
	c.killAll()
	c.do("DELETE", "/templates/"+strings.ReplaceAll(saved.ID, ":", "%3A"), nil, nil, 204)
}
