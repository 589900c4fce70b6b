package snapshot

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
)

// reaches sees that a container reaches the internet, by name.
func reaches(t *testing.T, id string) {
	t.Helper()
	got := cube(t, "exec", id, "timeout", "60", "bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/server.test/%d && echo who >&3 && head -n 1 <&3", testhost.DataPort))
	if got != testhost.Uplink.String() {
		t.Errorf("%s is seen as %q", id, got)
	}
}

// disks are those of machines that were made from snapshots.
func disks(t *testing.T) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(s.Config.DiskDir())
	must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestReboot: what is paused goes on after the host has crashed. What ran is stopped, and its machine's disks don't stay.
func TestReboot(t *testing.T) {
	store(t)
	kept, ran := s.ID(t, "kept"), s.ID(t, "ran")
	cube(t, "run", "-d", "--name", kept, stack.Image, "sh", "-c", keeper)
	t.Cleanup(func() { s.Cube("rm", "-f", kept) }) // unless the test has come to that
	s.Eventually(t, time.Minute, "numbers", func() bool { return gapless(t, kept) > 0 })
	reaches(t, kept)
	before := lasts(t, kept)
	cube(t, "pause", kept)
	cube(t, "run", "-d", "--name", ran, stack.Image, "sh", "-c", ticker)
	t.Cleanup(func() { s.Cube("rm", "-f", ran) })
	goesOn(t, ran)
	cube(t, "pause", ran)
	cube(t, "resume", ran)
	goesOn(t, ran)
	if have := disks(t); len(have) != 1 || !strings.HasPrefix(have[0], ran+"-") {
		t.Fatalf("disks: %v", have)
	}

	s.Crash(t, kept, ran)
	began := time.Now()
	cube(t, "up", "-d")
	t.Logf("up after %v", time.Since(began).Round(time.Millisecond))
	status := map[string]string{}
	for line := range strings.Lines(cube(t, "ps", "-a")) {
		for _, id := range []string{kept, ran} {
			if strings.Contains(line, id) {
				status[id] = line
			}
		}
	}
	if !strings.Contains(status[kept], "paused") || !strings.Contains(status[ran], "not running") {
		t.Errorf("cube ps -a: %q", status)
	}
	// Nobody is told of what the daemon does beside its work.
	s.Eventually(t, time.Minute, "no disks of "+ran, func() bool { return len(disks(t)) == 0 })

	resumes(t, kept)
	after := lasts(t, kept)
	if after < before {
		t.Errorf("%d before, %d after", before, after)
	}
	s.Eventually(t, time.Minute, "numbers", func() bool { return gapless(t, kept) > after })
	connected(t, kept)
	reaches(t, kept)

	cube(t, "rm", ran)
	cube(t, "rm", "-f", kept)
	if got := cube(t, "ps", "-aq"); got != "" {
		t.Errorf("containers are left: %s", got)
	}
	if left := cube(t, "snapshot", "ls", "-q"); left != "" {
		t.Errorf("snapshots are left: %s", left)
	}
	if left, _ := os.ReadDir(filepath.Join(s.Config.PausedDir(), s.Config.Containerd.Namespace)); len(left) > 0 {
		t.Errorf("paused: %v", left)
	}
	if left := append(s.VMLeaks(), stack.CgroupLeaks(kept, ran)...); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
