package e2b

import (
	"strings"
	"sync"
	"testing"
)

// newLimited is a client of the team that may have two sandboxes run.
func newLimited(t *testing.T) *client {
	t.Helper()
	c := newClient(t)
	r := s.Cube("key", "create", "--team", "limited")
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	c.key = strings.TrimSpace(r.Stdout)
	return c
}

// capacity is what the API tells of room, as far as tests look.
type capacity struct {
	Memory struct{ Total, Reserved, Used, Free float64 }
	Spare  struct{ Memory float64 }
	Team   struct {
		Used struct{ Running, Paused, VCPUs int }
	}
	Templates []struct {
		Profile, Short string
		Room           int
	}
}

// mib is what is reserved for sandboxes that there are, in MiB.
func (c capacity) mib() int { return int(c.Memory.Reserved-c.Spare.Memory) >> 20 }

// TestLimits: of creates that come at once a team gets what it may, the others are told which limit that is, and what is told of room
// is so.
func TestLimits(t *testing.T) {
	c := newLimited(t)
	defer c.killAll()
	var before, full, paused, resident capacity
	c.do("GET", "/capacity?template=base", nil, &before, 200)
	if len(before.Templates) != 1 || before.Templates[0].Room != 2 || before.Templates[0].Short != "team_running" || before.Memory.Free < 1<<20 {
		t.Errorf("before: %+v", before)
	}
	body := map[string]any{"templateID": "base", "timeout": 3600}
	var all sync.WaitGroup
	var mu sync.Mutex
	var made []string
	for range 5 {
		all.Go(func() {
			var sb sandbox
			a, err := c.ask("POST", "/v2/sandboxes", body, &sb)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil && a.code == 201:
				made = append(made, sb.ID)
			case err != nil || a.code != 429 || a.again == "" || !strings.Contains(a.message, "may have 2 running sandboxes (limits.team.limited.running), has 2, and this needs 1 more"):
				t.Errorf("%+v, %v", a, err)
			}
		})
	}
	all.Wait()
	if len(made) != 2 {
		t.Fatalf("%d sandboxes were made", len(made))
	}
	c.do("GET", "/capacity?template=base", nil, &full, 200)
	if full.Team.Used.Running != 2 || full.Team.Used.VCPUs != 4 || full.Templates[0].Room != 0 || full.mib() != before.mib()+2*96 {
		t.Errorf("full: %+v, before %+v", full, before)
	}
	c.do("POST", "/sandboxes/"+made[0]+"/pause", nil, nil, 204)
	c.do("GET", "/capacity?template=base", nil, &paused, 200)
	if paused.Team.Used.Running != 1 || paused.Team.Used.Paused != 1 || paused.Templates[0].Room != 1 {
		t.Errorf("with one paused: %+v", paused)
	}
	told := c.scrape()
	for _, want := range []string{`cube_admission_refusals_total{reason="team_running"}`, `cube_admission_reserved{resource="memory"}`, `cube_team_sandboxes{state="running",team="limited"} 1`} {
		if !strings.Contains(told, want) {
			t.Errorf("there is no %s", want)
		}
	}
	c.killAll()
	if before.mib() > 0 {
		return // of two CPUs there may be less than two left
	}
	body["metadata"] = map[string]string{"cube.profile": "resident"}
	c.create(body)
	c.do("GET", "/capacity?template=base", nil, &resident, 200)
	if resident.mib() != 512+64 {
		t.Errorf("with a resident one: %+v", resident)
	}
}
