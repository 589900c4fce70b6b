package snapshot

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
)

// keeper counts in memory, and in files that it never closes; it says each number once, and a long line with it.
const keeper = `exec 3>>/n; i=0; while :; do i=$((i+1)); echo $i >&3; printf '%d %0200d\n' $i $i; sleep 0.01; done`

// gapless sees that a keeper's log has each number once, and returns the last.
func gapless(t *testing.T, id string) int {
	t.Helper()
	n := 0
	for line := range strings.Lines(s.Cube("logs", id).Stdout) {
		n++
		if want := fmt.Sprintf("%d %0200d\n", n, n); line != want {
			t.Fatalf("line %d of the log is %.30q", n, line)
		}
	}
	return n
}

// lasts is how far a keeper is by its file.
func lasts(t *testing.T, id string) int {
	t.Helper()
	n, err := strconv.Atoi(cube(t, "exec", id, "sh", "-c", "cp /n /m; tail -n 1 /m; [ $(wc -l </m) = $(tail -n 1 /m) ]"))
	must(t, err)
	return n
}

// isPaused sees that a container is that, and has nothing of the host.
func isPaused(t *testing.T, id string) {
	t.Helper()
	if got := cube(t, "ps"); !strings.Contains(got, id) || !strings.Contains(got, "paused") {
		t.Errorf("cube ps: %s", got)
	}
	if left := s.Processes(id); len(left) > 0 {
		t.Errorf("processes: %v", left)
	}
	if left, _ := os.ReadDir(s.Config.DiskDir()); len(left) > 0 {
		t.Errorf("disks: %v", left)
	}
}

// TestPause: a container is paused to disk and goes on, several times, with each number of it in its log once. All that needs
// it to run says that it doesn't.
func TestPause(t *testing.T) {
	if os.Getenv("CUBE_TEST_LONG") != "" {
		pauses(t, 50)
	} else {
		pauses(t, 5)
	}
}

func pauses(t *testing.T, cycles int) {
	store(t)
	id := s.ID(t, "paused")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", keeper)
	t.Cleanup(func() { s.Cube("rm", "-f", id) }) // unless the test has come to that
	s.Eventually(t, time.Minute, "numbers", func() bool { return gapless(t, id) > 0 })
	for i := range cycles {
		before := lasts(t, id)
		pause := time.Now()
		cube(t, "pause", id)
		paused := time.Since(pause)
		if i == 0 {
			isPaused(t, id)
		}
		resume := time.Now()
		resumes(t, id)
		t.Logf("cycle %d: pause %v, resume %v", i+1, paused.Round(time.Millisecond), time.Since(resume).Round(time.Millisecond))
		after := lasts(t, id)
		if after < before {
			t.Errorf("%d before, %d after", before, after)
		}
		s.Eventually(t, time.Minute, "numbers", func() bool { return gapless(t, id) > after })
		connected(t, id)
		if left := cube(t, "snapshot", "ls", "-q"); left != "" {
			t.Errorf("snapshots are left: %s", left)
		}
	}
	if cycles >= 50 {
		likeNew(t, id)
	}

	cube(t, "pause", id)
	for _, args := range [][]string{{"exec", id, "true"}, {"stop", id}, {"pause", id}, {"clone", id}, {"snapshot", "create", id}} {
		if r := s.Cube(args...); r.Err == nil || !strings.Contains(r.Stderr, "cube resume "+id) {
			t.Errorf("%v: %+v", args, r)
		}
	}
	if gapless(t, id) == 0 {
		t.Error("no log")
	}
	name := cube(t, "snapshot", "ls", "-q")
	if r := s.Cube("snapshot", "rm", name); r.Err == nil || !strings.Contains(r.Stderr, id) {
		t.Errorf("snapshot rm: %+v", r)
	}
	if r := s.Cube("prune"); r.Err != nil || cube(t, "snapshot", "ls", "-q") != name {
		t.Errorf("prune: %+v", r)
	}
	cube(t, "rm", id)
	if left := cube(t, "snapshot", "ls", "-q"); left != "" {
		t.Errorf("snapshots are left: %s", left)
	}
	if left, _ := os.ReadDir(s.Config.PausedDir() + "/" + s.Config.Containerd.Namespace); len(left) > 0 {
		t.Errorf("paused: %v", left)
	}
	for _, args := range [][]string{{"resume", id}, {"pause", id}} {
		if r := s.Cube(args...); r.Err == nil || !strings.Contains(r.Stderr, id) {
			t.Errorf("%v: %+v", args, r)
		}
	}
}

// resumed has a container go on, and returns what the user is told of how.
func resumed(t *testing.T, id string) (note string) {
	t.Helper()
	r := s.Cube("resume", id)
	if r.Err != nil {
		t.Fatalf("resume: %+v", r)
	}
	return progress.ReplaceAllString(r.Stderr, "")
}

// resumes has a container go on from where it was paused.
func resumes(t *testing.T, id string) {
	t.Helper()
	if note := resumed(t, id); note != "" {
		t.Fatalf("%s came back otherwise: %s", id, note)
	}
}

// likeNew sees that a container that has been paused many times takes no more than half as long again as those that are paused
// for the first time. As the load of the host changes, they take turns; what counts is the median.
func likeNew(t *testing.T, id string) {
	t.Helper()
	cycle := func(id string) time.Duration {
		began := time.Now()
		cube(t, "pause", id)
		resumes(t, id)
		return time.Since(began)
	}
	const turns = 7
	var first, later []time.Duration
	for i := range turns {
		fresh := fmt.Sprint(s.ID(t, "fresh-"), i)
		cube(t, "run", "-d", "--name", fresh, stack.Image, "sh", "-c", keeper)
		lasts(t, fresh)
		first = append(first, cycle(fresh))
		cube(t, "rm", "-f", fresh)
		later = append(later, cycle(id))
	}
	slices.Sort(first)
	slices.Sort(later)
	t.Logf("first cycles %v, later ones %v", first, later)
	if first, later := first[turns/2], later[turns/2]; later > first*3/2 {
		t.Errorf("a later cycle takes %v, a first one %v", later, first)
	}
}

// TestPauseForeground: cube run says what has become of its container, and leaves it.
func TestPauseForeground(t *testing.T) {
	store(t)
	id := s.ID(t, "foreground")
	run := begin(t, "run", "--rm", "--name", id, stack.Image, "sh", "-c", keeper)
	t.Cleanup(func() { cube(t, "rm", "-f", id) })
	s.Eventually(t, time.Minute, "a running container", func() bool { return s.Cube("exec", id, "test", "-s", "/n").Err == nil })
	cube(t, "pause", id)
	err := run.Wait()
	if err == nil || !strings.Contains(run.err.String(), "cube resume "+id) || !strings.HasPrefix(run.out.String(), "1 0") {
		t.Errorf("%v, said %q", err, &run.err)
	}
	was := strings.Count(run.out.String(), "\n")
	if r := s.Cube("resume", id); r.Err != nil {
		t.Fatalf("resume: %+v", r)
	}
	s.Eventually(t, time.Minute, "output", func() bool { return cube(t, "logs", id) != "" })
	if next := strings.Fields(cube(t, "logs", id))[0]; next != strconv.Itoa(was+1) {
		t.Errorf("after %d lines it goes on with %s", was, next)
	}
}

// TestPauseKilled: whatever is killed while a container is paused or resumed, it runs or is paused, and goes on.
func TestPauseKilled(t *testing.T) {
	store(t)
	id := s.ID(t, "killed")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", keeper)
	t.Cleanup(func() { cube(t, "rm", "-f", id) })
	for _, c := range []struct{ verb, at, word string }{
		{"pause", s.Config.SnapshotDir(), daemon},
		{"resume", s.Config.DiskDir(), daemon},
		{"resume", s.Config.PodDir(), "containerd-shim-cube-v2 -namespace default -id"},
		{"resume", s.Config.DiskDir(), "-M microvm"},
	} {
		if c.verb == "resume" && !strings.Contains(cube(t, "ps"), "paused") {
			cube(t, "pause", id)
		}
		w := watch(t, c.at)
		w.names = nil
		under := begin(t, c.verb, id)
		w.await("")
		s.Eventually(t, time.Minute, c.word, func() bool { return len(s.Processes(c.word)) == 1 })
		end(t, c.word, unix.SIGKILL)
		err := under.Wait()
		if c.word == daemon {
			cube(t, "up", "-d")
		}
		t.Logf("%s amid %s: %v, %s", c.word, c.verb, err, under.err.String())
		s.Eventually(t, time.Minute, "a paused or running container", func() bool {
			r := s.Cube("exec", id, "true")
			return r.Err == nil || strings.Contains(r.Stderr, "cube resume")
		})
		if strings.Contains(cube(t, "ps"), "paused") {
			// Containerd may still be ending what the killed one had begun.
			s.Eventually(t, time.Minute, "a resume", func() bool { return s.Cube("resume", id).Err == nil })
		}
		lasts(t, id)
		if left := cube(t, "snapshot", "ls", "-q"); left != "" {
			t.Errorf("snapshots are left: %s", left)
		}
	}
}
