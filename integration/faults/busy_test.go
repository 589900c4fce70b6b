package faults

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
)

// prompt is what a container's neighbours may not delay its calls beyond: what they do takes much longer.
const prompt = 5 * time.Second

// TestBusyPod asks a container of a pod while another one keeps the machine, its agent and the shim busy.
func TestBusyPod(t *testing.T) {
	pod, _ := start(t, "pod", group(t), "sleep", "1000")
	for _, tc := range []struct {
		name string
		// begin makes another container busy. still tells whether it is.
		begin func(t *testing.T, id string) (still func() bool)
	}{
		{"StuckInCreate", stuckInCreate},
		{"CopiesToStdout", copiesToStdout},
		{"CopiesToDisk", copiesToDisk},
	} {
		t.Run(tc.name, func(t *testing.T) {
			id, _ := start(t, "asked", group(t), "sleep", "1000")
			a := ask(t, id)
			other := s.ID(t, "busy")
			still := tc.begin(t, other)
			for range 3 {
				t.Logf("State %v, Stats %v, Pids %v", a.state(prompt, client.Running), a.stats(prompt), a.pids(prompt))
			}
			t.Logf("Kill %v", a.kill(prompt))
			t.Logf("Wait %v", a.wait(prompt, 137))
			if !still() {
				t.Error("the other container wasn't busy all the time")
			}
			remove(t, id)
		})
	}
	ask(t, pod).state(prompt, client.Running)
	remove(t, pod)
	nothingLeft(t, pod, s.ID(t, "asked"), s.ID(t, "busy"))
}

// group are the flags for a container of the pod.
func group(t *testing.T) []string {
	return []string{"--annotation", "io.containerd.runc.v2.group=" + s.ID(t, "pod")}
}

// member starts a client that runs a container of the pod.
func member(t *testing.T, id string, stdout interface{ Write([]byte) (int, error) }, flags []string, command ...string) *exec.Cmd {
	t.Helper()
	args := append([]string{"run", "--runtime", "io.cube.v2", "--snapshotter", "cube"}, append(group(t), flags...)...)
	cmd := s.Command("ctr", append(append(args, stack.Image, id), command...)...)
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = stdout, &text
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // which gives up a creation
		_ = cmd.Wait()
		remove(t, id)
		if t.Failed() {
			t.Logf("the busy container's client: %s", text.String())
		}
	})
	return cmd
}

// counter counts what a container writes.
type counter struct{ n atomic.Int64 }

func (c *counter) Write(b []byte) (int, error) {
	c.n.Add(int64(len(b)))
	return len(b), nil
}

// much is what the busy container copies; the other one is asked long before it has.
const much = 1 << 30

func copiesToStdout(t *testing.T, id string) func() bool {
	var c counter
	member(t, id, &c, nil, "dd", "if=/dev/zero", "bs=1M", "count="+strconv.Itoa(much>>20))
	s.Eventually(t, 30*time.Second, "output", func() bool { return c.n.Load() > 0 })
	before := c.n.Load()
	return func() bool {
		n := c.n.Load()
		t.Logf("%d MiB copied meanwhile", (n-before)>>20)
		return n > before && n < much
	}
}

func copiesToDisk(t *testing.T, id string) func() bool {
	var c counter
	member(t, id, &c, nil, "sh", "-c", "echo; dd if=/dev/zero of=/file bs=1M conv=fsync count="+strconv.Itoa(much>>20)+"; echo")
	s.Eventually(t, 30*time.Second, "output", func() bool { return c.n.Load() > 0 })
	return func() bool { return c.n.Load() == 1 }
}

// stuckInCreate stops the helper of a bind mount before the guest mounts it.
func stuckInCreate(t *testing.T, id string) func() bool {
	dir := t.TempDir()
	l := watch(t, id)
	var c counter
	member(t, id, &c, []string{"--mount", "type=bind,src=" + dir + ",dst=/mnt,options=rbind:ro"}, "sleep", "1000")
	helper := 0
	for end := time.Now().Add(s.Config.Timeout(30 * time.Second)); helper == 0; {
		if state, err := l.bundle.State(); err == nil && serves(state.Share.Helper.PID) {
			helper = state.Share.Helper.PID
		}
		if time.Now().After(end) {
			t.Fatal("no helper")
		}
	}
	if err := unix.Kill(helper, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	s.Eventually(t, 30*time.Second, "the guest asked for the container", func() bool { l.look(); return l.furthest >= guestAsked })
	return func() bool {
		l.look()
		l.catchUp()
		return l.furthest == guestAsked
	}
}

// serves tells whether a helper has said that it serves: then it has closed the pipe for that and has only the one for
// its output.
func serves(pid int) bool {
	comm, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
	if strings.TrimSpace(string(comm)) != "cube-share" {
		return false
	}
	fds, _ := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "fd", "*"))
	pipes := map[string]bool{}
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err == nil && strings.HasPrefix(target, "pipe:") {
			pipes[target] = true
		}
	}
	return len(pipes) == 1
}
