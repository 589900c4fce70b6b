package processes

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// TestWhole: a command that ends as a whole has ended with its own process, with all that it has written, however its output is held;
// with a control group of its own so have those that have left its session, without one those of its group of processes.
func TestWhole(t *testing.T) {
	for name, c := range map[string]struct {
		grouped bool
		script  string
	}{
		"group of processes": {false, "sleep 1000 & echo $!"},
		"control group":      {true, "setsid sleep 1000 & echo $!"},
	} {
		t.Run(name, func(t *testing.T) {
			client, reg := newClient(t)
			if c.grouped {
				reg.Commands = controlGroup(t)
			}
			began := time.Now()
			s, _ := start(t, t.Context(), client, shell(c.script+"; seq 20000; exit 3"), WholeHeader)
			out, end := rest(t, s)
			first, all, _ := strings.Cut(out, "\n")
			if end.ExitCode != 3 || strings.Count(all, "\n") != 20000 || !strings.HasSuffix(all, "\n20000\n") {
				t.Errorf("%v after %d bytes", end, len(all))
			}
			if took := time.Since(began); took > wholeWait {
				t.Errorf("it has ended after %v", took)
			}
			child, err := strconv.Atoi(first)
			must(t, err)
			if state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", child)); err == nil && !strings.Contains(string(state), ") Z ") {
				t.Errorf("what it has left goes on: %s", state)
				_ = unix.Kill(child, unix.SIGKILL)
			}
		})
	}
}

// controlGroup makes a group in which nothing must be left.
func controlGroup(t *testing.T) *os.File {
	t.Helper()
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup2"))
	must(t, err)
	if len(mounts) == 0 {
		t.Skip("SKIPPED: there is no cgroup2")
	}
	dir, err := os.MkdirTemp(mounts[0].Mountpoint, "cube-test-whole-")
	must(t, err)
	f, err := os.Open(dir)
	must(t, err)
	t.Cleanup(func() {
		f.Close()
		must(t, os.Remove(dir))
	})
	return f
}
