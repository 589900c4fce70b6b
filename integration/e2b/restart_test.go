package e2b

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/orchestrator/machines"
)

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

// end kills the stack's processes whose command line has the words, and waits for their end.
func end(t *testing.T, words ...string) {
	t.Helper()
	killed := 0
	for _, p := range s.Processes(words[0]) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(p.Command, w) }) {
			kill(t, p.PID)
			killed++
		}
	}
	if killed == 0 {
		t.Fatalf("there is no process %q", words)
	}
}

func kill(t *testing.T, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		t.Fatal(err)
	}
	for {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(s.Config.Timeout(time.Minute).Milliseconds()))
		if !errors.Is(err, unix.EINTR) { // the runtime's own signals
			return
		}
	}
}

// serves waits until the API serves again.
func (c *client) serves() {
	c.Helper()
	s.Eventually(c, time.Minute, "the API", func() bool {
		code, _, err := c.call("GET", "/v2/sandboxes", nil, nil)
		return err == nil && code == 200
	})
}

// settled sees that there is a container for each sandbox and no other, and that all of them can be used.
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
	if odd != "" {
		c.Error(odd)
	}
	for id, sb := range c.list() {
		if was, ok := known[id]; ok {
			sb = was
		}
		c.do("POST", "/v2/sandboxes/"+id+"/connect", map[string]any{"timeout": 3600}, &sb, map[string]int{"running": 200, "paused": 201}[c.state(id)])
		c.says(sb, "echo here", "here")
	}
}

func (c *client) killAll() {
	c.Helper()
	for id := range c.list() {
		c.do("DELETE", "/sandboxes/"+id, nil, nil, 204)
	}
}

// TestRestarts has what serves sandboxes die, while some run, some are paused, and some are about to be: nothing is lost, nothing is
// left, and what the API says is so.
func TestRestarts(t *testing.T) {
	for _, victim := range []struct {
		name  string
		words []string
		up    bool // who has to start it again
	}{
		{"cube", []string{" up --daemon"}, true},
		{"containerd", []string{"bin/containerd "}, false},
		{"proxy", []string{"proxy --keeper"}, false},
	} {
		t.Run(victim.name, func(t *testing.T) {
			c := newClient(t)
			runs, paused, pausing, forking := c.create(nil), c.create(nil), c.create(nil), c.create(nil)
			known := map[string]sandbox{runs.ID: runs, paused.ID: paused, pausing.ID: pausing, forking.ID: forking}
			for id, sb := range known {
				c.marks(sb, "mark"+id)
			}
			c.do("POST", "/sandboxes/"+paused.ID+"/pause", nil, nil, 204)
			under := make(chan string, 3)
			for _, what := range []struct {
				path string
				body any
			}{
				{"/sandboxes/" + pausing.ID + "/pause", nil},
				{"/sandboxes/" + forking.ID + "/fork", map[string]any{"count": 2, "timeout": 3600}},
				{"/v2/sandboxes", map[string]any{"templateID": "base", "timeout": 3600}},
			} {
				go func() {
					code, message, err := c.call("POST", what.path, what.body, nil)
					under <- fmt.Sprintf("%s: %d %s %v", what.path, code, message, err)
				}()
			}
			time.Sleep(s.Config.Timeout(time.Second)) // some way into them, wherever that is
			end(t, victim.words...)
			for range cap(under) {
				t.Log(<-under)
			}
			if victim.up {
				if r := s.Cube("up", "-d"); r.Err != nil {
					t.Fatal(r.Err)
				}
			}
			c.serves()
			for id, want := range map[string]string{runs.ID: "running", paused.ID: "paused", forking.ID: "running"} {
				if got := c.state(id); got != want {
					t.Errorf("%s is %q, not %s", id, got, want)
				}
			}
			if got := c.state(pausing.ID); got != "running" && got != "paused" {
				t.Errorf("what was being paused is %q", got)
			}
			c.settled(known)
			for id, sb := range known {
				c.goesOn(sb, "mark"+id)
			}
			c.killAll()
		})
	}
	s.Eventually(t, time.Minute, "nothing left", func() bool { return len(s.VMLeaks()) == 0 })
}

// TestMachineDies: a sandbox whose machine ends, or who attends to it, is said to have ended, to its team alone, and nothing of it is left.
func TestMachineDies(t *testing.T) {
	c, other := newClient(t), newClient(t)
	for _, victim := range []string{"machine", "shim"} {
		sb := c.create(nil)
		if victim == "machine" {
			kill(t, s.PID(t, sb.ID))
		} else {
			end(t, "containerd-shim-cube-v2", sb.ID)
		}
		s.Eventually(t, time.Minute, "its end", func() bool { return c.state(sb.ID) == "" })
		if code, message, err := c.call("GET", "/sandboxes/"+sb.ID, nil, nil); err != nil || code != 404 || !strings.Contains(message, "ended") {
			t.Errorf("%s: %d %s, %v", victim, code, message, err)
		}
		if _, message, err := other.call("GET", "/sandboxes/"+sb.ID, nil, nil); err != nil || strings.Contains(message, "ended") {
			t.Errorf("to another team: %s, %v", message, err)
		}
	}
	s.Eventually(t, time.Minute, "nothing left", func() bool { return len(s.VMLeaks()) == 0 })
	c.settled(nil)
}

// TestDueWhileDown: deadlines that pass while nobody is there to keep them act later.
func TestDueWhileDown(t *testing.T) {
	c := newClient(t)
	killed, paused := c.create(map[string]any{"timeout": 20}), c.create(map[string]any{"timeout": 20, "autoPause": true})
	c.marks(paused, "word")
	end(t, " up --daemon")
	time.Sleep(20 * time.Second)
	if r := s.Cube("up", "-d"); r.Err != nil {
		t.Fatal(r.Err)
	}
	s.Eventually(t, time.Minute, "what is due", func() bool { return c.state(killed.ID) == "" && c.state(paused.ID) == "paused" })
	c.settled(map[string]sandbox{paused.ID: paused})
	c.goesOn(paused, "word")
	c.killAll()
}
