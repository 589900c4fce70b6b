package e2b

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/vmm/record"
)

// each does something at once with all of a list.
func each[T any](all []T, do func(T)) {
	var wg sync.WaitGroup
	for _, one := range all {
		wg.Go(func() { do(one) })
	}
	wg.Wait()
}

// TestCrowd has many sandboxes created at once, and killed at once: those that there is no room for are told so, all others can be
// used, and nothing is left of either.
func TestCrowd(t *testing.T) {
	n, most := 8, 2 // that may be refused
	if os.Getenv("CUBE_TEST_LONG") != "" {
		n, most = 30, 10
	}
	c := newClient(t)
	before := footprint(t)
	var mu sync.Mutex
	var made []sandbox
	var took []time.Duration
	refused := 0
	began := time.Now()
	each(make([]struct{}, n), func(struct{}) {
		var sb sandbox
		a, err := c.ask("POST", "/v2/sandboxes", map[string]any{"templateID": "base", "timeout": 3600}, &sb)
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err != nil:
			t.Error(err)
		case a.code == 201:
			made, took = append(made, sb), append(took, time.Since(began))
		case a.code != 429 && a.code != 503 || a.message == "" || a.again == "":
			t.Errorf("after %v: %d %s, Retry-After %q", time.Since(began), a.code, a.message, a.again)
		default:
			refused++
			t.Logf("after %v: %d %s, Retry-After %s", time.Since(began), a.code, a.message, a.again)
		}
	})
	if refused > most {
		t.Errorf("%d of %d are refused", refused, n)
	}
	slices.Sort(took)
	t.Logf("%d of %d are there after %v", len(made), n, took)
	for _, sb := range made {
		c.says(sb, "echo here", "here")
	}
	each(made, func(sb sandbox) {
		if code, message, err := c.call("DELETE", "/sandboxes/"+sb.ID, nil, nil); err != nil || code != 204 {
			t.Errorf("delete %s: %d %s, %v", sb.ID, code, message, err)
		}
	})
	asBefore(t, before)
}

// TestRounds creates, pauses, and deletes what is paused, time and again: it takes no more of the host the last time than the first.
func TestRounds(t *testing.T) {
	n := 3
	if os.Getenv("CUBE_TEST_LONG") != "" {
		n = 50
	}
	c := newClient(t)
	before := footprint(t)
	for range n {
		sb := c.create(nil)
		c.do("POST", "/sandboxes/"+sb.ID+"/pause", nil, nil, 204)
		if left := s.VMLeaks(); len(left) > 0 {
			t.Fatalf("%s is paused, and there is %s", sb.ID, left)
		}
		c.do("DELETE", "/sandboxes/"+sb.ID, nil, nil, 204)
	}
	asBefore(t, before)
}

// footprint lists what sandboxes may leave on the host or in the stack's state.
func footprint(t *testing.T) []string {
	t.Helper()
	found := s.VMLeaks()
	for what, r := range map[string]stack.Result{
		"container": s.Ctr("container", "ls", "-q"), "task": s.Ctr("task", "ls", "-q"), "snapshot": s.Ctr("snapshots", "--snapshotter", "cube", "ls"), "lease": s.Ctr("leases", "ls", "-q"),
	} {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		for line := range strings.Lines(r.Stdout) {
			found = append(found, what+": "+strings.Join(strings.Fields(line), " "))
		}
	}
	for _, dir := range []string{s.Config.BundleDir(), s.Config.SnapshotDir(), s.Config.SnapshotterDir(), s.Config.DiskDir(), s.Config.PausedDir(), filepath.Join(s.Config.LogDir(), "containers"),
		filepath.Join(s.Config.RunDir, "clones"), "/run/netns"} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			found = append(found, "file: "+path)
			return err
		})
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	groups, err := record.OrphanGroups(s.Config)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range groups {
		found = append(found, "control group: "+g)
	}
	d, err := db.Open(context.Background(), s.Config.DatabaseFile())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	rows, err := d.SandboxesIn(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		found = append(found, fmt.Sprintf("row: %s %s", r.State, r.ID))
	}
	return found
}

// asBefore sees that nothing is left but what a footprint of before has.
func asBefore(t *testing.T, before []string) {
	t.Helper()
	var left []string
	defer func() {
		if t.Failed() {
			t.Log(strings.Join(left, "\n"))
		}
	}()
	s.Eventually(t, time.Minute, "nothing left", func() bool {
		left = slices.DeleteFunc(footprint(t), func(what string) bool { return slices.Contains(before, what) })
		return len(left) == 0
	})
}
