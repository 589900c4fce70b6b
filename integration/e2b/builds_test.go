package e2b

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/space"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// built is a build of a template of the client's.
type built struct {
	Template string `json:"templateID"`
	ID       string `json:"buildID"`
}

// buildStatus is what the API says of one.
type buildStatus struct {
	Status     string
	LogEntries []struct {
		Timestamp            time.Time
		Step, Message, Level string
	}
	Reason struct{ Message, Step string }
}

// build has a template be built, of the plan that the API is told.
func (c *client) build(name string, plan map[string]any) (b built) {
	c.Helper()
	c.do("POST", "/v3/templates", map[string]any{"name": name, "cpuCount": 1, "memoryMB": 256}, &b, 202)
	c.do("POST", "/v2/templates/"+b.Template+"/builds/"+b.ID, plan, nil, 202)
	return b
}

// status is a build's, with what it has told at first.
func (c *client) status(b built) (st buildStatus) {
	c.Helper()
	c.do("GET", "/templates/"+b.Template+"/builds/"+b.ID+"/status?level=debug", nil, &st, 200)
	return st
}

// over waits for the end of a build.
func (c *client) over(b built) (st buildStatus) {
	c.Helper()
	s.Eventually(c, 2*time.Minute, "the end of build "+b.ID, func() bool {
		st = c.status(b)
		return st.Status == "ready" || st.Status == "error"
	})
	return st
}

// ready is over for a build that has to be ready.
func (c *client) ready(b built) buildStatus {
	c.Helper()
	st := c.over(b)
	if st.Status != "ready" {
		c.Fatalf("build %s: %+v", b.ID, st)
	}
	return st
}

// told tells whether a build has told what begins so.
func (st buildStatus) told(beginning string) bool {
	for _, l := range st.LogEntries {
		if strings.HasPrefix(l.Message, beginning) {
			return true
		}
	}
	return false
}

func step(command string) map[string]any {
	return map[string]any{"type": "RUN", "args": []string{command, "root"}}
}

// serving is a plan whose template runs something.
func serving(steps ...map[string]any) map[string]any {
	return map[string]any{"fromImage": "cube.local/base:bookworm", "steps": append([]map[string]any{}, steps...), "startCmd": "exec -a served sleep 36000", "readyCmd": "pgrep -f '^served'"}
}

// TestBuilds has one build after the other be made, of which only the last step differs: of each a sandbox is made and used. Then a
// template is made of a sandbox, and a sandbox of that. When all is deleted, the store is as it was, and no row is left. There are 50
// with CUBE_TEST_LONG.
func TestBuilds(t *testing.T) {
	n := 1
	if long() {
		n = 50
	}
	c, team := newTeam(t)
	before, free := footprint(t), freeSpace()
	var all []built
	var took, used []time.Duration
	for i := range n {
		began := time.Now()
		b := c.build(fmt.Sprintf("many:b%d", i), serving(step("echo shared > /shared"), step(fmt.Sprintf("echo %d > /own", i))))
		st := c.ready(b)
		if i > 0 && !st.told("CACHED RUN echo shared") {
			t.Errorf("build %d isn't of the cache: %+v", i, st.LogEntries)
		}
		at := time.Now()
		sb := c.create(map[string]any{"templateID": fmt.Sprintf("many:b%d", i)})
		c.says(sb, "cat /shared /own; pgrep -fc '^served 36000'", fmt.Sprintf("shared\n%d\n1", i))
		c.do("DELETE", "/sandboxes/"+sb.ID, nil, nil, 204)
		all, took, used = append(all, b), append(took, at.Sub(began)), append(used, time.Since(at))
		if i == 0 || i == n-1 {
			for _, l := range st.LogEntries {
				t.Logf("%s %s: %s", l.Timestamp.Format("05.000"), l.Step, l.Message)
			}
		}
	}
	slices.Sort(took)
	slices.Sort(used)
	t.Logf("%d builds took %v to %v, half of them at most %v; a sandbox made, used and deleted %v to %v, half at most %v", n, took[0], took[n-1], took[n/2], used[0], used[n-1], used[n/2])

	b := c.ofSandbox(team, fmt.Sprintf("many:b%d", n-1))
	all = append(all, b)

	for i := range n / 2 { // by their tags
		c.cube(0, "template", "rm", "--team", team, fmt.Sprintf("many:b%d", i))
	}
	c.cube(0, "template", "rm", "--team", team, "many", "copy")
	s.Eventually(t, time.Minute, "the builds to be gone", func() bool {
		return !slices.ContainsFunc(footprint(t), func(f string) bool {
			return slices.ContainsFunc(all, func(b built) bool { return strings.Contains(f, b.ID) })
		})
	})
	c.cube(0, "team", "purge", team)
	asBefore(t, before)
	noRows(t, team, all)
	const slack = 64 << 20 // of the file system's own
	s.Eventually(t, time.Minute, "the store to have its space back", func() bool { return freeSpace() > free-slack })
}

// ofSandbox makes a template of a sandbox of another one, which goes on, and a sandbox of that.
func (c *client) ofSandbox(team, template string) built {
	c.Helper()
	parent := c.create(map[string]any{"templateID": template})
	c.says(parent, "echo kept > ~/kept; (exec -a memory sleep 36000) >/dev/null 2>&1 & echo there > /dev/shm/word", "")
	began := time.Now()
	c.cube(0, "template", "create", "--team", team, "--cpus", "1", "--memory", "256", "copy", parent.ID)
	c.Logf("a template of a sandbox took %v", time.Since(began).Round(time.Millisecond))
	c.says(parent, "cat /dev/shm/word; pgrep -fc '^(served|memory) 36000'", "there\n2")
	child := c.create(map[string]any{"templateID": "copy"})
	// The disk is the sandbox's, what runs is its template's, and memory is nobody's.
	c.says(child, "cat ~/kept /shared; ls /dev/shm; pgrep -fa '^[a-z]+ 36000$' | cut -d' ' -f2", "kept\nshared\nserved")
	c.killAll()
	var copied struct {
		ID     string
		Builds []struct{ ID string }
	}
	if err := json.Unmarshal([]byte(c.cube(0, "template", "inspect", "--team", team, "copy")), &copied); err != nil {
		c.Fatal(err)
	}
	return built{copied.ID, copied.Builds[0].ID}
}

// freeSpace is what the store has left, in bytes.
func freeSpace() int64 {
	space.Settle(s.Config.StoreDir())
	r, err := space.Of(s.Config.StoreDir())
	if err != nil {
		return 0
	}
	return r.Free
}

// noRows sees that the database knows nothing of builds and of what they have kept for a team.
func noRows(t *testing.T, team string, all []built) {
	t.Helper()
	d, err := db.Open(t.Context(), s.Config.DatabaseFile())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for _, b := range all {
		if j, err := d.Job(t.Context(), b.ID); !errdefs.IsNotFound(err) {
			t.Errorf("a row is left: %+v, %v", j, err)
		}
		if row, err := d.Build(t.Context(), b.ID); !errdefs.IsNotFound(err) {
			t.Errorf("a row is left: %+v, %v", row, err)
		}
	}
	layers, err := d.Layers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range layers {
		if l.Team == team {
			t.Errorf("a row is left: %+v", l)
		}
	}
}
