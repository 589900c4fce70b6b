package e2b

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/meminfo"
)

// probed is what a probe has found.
type probed struct {
	ByAdmission, ByLoad, ByMemory, ByMemoryLimit int
	LoadOpen                                     bool
	Short, Ended                                 string
	Bound                                        time.Duration `json:"p95BoundNanoseconds"`
	MemoryPerSandbox                             int64
	Steps                                        []struct{ Sandboxes, Runs int }
	Disagree                                     []string
}

// capacity is `cube capacity` as the client, who is anywhere.
func (c *client) capacity(args ...string) *exec.Cmd {
	cmd := s.Command("cube", append([]string{"capacity"}, args...)...)
	cmd.Env = append(cmd.Environ(), "CUBE_API_KEY="+c.key, "CUBE_API_URL=http://"+s.Config.API.Listen.String(), "CUBE_SANDBOX_URL=http://"+s.Config.Proxy.Listen.String())
	return cmd
}

// probe probes, and sees that nothing is left of it.
func (c *client) probe(args ...string) (p probed) {
	c.Helper()
	cmd := c.capacity(append([]string{"probe", "--template", "base", "--limit", "9m", "--json"}, args...)...)
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		c.Fatalf("%v: %s", err, said.String())
	}
	if err := json.Unmarshal(out.Bytes(), &p); err != nil {
		c.Fatalf("%v: %s", err, out.String())
	}
	c.Logf("%s%+v", said.String(), p)
	if left := c.list(); len(left) > 0 {
		c.Errorf("it leaves %v", left)
	}
	return p
}

// TestCapacityProbe: it makes as many sandboxes as it may, says what it has found, and leaves none.
func TestCapacityProbe(t *testing.T) {
	c := newLimited(t)
	p := c.probe("--cmd", "head -c 1M /dev/zero | sha256sum", "--window", "2s", "--factor", "1000")
	if p.ByAdmission != 2 || p.ByLoad != 2 || !p.LoadOpen || len(p.Steps) != 2 || p.Steps[1].Runs < 2 || p.ByMemoryLimit < 1 || !strings.Contains(p.Ended, "limits.team.limited.running") {
		t.Errorf("%+v", p)
	}
	r := s.Run(c.capacity("--template", "base"), nil)
	if r.Err != nil || !regexp.MustCompile(`(?s)^ +TOTAL .*CPUs .*memory .*disk .*Team limited runs 0 of 2 sandboxes .*default/base +disposable +2 .* 2 +team_running.*limits.running`).MatchString(r.Stdout) {
		t.Errorf("%+v", r)
	}
}

// near tells whether two numbers of sandboxes differ by at most one, or a tenth.
func near(a, b int) bool { return math.Abs(float64(a-b)) <= max(1, 0.1*float64(max(a, b))) }

// TestRoomIsSo: of a hundred creates at once exactly those are made that there was said to be room for, also after cube was killed.
func TestRoomIsSo(t *testing.T) {
	if !long() {
		t.Skip("it makes many sandboxes; CUBE_TEST_LONG=1 has it run")
	}
	const room = 10
	factor := 2 * room / float64(runtime.NumCPU()) // the template has two
	if factor < 1 {
		t.Skipf("%d CPUs are more than %d sandboxes have", runtime.NumCPU(), room)
	}
	c := newClient(t)
	settings := fmt.Sprintf("[pool]\n[admission]\ncpu_overcommit = %.3f\n", factor)
	restartWith(t, settings)
	defer restartWith(t, "")
	defer c.killAll()
	c.fills(room)
	for _, id := range slices.Sorted(maps.Keys(c.list()))[:3] {
		c.do("DELETE", "/sandboxes/"+id, nil, nil, 204)
	}
	restartWith(t, settings)
	c.serves()
	c.fills(3)
	if all := c.list(); len(all) != room {
		t.Errorf("%d sandboxes where there is room for %d", len(all), room)
	}
}

// fills creates a hundred at once where there is room for so many.
func (c *client) fills(room int) {
	c.Helper()
	var told capacity
	c.do("GET", "/capacity?template=base", nil, &told, 200)
	if told.Templates[0].Room != room || told.Templates[0].Short != "host_cpu" {
		c.Fatalf("%+v", told)
	}
	var made atomic.Int64
	each(make([]struct{}, 100), func(struct{}) {
		a, err := c.ask("POST", "/v2/sandboxes", map[string]any{"templateID": "base", "timeout": 3600}, nil)
		switch {
		case err == nil && a.code == 201:
			made.Add(1)
		case err != nil || a.code != 503 || a.again == "" || !strings.Contains(a.message, "CPUs left for sandboxes"):
			c.Errorf("%+v, %v", a, err)
		}
	})
	c.do("GET", "/capacity?template=base", nil, &told, 200)
	if n := made.Load(); n != int64(room) || told.Templates[0].Room != 0 {
		c.Errorf("%d were made where there is room for %d, and then there is room for %d", n, room, told.Templates[0].Room)
	}
}

// TestProbeOfMemory: a few sandboxes with a load tell how many the host's memory holds.
func TestProbeOfMemory(t *testing.T) {
	if !long() {
		t.Skip("it makes many sandboxes; CUBE_TEST_LONG=1 has it run")
	}
	const budget = 2 << 30
	containerd := victims(true)[1] // which gives back what it has unpacked images with only after minutes
	containerd.dies(t)
	containerd.returns(t)
	restartWith(t, "[pool]\n")
	defer restartWith(t, "")
	s.Eventually(t, time.Minute, "no member of the pool, which have memory", func() bool { return len(members(t)) == 0 })
	m, err := meminfo.Read()
	if err != nil || m.Available < 8<<30 {
		t.Skipf("the host has %d MiB left, %v", m.Available>>20, err)
	}
	restartWith(t, fmt.Sprintf("[pool]\n[admission]\ncpu_overcommit = 1000\nmemory_headroom = \"%dMiB\"\n", (m.Available-budget)>>20))
	load := []string{"--cmd", "dd if=/dev/zero of=/dev/shm/load bs=1M count=40 conv=notrunc status=none; sleep 3", "--window", "9s", "--factor", "1000"}
	few := newClient(t).probe(append(load, "--step", "4", "--max", "8")...)
	if !few.LoadOpen || few.ByLoad != 8 || few.MemoryPerSandbox < 40<<20 {
		t.Errorf("of eight: %+v", few)
	}
	all := newClient(t).probe(append(load, "--step", "3")...)
	if !all.LoadOpen || !strings.Contains(all.Ended, "of memory left") {
		t.Errorf("of all: %+v", all)
	}
	if now, err := meminfo.Read(); err != nil || math.Abs(float64(now.Available-m.Available)) > budget/20 {
		t.Skipf("others have taken %d MiB of the host's memory meanwhile, or left them: it takes a quiet host (%v)", (m.Available-now.Available)>>20, err)
	}
	if t.Logf("foretold %d, of %d MiB for each; there were %d", few.ByMemory, few.MemoryPerSandbox>>20, all.ByLoad); !near(few.ByMemory, all.ByLoad) {
		t.Errorf("eight tell of %d, and %d were made", few.ByMemory, all.ByLoad)
	}
}

// TestProbeOfLoad: two probes find the same, and what they find is so: that many sandboxes carry the load, and a tenth and one more don't.
func TestProbeOfLoad(t *testing.T) {
	if !long() {
		t.Skip("it takes minutes; CUBE_TEST_LONG=1 has it run")
	}
	const command, window = "head -c 12M /dev/zero | sha256sum", 6 * time.Second
	c := newClient(t)
	defer c.killAll()
	less := c.probe("--cmd", command, "--window", window.String())
	more := c.probe("--cmd", command, "--window", window.String())
	if less.ByLoad > more.ByLoad {
		less, more = more, less
	}
	if less.LoadOpen || more.LoadOpen || less.ByLoad < 1 || !near(less.ByLoad, more.ByLoad) {
		t.Fatalf("one finds %d, another one %d", less.ByLoad, more.ByLoad)
	}
	if !slices.ContainsFunc(less.Disagree, func(d string) bool { return strings.Contains(d, "admission.cpu_overcommit") }) {
		t.Errorf("it doesn't say what to do: %q", less.Disagree)
	}
	var made []sandbox
	p95 := func(n int) time.Duration {
		for len(made) < n {
			made = append(made, c.create(nil))
		}
		return c.working(made, command, window)
	}
	if took := p95(less.ByLoad); took > less.Bound {
		t.Errorf("%d carry it, it was said, but 95 of 100 runs take %v, more than %v", less.ByLoad, took, less.Bound)
	} else {
		t.Logf("of %d, 95 of 100 runs take %v, at most %v", less.ByLoad, took, less.Bound)
	}
	n := int(math.Ceil(1.1*float64(more.ByLoad))) + 1
	if took := p95(n); took <= more.Bound {
		t.Errorf("%d carry it, it was said, but of %d 95 of 100 runs take %v, not more than %v", more.ByLoad, n, took, more.Bound)
	} else {
		t.Logf("of %d, 95 of 100 runs take %v, more than %v", n, took, more.Bound)
	}
}

// working has sandboxes run a command again and again, and tells what 95 of 100 runs take: of two windows the better one, as the probe
// looks at it. Their first runs are over before.
func (c *client) working(all []sandbox, command string, window time.Duration) time.Duration {
	c.Helper()
	run := func(sb sandbox) time.Duration {
		began := time.Now()
		if _, err := c.run(sb, command); err != nil {
			c.Errorf("%s: %v", sb.ID, err)
		}
		return time.Since(began)
	}
	each(all, func(sb sandbox) { run(sb) })
	best := time.Duration(math.MaxInt64)
	for range 2 {
		var mu sync.Mutex
		var took []time.Duration
		began := time.Now()
		each(all, func(sb sandbox) {
			for first := true; first || time.Since(began) < window; first = false {
				d := run(sb)
				mu.Lock()
				took = append(took, d)
				mu.Unlock()
			}
		})
		slices.Sort(took)
		best = min(best, took[(len(took)*95+99)/100-1])
	}
	return best
}
