package e2b

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/internal/process"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// restartWith has cube die and go on with more configuration.
func restartWith(t *testing.T, more string) {
	t.Helper()
	file := filepath.Join(s.Dir, "config.toml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	plain, _, _ := strings.Cut(string(text), "[pool]")
	if err := os.WriteFile(file, []byte(plain+more), 0o600); err != nil {
		t.Fatal(err)
	}
	cube := victims(false)[0]
	cube.dies(t)
	cube.returns(t)
	// Who has asked the snapshotter while that was away, asks again only after a while.
	s.Eventually(t, time.Minute, "containerd to reach the snapshotter", func() bool { return s.Ctr("snapshots", "--snapshotter", "cube", "ls").Err == nil })
}

// members are the pool's, as the control plane has written them down.
func members(t *testing.T) []db.Member {
	t.Helper()
	ctx := context.Background() // when the test has ended, too
	d, err := db.Open(ctx, s.Config.DatabaseFile())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	all, err := d.Members(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// filled waits until n members can be claimed, and returns their ids.
func filled(t *testing.T, n int) (ids []string) {
	t.Helper()
	s.Eventually(t, time.Minute, fmt.Sprintf("%d members of the pool", n), func() bool {
		ids = nil
		for _, m := range members(t) {
			if m.Ready {
				ids = append(ids, m.ID)
			}
		}
		return len(ids) == n
	})
	return ids
}

// TestPool: creates that find a member of the pool need nothing that takes time, and get sandboxes that are their own as any is.
// When cube dies amid a claim, no member is used twice and none is left.
func TestPool(t *testing.T) {
	c := newClient(t)
	before := footprint(t)
	restartWith(t, "[pool]\nmax_memory = \"1GiB\"\nmax_per_template = 2\n") // room for two
	defer func() {
		restartWith(t, "")
		filled(t, 0)
		asBefore(t, before)
	}()
	defer c.killAll()
	for range 2 { // that is how many are wanted
		c.create(nil)
	}
	c.killAll()
	kept := filled(t, 2)
	containers := s.Ctr("task", "ls").Stdout
	for _, id := range kept {
		if !strings.Contains(containers, id) {
			t.Errorf("%s is no task: %s", id, containers)
		}
		use := used(t, id)
		time.Sleep(2 * time.Second) // in which their clocks stand still, too
		if took := used(t, id) - use; took > 100*time.Millisecond {
			t.Errorf("%s has used %v of CPU", id, took)
		}
	}
	if code, _, err := c.call("GET", "/sandboxes/"+kept[0], nil, nil); err != nil || code != 404 {
		t.Errorf("a member is a sandbox: %d, %v", code, err)
	}

	stop := containerdPaused(t) // nobody asks it
	var both sync.WaitGroup
	made := make([]sandbox, 2)
	took := make([]time.Duration, 2)
	for i := range made {
		both.Go(func() {
			began := time.Now()
			code, message, err := c.call("POST", "/v2/sandboxes", map[string]any{"templateID": "base", "timeout": 3600, "envVars": map[string]string{"WHO": fmt.Sprint("create ", i)}}, &made[i])
			if took[i] = time.Since(began); err != nil || code != 201 {
				t.Errorf("create: %d %s, %v", code, message, err)
			}
		})
	}
	both.Wait()
	stop()
	t.Log("created in", took)
	if t.Failed() {
		return
	}
	own := map[string]bool{}
	for i, sb := range made {
		if !slices.Contains(kept, sb.ID) {
			t.Errorf("%s is none of the members %v", sb.ID, kept)
		}
		c.says(sb, "echo $WHO $E2B_SANDBOX_ID", fmt.Sprintf("create %d %s", i, sb.ID))
		asked := time.Now()
		out, err := c.run(sb, "date +%s.%N; cat /proc/sys/kernel/random/uuid; hostname")
		lines := strings.Fields(out)
		if err != nil || len(lines) != 3 {
			t.Fatalf("%q, %v", out, err)
		}
		if clock, err := strconv.ParseFloat(lines[0], 64); err != nil || math.Abs(clock-float64(asked.UnixNano())/1e9) > 1.5+time.Since(asked).Seconds() {
			t.Errorf("its clock is at %s, %v after it was asked for: %v", lines[0], time.Since(asked), err)
		}
		for _, what := range append(lines[1:], sb.Token) {
			if own[what] {
				t.Errorf("both have %q", what)
			}
			own[what] = true
		}
	}

	// It is a sandbox like any other.
	c.marks(made[0], "mine")
	c.do("POST", "/sandboxes/"+made[0].ID+"/pause", nil, nil, 204)
	c.do("POST", "/v2/sandboxes/"+made[0].ID+"/connect", map[string]any{"timeout": 3600}, nil, 201)
	c.goesOn(made[0], "mine")
	c.do("DELETE", "/sandboxes/"+made[1].ID, nil, nil, 204)

	// One that is to reach nothing has never reached anything.
	filled(t, 2)
	closed := c.create(map[string]any{"allow_internet_access": false})
	reach := fmt.Sprintf("timeout 3 bash -c 'exec 3<>/dev/tcp/%v/%d'", testhost.Server, testhost.DataPort)
	if out, err := c.run(made[0], reach); err != nil {
		t.Errorf("a sandbox without a policy reaches nothing: %s, %v", out, err)
	}
	if out, err := c.run(closed, reach); err == nil {
		t.Errorf("one reaches what it may not: %s", out)
	}

	// Cube dies amid claims.
	kept = filled(t, 2)
	cube := victims(false)[0]
	under := c.begin(map[string]any{"/v2/sandboxes": map[string]any{"templateID": "base", "timeout": 3600}})
	s.Eventually(t, time.Minute, "a claim", func() bool {
		return len(members(t)) < 2 || slices.ContainsFunc(members(t), func(m db.Member) bool { return !slices.Contains(kept, m.ID) })
	})
	cube.dies(t)
	for a := range under {
		t.Log("amid the claim:", a)
	}
	cube.returns(t)
	c.serves()
	c.killAll()
	s.Eventually(t, time.Minute, "what runs to be what is known", func() bool {
		known := map[string]bool{}
		for _, m := range members(t) {
			known[m.ID] = true
		}
		tasks := strings.Fields(s.Ctr("task", "ls", "-q").Stdout)
		return len(tasks) == len(known) && !slices.ContainsFunc(tasks, func(id string) bool { return !known[id] })
	})
}

// used is the CPU time that a container's machine has taken.
func used(t *testing.T, id string) time.Duration {
	t.Helper()
	use, err := process.UseOf(s.PID(t, id))
	if err != nil {
		t.Fatal(err)
	}
	return use.CPU
}

// containerdPaused has containerd stand still until stop is called.
func containerdPaused(t *testing.T) (stop func()) {
	t.Helper()
	found := slices.DeleteFunc(s.Processes("bin/containerd "), func(p stack.Process) bool {
		return !strings.HasSuffix(strings.Fields(p.Command)[0], "bin/containerd") // a shim
	})
	if len(found) != 1 {
		t.Fatalf("%d containerds", len(found))
	}
	signal := func(sig unix.Signal) {
		if err := unix.Kill(found[0].PID, sig); err != nil {
			t.Error(err)
		}
	}
	signal(unix.SIGSTOP)
	return func() { signal(unix.SIGCONT) }
}
