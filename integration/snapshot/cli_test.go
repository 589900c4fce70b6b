package snapshot

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
)

// ticker counts by itself, in a file and aloud.
const ticker = `i=0; while :; do i=$((i+1)); echo $i >/n; echo $i; sleep 0.05; done`

func cube(t *testing.T, args ...string) string {
	t.Helper()
	r := s.Cube(args...)
	if r.Err != nil {
		t.Fatalf("cube %s: %v", strings.Join(args, " "), r.Err)
	}
	return strings.TrimSpace(r.Stdout)
}

// ticks is where a ticker is. Its file is empty while it is written to, and not there at first.
func ticks(t *testing.T, id string) (n int) {
	t.Helper()
	s.Eventually(t, time.Minute, "a number of "+id, func() bool {
		got := cube(t, "exec", id, "sh", "-c", "cat /n || :")
		if got == "" {
			return false
		}
		var err error
		n, err = strconv.Atoi(got)
		must(t, err)
		return true
	})
	return n
}

// connected sees that a container has its network card.
func connected(t *testing.T, id string) {
	t.Helper()
	if got := cube(t, "exec", id, "cat", "/sys/class/net/eth0/carrier", "/sys/class/net/eth0/operstate"); got != "1\nup" {
		t.Errorf("the network card of %s: %q", id, got)
	}
}

// TestCommands: a user saves, puts back and clones by the cube command.
func TestCommands(t *testing.T) {
	store(t)
	id := s.ID(t, "cli")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", ticker)
	t.Cleanup(func() { cube(t, "rm", "-f", id) })
	name := cube(t, "snapshot", "create", id)
	if name == "" || cube(t, "snapshot", "ls", "-q") != name {
		t.Errorf("snapshot %q", name)
	}
	later := ticks(t, id) + 20
	s.Eventually(t, 20*time.Second, "ticks", func() bool { return ticks(t, id) > later })
	cube(t, "rollback", id, name)
	if n := ticks(t, id); n > later {
		t.Errorf("put back to %d", n)
	}
	connected(t, id)
	var info struct {
		Pod        string
		Containers []string
		AtRest     bool     `json:"at_rest"`
		UsedBy     []string `json:"used_by"`
	}
	must(t, json.Unmarshal([]byte(cube(t, "snapshot", "inspect", name)), &info))
	if info.Pod != id || len(info.Containers) != 1 || !info.AtRest || len(info.UsedBy) != 1 || info.UsedBy[0] != id {
		t.Errorf("%+v", info)
	}
	r := s.Cube("snapshot", "rm", name)
	if r.Err != nil || !strings.Contains(r.Stderr, id) {
		t.Errorf("rm: %+v", r)
	}

	at := ticks(t, id)
	clones := strings.Fields(cube(t, "clone", "-n", "2", id))
	if len(clones) != 2 {
		t.Fatalf("clones %q", clones)
	}
	for _, clone := range clones {
		t.Cleanup(func() { cube(t, "rm", "-f", clone) })
		if n := ticks(t, clone); n < at {
			t.Errorf("%s is at %d", clone, n)
		}
		connected(t, clone)
		s.Eventually(t, 20*time.Second, "the clone's output", func() bool { return cube(t, "logs", clone) != "" })
		if first, err := strconv.Atoi(strings.Fields(cube(t, "logs", clone))[0]); err != nil || first < at {
			t.Errorf("%s said first: %d", clone, first)
		}
	}
	if left := cube(t, "snapshot", "ls", "-q"); left != "" {
		t.Errorf("left: %s", left)
	}
}

// says sees that a command fails with one line that has all of the words.
func says(t *testing.T, args []string, words ...string) {
	t.Helper()
	r := s.Cube(args...)
	if r.Err == nil || r.Stdout != "" || strings.Count(progress.ReplaceAllString(r.Stderr, ""), "\n") != 1 {
		t.Errorf("cube %v: %+v", args, r)
	}
	for _, w := range words {
		if !strings.Contains(r.Stderr, w) {
			t.Errorf("cube %v doesn't say %q: %s", args, w, r.Stderr)
		}
	}
}

// TestRefusals: what can't be done is said in one line, and nothing is done.
func TestRefusals(t *testing.T) {
	store(t)
	id, shares, ended := s.ID(t, "refuses"), s.ID(t, "shares"), s.ID(t, "ended")
	shared := t.TempDir()
	cube(t, "run", "-d", "--name", id, stack.Image, "sleep", "1000")
	cube(t, "run", "-d", "--name", shares, "-v", shared+":/mnt", stack.Image, "sleep", "1000")
	cube(t, "run", "--name", ended, stack.Image, "true")
	t.Cleanup(func() { cube(t, "rm", "-f", id, shares, ended) })
	name := cube(t, "snapshot", "create", id, "--name", "once")
	for _, c := range []struct {
		line  string
		words []string
	}{
		{"snapshot create nobody", []string{"no container nobody", "cube ps -a"}},
		{"snapshot create " + ended, []string{"isn't running"}},
		{"snapshot create " + shares, []string{shared, "no snapshot can keep"}},
		{"snapshot create --name ../x " + id, []string{"snapshot name"}},
		{"snapshot create --name once " + id, []string{"snapshot of that name"}},
		{"snapshot create", []string{"of which container"}},
		{"snapshot bogus", []string{"bogus"}},
		{"snapshot inspect none", []string{"there is no snapshot none"}},
		{"snapshot inspect ../x", []string{"snapshot name"}},
		{"snapshot rm none", []string{"there is no snapshot none"}},
		{"snapshot rm", []string{"at least one SNAPSHOT"}},
		{"rollback " + id, []string{"cube snapshot ls"}},
		{"rollback " + id + " none", []string{"there is no snapshot none"}},
		{"rollback " + ended + " once", []string{"isn't running"}},
		{"rollback " + shares + " once", []string{"it is of pod " + id}},
		{"rollback nobody once", []string{"no container nobody"}},
		{"clone nobody", []string{"no container nobody"}},
		{"clone " + shares, []string{shared}},
		{"clone -n 0 " + id, []string{"from 1 to 100"}},
		{"clone -n 101 " + id, []string{"from 1 to 100"}},
		{"clone " + id + " " + ended, []string{"one container"}},
	} {
		says(t, strings.Fields(c.line), c.words...)
	}
	if left := cube(t, "snapshot", "ls", "-q"); left != name {
		t.Errorf("snapshots: %s", left)
	}
}

// teller says again and again who it is: something from its memory, then what is new each time.
const teller = `me=$(cat /proc/sys/kernel/random/uuid); i=0; while :; do i=$((i+1)); echo $me $i $(cat /proc/sys/kernel/random/uuid); sleep 0.5; done`

// TestCloneEight: clones go on from one place, each its own way.
func TestCloneEight(t *testing.T) {
	store(t)
	id := s.ID(t, "eight")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", teller)
	t.Cleanup(func() { cube(t, "rm", "-f", id) })
	line := func(id string) []string {
		var f []string
		s.Eventually(t, 30*time.Second, "a line of "+id, func() bool {
			f = strings.Fields(cube(t, "logs", id))
			return len(f) >= 3
		})
		return f[:3]
	}
	me := line(id)[0]
	began := time.Now()
	clones := strings.Fields(cube(t, "clone", id, "-n", "8"))
	t.Logf("8 clones in %v", time.Since(began).Round(time.Millisecond))
	t.Cleanup(func() { cube(t, append([]string{"rm", "-f"}, clones...)...) })
	if len(clones) != 8 {
		t.Fatalf("clones %q", clones)
	}
	seen, at := map[string]bool{}, ""
	for _, clone := range clones {
		f := line(clone)
		if f[0] != me || seen[f[2]] || at != "" && at != f[1] {
			t.Errorf("%s begins with %q; %v are taken, and others began at %s", clone, f, seen, at)
		}
		seen[f[2]], at = true, f[1]
	}
	for _, clone := range clones[:3] {
		cube(t, "exec", clone, "sh", "-c", "echo "+clone+" >/mine")
	}
	for _, clone := range clones[:3] {
		if got := cube(t, "exec", clone, "cat", "/mine"); got != clone {
			t.Errorf("the disk of %s has %q", clone, got)
		}
	}
	if r := s.Cube("exec", id, "cat", "/mine"); r.Err == nil {
		t.Errorf("the parent has what a clone wrote: %s", r.Stdout)
	}
	if left := cube(t, "snapshot", "ls", "-q"); left != "" {
		t.Errorf("left: %s", left)
	}
}

// TestParallel: what is asked for at the same time is done one after the other on one container, and for several containers
// at a time.
func TestParallel(t *testing.T) {
	st := store(t)
	one, other := s.ID(t, "one"), s.ID(t, "other")
	for _, id := range []string{one, other} {
		cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", ticker)
		t.Cleanup(func() { cube(t, "rm", "-f", id) })
	}
	first := cube(t, "snapshot", "create", one)
	var all []*command
	for n := range 3 {
		all = append(all, begin(t, "snapshot", "create", one, "--name", fmt.Sprint("one-", n)), begin(t, "snapshot", "create", other, "--name", fmt.Sprint("other-", n)),
			begin(t, "rollback", one, first))
	}
	all = append(all, begin(t, "clone", one))
	for _, c := range all {
		if err := c.Wait(); err != nil {
			t.Errorf("%v: %v: %s", c.Args[1:], err, &c.err)
		}
	}
	clone := strings.TrimSpace(all[len(all)-1].out.String())
	t.Cleanup(func() { cube(t, "rm", "-f", clone) })
	for _, id := range []string{one, other, clone} {
		goesOn(t, id)
	}
	if list, err := st.List(); err != nil || len(list) != 7 {
		t.Errorf("%d snapshots, %v", len(list), err)
	}
	// One that is in use is gone at once for whoever looks for it.
	cube(t, "rollback", other, "other-2")
	r := s.Cube("snapshot", "rm", "other-2", "one-0")
	if r.Err != nil || !strings.Contains(r.Stderr, "other-2 is deleted; still in use by "+other+",") {
		t.Errorf("rm: %+v", r)
	}
	says(t, []string{"rollback", other, "other-2"}, "there is no snapshot other-2")
	if users, err := st.Users("other-2"); err != nil || len(users) != 1 {
		t.Errorf("users %v, %v", users, err)
	}
}
