package cli

import (
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// TestFloodedLog: a container that writes 50 MB has the last 30 MiB of it kept, and `cube logs` reads them in order.
func TestFloodedLog(t *testing.T) {
	id := s.ID(t, "flood")
	ok(t, "run", "-d", "--name", id, stack.Image, "sh", "-c",
		"seq 100001 250000 > /dev/shm/lines; for i in $(seq 50); do cat /dev/shm/lines; done; echo last") // 50 × 1,050,000 bytes
	defer func() {
		ok(t, "rm", "-f", id)
		if left, err := filepath.Glob(sandbox.LogPath(s.Config, id) + "*"); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
		noContainers(t)
	}()
	began := time.Now()
	follow := s.Cube("logs", "-f", "-n", "1", id) // until it ends
	t.Logf("52 MB took %s", time.Since(began))
	if follow.Err != nil || !strings.HasSuffix(follow.Stdout, "\n250000\nlast\n") {
		t.Errorf("%v, it ended with %q", follow.Err, follow.Stdout[max(0, len(follow.Stdout)-50):])
	}
	files, err := filepath.Glob(sandbox.LogPath(s.Config, id) + "*")
	if err != nil {
		t.Fatal(err)
	}
	var total int64
	for _, f := range files {
		fi, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		total += fi.Size()
	}
	if len(files) != 3 || total > 30<<20 || total < 20<<20 {
		t.Errorf("%d bytes in %v", total, files)
	}
	lines := strings.Split(ok(t, "logs", id), "\n")
	before := 0
	for _, line := range lines[:len(lines)-2] {
		n, err := strconv.Atoi(line)
		if err != nil || before != 0 && n != before+1 && !(before == 250000 && n == 100001) {
			t.Fatalf("%q after %d", line, before)
		}
		before = n
	}
	if got := ok(t, "logs", "--tail", "2", id); got != "250000\nlast\n" {
		t.Errorf("the last two lines: %q", got)
	}
}

// TestShimLog: shims log to whichever containerd there is, and wait for none.
func TestShimLog(t *testing.T) {
	id := s.ID(t, "logging")
	ok(t, "run", "-d", "--name", id, stack.Image, "sleep", "1000")
	defer func() {
		ok(t, "rm", "-f", id)
		noContainers(t)
	}()
	shims := s.Processes("-id " + id + " ")
	if len(shims) != 1 {
		t.Fatalf("%d shims: %v", len(shims), shims)
	}
	log := filepath.Join(s.Config.LogDir(), "containerd.log")
	dumps := func() int {
		b, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), "END goroutine stack dump")
	}
	dumped := func(when string) {
		t.Helper()
		before := dumps()
		kill(t, shims[0].PID, unix.SIGUSR1) // pkg/shim logs all stacks
		s.Eventually(t, 10*time.Second, "the shim's log "+when, func() bool { return dumps() > before })
	}
	dumped("at first")

	old := containerd(t)
	kill(t, old, unix.SIGKILL)
	kill(t, shims[0].PID, unix.SIGUSR1) // for nobody
	s.Eventually(t, 20*time.Second, "another containerd", func() bool {
		found := s.Processes(filepath.Join(s.Config.RunDir, "containerd.toml"))
		return len(found) == 1 && found[0].PID != old && s.Cube("ps").Err == nil
	})
	dumped("after containerd has been killed")
	if r := s.Cube("exec", id, "true"); r.Err != nil {
		t.Error(r.Err)
	}
}

// TestLogBinary: a program that ctr names gets the output, and has seen all of it when the task is deleted.
func TestLogBinary(t *testing.T) {
	id, dir := s.ID(t, "binary"), t.TempDir()
	q := url.Values{"-c": {`echo >&5; exec 5>&-; cd "` + dir + `"; cat <&4 >err & cat <&3 >out; wait; echo $CONTAINER_NAMESPACE $CONTAINER_ID >>out`}}
	if r := s.Ctr("run", "-d", "--runtime", sandbox.Runtime, "--snapshotter", sandbox.Snapshotter, "--log-uri", "binary-v2:///bin/sh?"+q.Encode(),
		stack.Image, id, "sh", "-c", "echo one; echo two >&2; exit 3"); r.Err != nil {
		t.Fatal(r.Err)
	}
	defer noContainers(t)
	defer ok(t, "rm", "-f", id)
	s.Eventually(t, 20*time.Second, "its end", func() bool { return list(t, "-a")[id].Status == "stopped" })
	if r := s.Ctr("task", "rm", id); r.Err != nil && !strings.Contains(r.Stderr, "exit code 3") {
		t.Error(r.Err)
	}
	for name, want := range map[string]string{"out": "one\ndefault " + id + "\n", "err": "two\n"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
}
