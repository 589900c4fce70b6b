package e2b

import (
	"encoding/json"
	"regexp"
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
	Team   struct {
		Used struct{ Running, Paused, VCPUs int }
	}
	Templates []struct {
		Profile, Short string
		Room           int
	}
}

// TestLimits: of creates that come at once a team gets what it may, the others are told which limit that is, and what is told of room
// is so.
func TestLimits(t *testing.T) {
	c := newLimited(t)
	defer c.killAll()
	var before, full, resident capacity
	c.do("GET", "/capacity?template=base", nil, &before, 200)
	if len(before.Templates) != 1 || before.Templates[0].Room != 2 || before.Templates[0].Short != "team_running" || before.Memory.Free < 1<<20 {
		t.Errorf("before: %+v", before)
	}
	body := map[string]any{"templateID": "base", "timeout": 3600, "metadata": map[string]string{"cube.profile": "resident"}}
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
	if full.Team.Used.Running != 2 || full.Team.Used.VCPUs != 4 || full.Templates[0].Room != 0 || full.Memory.Reserved-before.Memory.Reserved != 2*(512+64)<<20 {
		t.Errorf("full: %+v, before %+v", full, before)
	}
	c.do("POST", "/sandboxes/"+made[0]+"/pause", nil, nil, 204)
	c.do("GET", "/capacity?template=base", nil, &resident, 200)
	if resident.Team.Used.Running != 1 || resident.Team.Used.Paused != 1 || resident.Templates[0].Room != 1 {
		t.Errorf("with one paused: %+v", resident)
	}
	told := c.scrape()
	for _, want := range []string{`cube_admission_refusals_total{reason="team_running"}`, `cube_admission_reserved{resource="memory"}`, `cube_team_sandboxes{state="running",team="limited"} 1`} {
		if !strings.Contains(told, want) {
			t.Errorf("there is no %s", want)
		}
	}
}

// TestCapacityProbe: it makes as many sandboxes as it may, says what it has found, and leaves none.
func TestCapacityProbe(t *testing.T) {
	c := newLimited(t)
	cmd := s.Command("cube", "capacity", "probe", "--template", "base", "--cmd", "head -c 1M /dev/zero | sha256sum", "--window", "2s", "--factor", "1000", "--json")
	cmd.Env = append(cmd.Environ(), "CUBE_API_KEY="+c.key, "CUBE_API_URL=http://"+s.Config.API.Listen.String(), "CUBE_SANDBOX_URL=http://"+s.Config.Proxy.Listen.String())
	r := s.Run(cmd, nil)
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	var found struct {
		ByAdmission, ByLoad, ByMemory, ByMemoryLimit int
		LoadOpen                                     bool
		Ended                                        string
		Steps                                        []struct{ Sandboxes, Runs int }
	}
	if err := json.Unmarshal([]byte(r.Stdout), &found); err != nil {
		t.Fatalf("%v: %s", err, r.Stdout)
	}
	if found.ByAdmission != 2 || found.ByLoad != 2 || !found.LoadOpen || len(found.Steps) != 2 || found.Steps[1].Runs < 2 || found.ByMemoryLimit < 1 || !strings.Contains(found.Ended, "limits.team.limited.running") {
		t.Errorf("%s", r.Stdout)
	}
	if left := c.list(); len(left) > 0 {
		t.Errorf("it leaves %v", left)
	}
	cmd = s.Command("cube", "capacity", "--template", "base")
	cmd.Env = append(cmd.Environ(), "CUBE_API_KEY="+c.key, "CUBE_API_URL=http://"+s.Config.API.Listen.String())
	if r = s.Run(cmd, nil); r.Err != nil || !regexp.MustCompile(`(?s)^ +TOTAL .*CPUs .*memory .*disk .*Team limited runs 0 of 2 sandboxes .*default/base +disposable +2 .* 2 +team_running`).MatchString(r.Stdout) {
		t.Errorf("%v: %s", r.Err, r.Stdout)
	}
}
