package e2b

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/machines"
)

// long tells whether tests are to try all that they can.
func long() bool { return os.Getenv("CUBE_TEST_LONG") != "" }

// victim is a process that serves sandboxes.
type victim struct {
	name  string
	words []string // of its command line
	// up: it is cube, which somebody has to start again.
	up bool
}

// victims are the processes that serve all sandboxes, or cube alone.
func victims(all bool) []victim {
	v := []victim{{"cube", []string{" up --daemon"}, true}, {"containerd", []string{"bin/containerd "}, false}, {"proxy", []string{"proxy --keeper"}, false}}
	if !all {
		return v[:1]
	}
	return v
}

func (v victim) dies(t *testing.T) {
	t.Helper()
	end(t, v.words...)
}

func (v victim) returns(t *testing.T) {
	t.Helper()
	if !v.up {
		return
	}
	if r := s.Cube("up", "-d"); r.Err != nil {
		t.Fatal(r.Err)
	}
}

// end kills the stack's processes whose command line has the words, and waits for their end.
func end(t *testing.T, words ...string) {
	t.Helper()
	killed := 0
	for _, p := range s.Processes(words[0]) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(p.Command, w) }) {
			s.End(t, p.PID, unix.SIGKILL)
			killed++
		}
	}
	if killed == 0 {
		t.Fatalf("there is no process %q", words)
	}
}

// leaves waits until sandboxes aren't in a state any more, as the control plane has written it down: what API clients see is coarser.
func leaves(t *testing.T, state string, ids ...string) {
	t.Helper()
	d, err := db.Open(t.Context(), s.Config.DatabaseFile())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	s.Eventually(t, time.Minute, fmt.Sprintf("%v to leave the state %s", ids, state), func() bool {
		rows, err := d.SandboxesIn(t.Context(), state)
		if err != nil {
			t.Fatal(err)
		}
		return !slices.ContainsFunc(rows, func(r db.Sandbox) bool { return slices.Contains(ids, r.ID) })
	})
}

// marks has a sandbox remember a word where only its memory has it, and a process that says so as long as it lives.
func (c *client) marks(sb sandbox, word string) {
	c.Helper()
	c.says(sb, fmt.Sprintf("echo %s > /dev/shm/word; (exec -a %[1]s sleep 36000) > /dev/null 2>&1 & sync; echo done", word), "done")
}

// goesOn sees that a sandbox is the one that was marked, with what ran in it.
func (c *client) goesOn(sb sandbox, word string) {
	c.Helper()
	c.says(sb, fmt.Sprintf("cat /dev/shm/word; pgrep -fc '^%s 36000'", word), word+"\n1")
}

// serves waits until the API serves again.
func (c *client) serves() {
	c.Helper()
	s.Eventually(c, time.Minute, "the API", func() bool {
		code, _, err := c.call("GET", "/v2/sandboxes", nil, nil)
		return err == nil && code == 200
	})
}

// settled sees that there is a container for each of the client's sandboxes, who is alone, and no other, and that all of them can be
// used.
func (c *client) settled(known map[string]sandbox) {
	c.Helper()
	var odd string
	s.Eventually(c, time.Minute, "a container for each sandbox", func() bool {
		odd = ""
		containers := map[string]bool{}
		for _, id := range strings.Fields(s.Ctr("container", "ls", "-q", fmt.Sprintf("labels.%q", machines.Label)).Stdout) {
			containers[id] = true
		}
		all := c.list()
		for id := range all {
			if !containers[id] {
				odd += " no container of sandbox " + id
			}
		}
		for id := range containers {
			if _, ok := all[id]; !ok {
				odd += " no sandbox of container " + id
			}
		}
		return odd == ""
	})
	for id := range c.list() {
		var sb sandbox
		code, message, err := c.call("POST", "/v2/sandboxes/"+id+"/connect", map[string]any{"timeout": 3600}, &sb)
		if err != nil || code != 200 && code != 201 {
			c.Fatalf("connect to %s: %d %s, %v", id, code, message, err)
		}
		if was, ok := known[id]; ok && (sb.ID != id || sb.Token != was.Token) {
			c.Errorf("%s has become %s, with the same token: %t", id, sb.ID, sb.Token == was.Token)
		}
		c.says(sb, "echo here", "here")
	}
}

func (c *client) killAll() {
	c.Helper()
	for id := range c.list() {
		c.do("DELETE", "/sandboxes/"+id, nil, nil, 204)
	}
}
