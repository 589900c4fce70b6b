package e2b

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestHostRestarts: what was paused goes on after the host has crashed, as the same sandbox. What ran is lost, which its team and the log are
// told. Whoever wants a sandbox while the stack starts gets one, or is told to try again.
func TestHostRestarts(t *testing.T) {
	c := newClient(t)
	before := footprint(t)
	known := map[string]sandbox{}
	var ids []string
	n := 2
	if long() {
		n = 4
	}
	for range n {
		sb := c.create(nil)
		c.marks(sb, "mark"+sb.ID)
		known[sb.ID], ids = sb, append(ids, sb.ID)
	}
	ran, paused := ids[0], ids[1]
	c.do("POST", "/sandboxes/"+paused+"/pause", nil, nil, 204)
	if long() {
		pausing, forking := ids[2], ids[3]
		c.begin(map[string]any{"/sandboxes/" + pausing + "/pause": nil, "/sandboxes/" + forking + "/fork": map[string]any{"timeout": 3600}})
		leaves(t, "running", pausing, forking)
	}

	s.Crash(t, ids...)
	var wants sync.WaitGroup
	wants.Go(func() { c.creates(some(), true) })
	if r := s.Cube("up", "-d"); r.Err != nil {
		t.Fatal(r.Err)
	}
	wants.Wait()
	c.serves()
	s.Eventually(t, time.Minute, "the end of what ran", func() bool { return c.state(ran) == "" })
	if code, message, err := c.call("GET", "/sandboxes/"+ran, nil, nil); err != nil || code != 404 || !strings.Contains(message, "host was restarted") {
		t.Errorf("get what ran: %d %s, %v", code, message, err)
	}
	log, err := os.ReadFile(filepath.Join(s.Config.LogDir(), "cube.log"))
	if err != nil {
		t.Fatal(err)
	}
	told := false
	for line := range strings.Lines(string(log)) {
		told = told || strings.Contains(line, ran) && strings.Contains(line, "host was restarted")
	}
	if !told {
		t.Error("the log doesn't say that it is lost")
	}
	if got := c.state(paused); got != "paused" {
		t.Errorf("what was paused is %q", got)
	}
	c.settled(known)
	for id := range c.list() { // what was being paused may be among them
		if sb, ok := known[id]; ok {
			c.goesOn(sb, "mark"+id)
		}
	}
	c.killAll()
	asBefore(t, before)
}
