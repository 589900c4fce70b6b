package e2b

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestRestarts has what serves sandboxes die, while some run, some are paused, and some are about to be: nothing is lost, nothing is
// left, and what the API says is so. Whoever wants a sandbox meanwhile gets one, or is told to try again.
func TestRestarts(t *testing.T) {
	points := []time.Duration{0}
	if long() {
		points = []time.Duration{0, 300 * time.Millisecond, time.Second, 3 * time.Second}
	}
	for _, v := range victims(long()) {
		for _, after := range points {
			t.Run(fmt.Sprintf("%s/%v", v.name, after), func(t *testing.T) { restart(t, v, s.Config.Timeout(after)) })
		}
	}
}

// restart has a process die so long after a pause, a fork and a create have begun.
func restart(t *testing.T, v victim, after time.Duration) {
	c := newClient(t)
	before := footprint(t)
	known := map[string]sandbox{}
	var ids []string
	for range 3 {
		sb := c.create(nil)
		c.marks(sb, "mark"+sb.ID)
		known[sb.ID], ids = sb, append(ids, sb.ID)
	}
	paused, pausing, forking := ids[0], ids[1], ids[2]
	c.do("POST", "/sandboxes/"+paused+"/pause", nil, nil, 204)
	under := c.begin(map[string]any{
		"/sandboxes/" + pausing + "/pause": nil,
		"/sandboxes/" + forking + "/fork":  map[string]any{"count": 1, "timeout": 3600},
		"/v2/sandboxes":                    map[string]any{"templateID": "base", "timeout": 3600},
	})
	leaves(t, "running", pausing, forking)
	time.Sleep(after)
	v.dies(t)
	var wants sync.WaitGroup
	wants.Go(func() { c.creates(some(), v.up) })
	v.returns(t)
	wants.Wait()
	for a := range under {
		t.Log(a)
		if v.name != "cube" && (a.err != nil || a.code == 500) {
			t.Errorf("what was under way when %s died: %s", v.name, a)
		}
	}
	c.serves()
	for id, want := range map[string][]string{paused: {"paused"}, pausing: {"paused", "running"}, forking: {"running"}} {
		if got := c.state(id); !slices.Contains(want, got) {
			t.Errorf("%s is %q, not one of %s", id, got, want)
		}
	}
	c.settled(known)
	for id, sb := range known {
		c.goesOn(sb, "mark"+id)
	}
	c.killAll()
	asBefore(t, before)
}

// reply is what a request has come to.
type reply struct {
	path string
	answer
	err error
}

func (r reply) String() string { return fmt.Sprintf("%s: %d %s %v", r.path, r.code, r.message, r.err) }

// begin posts requests, by path, and returns what they come to, which nobody need take.
func (c *client) begin(all map[string]any) <-chan reply {
	replies := make(chan reply, len(all))
	var under sync.WaitGroup
	for path, body := range all {
		under.Go(func() {
			a, err := c.ask("POST", path, body, nil)
			replies <- reply{path, a, err}
		})
	}
	go func() {
		under.Wait()
		close(replies)
	}()
	return replies
}

// TestMachineDies: a sandbox whose machine ends, or who attends to it, is said to have ended, to its team alone, unless it has just been
// paused, and nothing of it is left.
func TestMachineDies(t *testing.T) {
	c, other := newClient(t), newClient(t)
	before := footprint(t)
	doing := []string{""}
	if long() {
		doing = []string{"", "pause", "fork"}
	}
	for _, victim := range []string{"machine", "shim"} {
		for _, what := range doing {
			sb := c.create(nil)
			pid := s.PID(t, sb.ID)
			under := make(<-chan reply)
			if what != "" {
				c.marks(sb, "word")
				under = c.begin(map[string]any{"/sandboxes/" + sb.ID + "/" + what: nil})
				leaves(t, "running", sb.ID)
			}
			if victim == "machine" {
				s.End(t, pid, unix.SIGKILL)
			} else {
				end(t, "containerd-shim-cube-v2", sb.ID)
			}
			if what != "" {
				a := <-under
				t.Log(victim, a)
				if a.err != nil || a.code == 500 {
					t.Errorf("%s amid it: %s", victim, a)
				}
			}
			s.Eventually(t, time.Minute, "its end", func() bool {
				state := c.state(sb.ID)
				return state == "" || what == "pause" && state == "paused"
			})
			if c.state(sb.ID) == "paused" {
				c.settled(nil)
				c.goesOn(sb, "word")
				c.killAll()
				continue
			}
			if code, message, err := c.call("GET", "/sandboxes/"+sb.ID, nil, nil); err != nil || code != 404 || !strings.Contains(message, "ended") {
				t.Errorf("%s: %d %s, %v", victim, code, message, err)
			}
			if _, message, err := other.call("GET", "/sandboxes/"+sb.ID, nil, nil); err != nil || strings.Contains(message, "ended") {
				t.Errorf("to another team: %s, %v", message, err)
			}
			c.settled(nil) // children that there are
			c.killAll()
		}
	}
	asBefore(t, before)
}

// TestDueWhileDown: deadlines that pass while nobody is there to keep them act later.
func TestDueWhileDown(t *testing.T) {
	c := newClient(t)
	before := footprint(t)
	killed, paused := c.create(nil), c.create(map[string]any{"autoPause": true})
	c.marks(paused, "word")
	lasts := s.Config.Timeout(4 * time.Second) // longer than the kill takes
	for _, sb := range []sandbox{killed, paused} {
		c.do("POST", "/sandboxes/"+sb.ID+"/timeout", map[string]any{"timeout": int(lasts.Seconds())}, nil, 204)
	}
	due := time.Now().Add(lasts)
	end(t, " up --daemon")
	time.Sleep(time.Until(due))
	for _, sb := range []sandbox{killed, paused} {
		s.PID(t, sb.ID) // it is there
	}
	if r := s.Cube("up", "-d"); r.Err != nil {
		t.Fatal(r.Err)
	}
	s.Eventually(t, time.Minute, "what is due", func() bool { return c.state(killed.ID) == "" && c.state(paused.ID) == "paused" })
	c.settled(map[string]sandbox{paused.ID: paused})
	c.goesOn(paused, "word")
	c.killAll()
	asBefore(t, before)
}
