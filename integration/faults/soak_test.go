package faults

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/api/events"

	"github.com/cubesandbox/cube/integration/stack"
)

// TestSoak runs and removes many containers, some at a time: each gives its own exit code, its events come once and in
// order, and nothing is left at the end.
func TestSoak(t *testing.T) {
	workers, rounds := 3, 4
	if os.Getenv("CUBE_TEST_LONG") != "" {
		workers, rounds = 4, 50
	}
	told := tasks(t, "soak-")
	want := map[string][]string{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range rounds {
				code := (w*rounds + i) % 256
				id := s.ID(t, fmt.Sprintf("soak-%d-%d", w, i))
				r := s.Ctr("run", "--rm", "--runtime", "io.cube.v2", "--snapshotter", "cube", stack.Image, id,
					"sh", "-c", fmt.Sprintf("echo %s; exit %d", id, code))
				if r.Code != code || r.Stdout != id+"\n" {
					t.Errorf("%s: code %d, want %d; output %q: %v", id, r.Code, code, r.Stdout, r.Err)
				}
				mu.Lock()
				want[id] = []string{"create", "start", fmt.Sprintf("exit %d", code), fmt.Sprintf("delete %d", code)}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	got := map[string][]string{}
	for deadline := time.After(s.Config.Timeout(heard)); !equal(got, want); {
		select {
		case e := <-told:
			got[e.id] = append(got[e.id], e.what)
		case <-deadline:
			for id := range want {
				if !slices.Equal(got[id], want[id]) {
					t.Errorf("%s: events %q, want %q", id, got[id], want[id])
				}
			}
			return
		}
	}
	ids := make([]string, 0, len(want))
	for id := range want {
		ids = append(ids, id)
	}
	nothingLeft(t, ids...)
	select {
	case e := <-told:
		t.Errorf("one event too many: %v", e)
	default:
	}
	t.Logf("%d containers, %d at a time", len(want), workers)
}

func equal(a, b map[string][]string) bool {
	if len(a) != len(b) {
		return false
	}
	for id := range a {
		if !slices.Equal(a[id], b[id]) {
			return false
		}
	}
	return true
}

// told is what containerd tells of a container.
type told struct{ id, what string }

// tasks subscribes to the events of all containers that are called so.
func tasks(t *testing.T, name string) <-chan told {
	t.Helper()
	return subscribe(t, `topic~="^/tasks/"`, func(event any) (e told, ok bool) {
		e.id = containerOf(event)
		switch v := event.(type) {
		case *events.TaskCreate:
			e.what = "create"
		case *events.TaskStart:
			e.what = "start"
		case *events.TaskExit:
			e.what = fmt.Sprintf("exit %d", v.ExitStatus)
		case *events.TaskDelete:
			e.what = fmt.Sprintf("delete %d", v.ExitStatus)
		}
		return e, strings.HasPrefix(e.id, s.ID(t, name))
	})
}
