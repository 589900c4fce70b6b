package faults

import (
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
)

// TestSoak runs and removes many containers, two at a time: each gives its own exit code, and nothing is left at the end.
func TestSoak(t *testing.T) {
	const workers = 2
	rounds := 3
	if os.Getenv("CUBE_TEST_LONG") != "" {
		rounds = 50
	}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range rounds {
				code := (w*rounds + i) % 256
				id := s.ID(t, fmt.Sprintf("soak-%d-%d", w, i))
				r := s.Ctr("run", "--rm", "--runtime", "io.cube.v2", "--snapshotter", "cube", stack.Image, id,
					"sh", "-c", fmt.Sprintf("echo %s; exit %d", id, code))
				if r.Code != code || r.Stdout != id+"\n" {
					t.Errorf("%s: code %d, want %d; output %q: %v", id, r.Code, code, r.Stdout, r.Err)
				}
			}
		}()
	}
	wg.Wait()
	s.Eventually(t, 5*time.Second, "nothing left", func() bool {
		return len(s.VMLeaks()) == 0 && len(stack.CgroupFiles(s.ID(t, "soak-*"), "cgroup.procs")) == 0
	})
}
