package snapshot

import (
	"encoding/json"
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

// ticks is where a ticker is.
func ticks(t *testing.T, id string) int {
	t.Helper()
	n, err := strconv.Atoi(cube(t, "exec", id, "cat", "/n"))
	must(t, err)
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
	for _, wrong := range [][]string{{"snapshot", "create", "nobody"}, {"snapshot", "inspect", "none"}, {"rollback", id, "none"}, {"clone", "nobody"}, {"snapshot", "rm"}} {
		if r := s.Cube(wrong...); r.Err == nil || strings.Count(r.Stderr, "\n") != 1 {
			t.Errorf("cube %s: %+v", strings.Join(wrong, " "), r)
		}
	}
}
