package snapshot

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// end ends one of the stack's daemons, by a word of its command line, and returns when it is gone.
func end(t *testing.T, word string, sig unix.Signal) {
	t.Helper()
	found := s.Processes(word)
	if len(found) != 1 {
		t.Fatalf("%d processes have %q: %v", len(found), word, found)
	}
	s.End(t, found[0].PID, sig)
}

const daemon = " up --daemon"

// command is a cube command under way.
type command struct {
	*exec.Cmd
	out, err bytes.Buffer
}

func begin(t *testing.T, args ...string) *command {
	t.Helper()
	c := &command{Cmd: s.Command("cube", args...)}
	c.Stdout, c.Stderr = &c.out, &c.err
	must(t, c.Start())
	return c
}

// progress is what commands say of themselves while they last.
var progress = regexp.MustCompile(`(?m)^cube: [a-z ]+: \d+ s\n`)

// fails sees that it has failed with one line, and nothing on stdout.
func (c *command) fails(t *testing.T) {
	t.Helper()
	if c.Wait() == nil {
		t.Errorf("%v succeeds", c.Args[1:])
	}
	c.failed(t)
}

// failed sees what it has said.
func (c *command) failed(t *testing.T) {
	t.Helper()
	if lines := progress.ReplaceAllString(c.err.String(), ""); c.out.Len() > 0 || strings.Count(lines, "\n") != 1 {
		t.Errorf("%v said %q, %q", c.Args[1:], &c.out, &c.err)
	}
}

// alone sees that nothing is left of clones of a ticker, which goes on.
func alone(t *testing.T, id string) {
	t.Helper()
	if got := cube(t, "ps", "-aq"); got != id {
		t.Errorf("containers %q, not %s alone", got, id)
	}
	if left := cube(t, "snapshot", "ls", "-q"); left != "" {
		t.Errorf("snapshots are left: %s", left)
	}
	s.Eventually(t, time.Minute, "no claims", func() bool { // the last that goes
		left, _ := os.ReadDir(sandbox.CloneDir(s.Config))
		return len(left) == 0
	})
	goesOn(t, id)
}

// goesOn waits until a ticker has ticked.
func goesOn(t *testing.T, id string) {
	t.Helper()
	at := ticks(t, id)
	s.Eventually(t, time.Minute, "ticks of "+id, func() bool { return ticks(t, id) > at })
}

// TestCloneAbandoned: of clones whose maker ends there is none, whenever that is. The container goes on.
func TestCloneAbandoned(t *testing.T) {
	store(t)
	id := s.ID(t, "abandoned")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", ticker)
	t.Cleanup(func() { cube(t, "rm", "-f", id) })
	const daemonToo = true
	for _, c := range []struct {
		at     string
		dir    string
		prefix string
		sig    unix.Signal
		daemon bool
	}{
		{"the save", sandbox.CloneDir(s.Config), "clone-", unix.SIGKILL, daemonToo},
		{"the snapshot", s.Config.SnapshotDir(), "clone-", unix.SIGKILL, daemonToo},
		{"a clone's shim", s.Config.PodDir(), "", unix.SIGKILL, daemonToo},
		{"a clone's disks", s.Config.DiskDir(), "", unix.SIGKILL, daemonToo},
		{"a clone's shim", s.Config.PodDir(), "", unix.SIGTERM, daemonToo},
		{"a clone's disks", s.Config.DiskDir(), "", unix.SIGINT, false},
	} {
		w := watch(t, c.dir)
		w.names = nil // those of before
		clone := begin(t, "clone", id, "-n", "3")
		w.await(c.prefix)
		if c.daemon {
			end(t, daemon, c.sig)
		} else {
			must(t, clone.Process.Signal(c.sig))
		}
		clone.fails(t)
		began := time.Now()
		if c.daemon {
			cube(t, "up", "-d")
		} else {
			s.Eventually(t, time.Minute, "clones gone", func() bool { return cube(t, "snapshot", "ls", "-q") == "" })
		}
		t.Logf("%v at %s: %s; undone after %v", c.sig, c.at, strings.TrimSpace(clone.err.String()), time.Since(began).Round(time.Millisecond))
		alone(t, id)
	}
}

// TestDownWhileCloning: the stack can be taken down at any time, and has nothing of the clones when it is there again.
func TestDownWhileCloning(t *testing.T) {
	store(t)
	id := s.ID(t, "down")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", ticker)
	t.Cleanup(func() { cube(t, "rm", "-f", id) })
	w := watch(t, s.Config.PodDir())
	w.names = nil
	clone := begin(t, "clone", id, "-n", "3")
	w.await("")
	cube(t, "down")
	if clone.Wait() == nil { // all of them were there by then
		cube(t, "up", "-d")
		for _, made := range strings.Fields(clone.out.String()) {
			cube(t, "rm", made)
		}
	} else {
		clone.failed(t)
		cube(t, "up", "-d")
	}
	if got := cube(t, "ps", "-aq"); got != id {
		t.Errorf("containers %q, not %s alone", got, id)
	}
	if left := cube(t, "snapshot", "ls", "-q"); left != "" {
		t.Errorf("snapshots are left: %s", left)
	}
}

// TestOperationsSurvive: the daemon's connection survives containerd, and a rollback its client.
func TestOperationsSurvive(t *testing.T) {
	store(t)
	id := s.ID(t, "survives")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", ticker)
	t.Cleanup(func() { cube(t, "rm", "-f", id) })
	name := cube(t, "snapshot", "create", id)
	end(t, filepath.Join(s.Config.RunDir, "containerd.toml"), unix.SIGKILL)
	clone := cube(t, "clone", id)
	t.Cleanup(func() { cube(t, "rm", "-f", clone) })
	if ticks(t, clone) == 0 {
		t.Error("the clone doesn't tick")
	}

	goesOn(t, id)
	before := s.PID(t, id)
	w := watch(t, s.Config.DiskDir())
	w.names = nil
	rollback := begin(t, "rollback", id, name)
	w.await("")
	must(t, rollback.Process.Signal(unix.SIGINT))
	rollback.fails(t)
	// It has its turn after the rollback.
	again := cube(t, "snapshot", "create", id)
	if s.PID(t, id) == before {
		t.Error("the rollback was given up")
	}
	cube(t, "snapshot", "rm", again, name)
}

// TestWithoutDaemon: commands say what there isn't, in a line. What runs goes on.
func TestWithoutDaemon(t *testing.T) {
	end(t, daemon, unix.SIGTERM)
	for _, line := range []string{"snapshot create", "snapshot ls", "snapshot inspect", "snapshot rm", "rollback", "clone", "pause", "resume", "df", "prune"} {
		args := strings.Fields(line)
		switch line {
		case "snapshot ls", "df", "prune":
		case "rollback":
			args = append(args, "x", "y")
		default:
			args = append(args, "x")
		}
		want := "cube: " + line + ": no daemon runs; start the stack: cube up"
		if r := s.Cube(args...); r.Err == nil || !strings.HasPrefix(r.Stderr, want) || strings.Count(r.Stderr, "\n") != 1 {
			t.Errorf("%v: %q, want %q", args, r.Stderr, want)
		}
	}
	cube(t, "up", "-d")
}
