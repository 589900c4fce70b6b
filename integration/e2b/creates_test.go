package e2b

import (
	"encoding/json"
	"errors"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

var (
	// waiting is how a create is refused while cube starts.
	waiting = regexp.MustCompile(`^cube is starting and waits for: [a-z]`)
	// missing is how it is refused for want of something: room, a turn, a dependency, time.
	missing = regexp.MustCompile(`left for sandboxes|MiB of memory left|starts \d+ sandboxes at a time|containerd at /\S+ has gone|this host is too busy`)
)

// creates asks for n sandboxes, one every 75 ms from now on, whatever state the stack is in, and returns when all of them have been
// answered: each is made, can be used, and is killed, or is to be tried again, for a reason that names what is missing. away: the
// API doesn't listen at first.
func (c *client) creates(n int, away bool) {
	c.Helper()
	var all sync.WaitGroup
	var listens atomic.Bool
	var mu sync.Mutex
	count := map[string]int{}
	note := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		count[what]++
	}
	began := time.Now()
	tick := time.NewTicker(75 * time.Millisecond)
	defer tick.Stop()
	for range n {
		<-tick.C
		all.Go(func() {
			var sb sandbox
			a, err := c.ask("POST", "/v2/sandboxes", map[string]any{"templateID": "base", "timeout": 3600}, &sb)
			if away && !listens.Load() && errors.Is(err, unix.ECONNREFUSED) {
				note("connection refused")
				return
			}
			if err != nil {
				c.Errorf("create, after %v: %v", time.Since(began), err)
				return
			}
			if !listens.Swap(true) {
				c.Logf("the first answer after %v", time.Since(began))
			}
			switch a.code {
			case 201:
				note("created")
				c.says(sb, "echo here", "here")
				if code, message, err := c.call("DELETE", "/sandboxes/"+sb.ID, nil, nil); err != nil || code != 204 {
					c.Errorf("delete %s: %d %s, %v", sb.ID, code, message, err)
				}
			case 503:
				var body struct{ Message string }
				err := json.Unmarshal([]byte(a.message), &body)
				seconds, again := strconv.Atoi(a.again)
				switch {
				case err != nil || again != nil || seconds < 1:
					c.Errorf("refused with %s and Retry-After %q", a.message, a.again)
				case waiting.MatchString(body.Message):
					note(body.Message)
				case missing.MatchString(body.Message):
					note(missing.FindString(body.Message))
				default:
					c.Errorf("what is missing isn't said: %s", a.message)
				}
			default:
				c.Errorf("create, after %v: %d %s", time.Since(began), a.code, a.message)
			}
		})
	}
	all.Wait()
	c.Logf("%d creates in %v: %v", n, time.Since(began).Round(time.Millisecond), count)
}

// some is how many creates are fired at what has died.
func some() int {
	if long() {
		return 100
	}
	return 20
}
