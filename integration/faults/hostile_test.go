package faults

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/internal/hostile"
)

const (
	// shimMemory is what a shim may use, whatever its guest does. With a good one it is below 20 MiB.
	shimMemory = 64 << 20
	// promptly is how soon a guest that breaks the protocol, or dies, must be done with.
	promptly = 20 * time.Second
	// patiently is the same of one that keeps silent: the longest deadline of a call and those of the undoing.
	patiently = 100 * time.Second
)

// TestHostileGuest gives real machines an agent that has been taken over. Each mode has a container that can't be made,
// or one that can be ended; either way in bounded time, with a shim of bounded size, and nothing is left.
func TestHostileGuest(t *testing.T) {
	h := hostileStack(t)
	for _, tc := range []struct {
		mode   string
		words  string // of the error, if the container can't be made
		lives  bool   // it can, and has to be killed
		within time.Duration
		long   bool
	}{
		{mode: hostile.Garbage, within: promptly},
		{mode: hostile.HugeFrame, within: promptly, long: true},
		{mode: hostile.HugeMessage, words: "doesn't keep to the protocol", within: promptly},
		{mode: hostile.Stray, within: promptly, long: true},
		{mode: hostile.WrongID, words: "doesn't keep to the protocol", within: promptly},
		{mode: hostile.WrongType, words: "doesn't keep to the protocol", within: promptly, long: true},
		{mode: hostile.Twice, within: promptly, long: true},
		{mode: hostile.Torn, within: promptly, long: true},
		{mode: hostile.Text, words: "…", within: promptly, long: true},
		{mode: hostile.Deaf, words: "didn't answer StartContainer", within: patiently, long: true},
		{mode: hostile.Die + "Configure", words: "panic", within: promptly, long: true},
		{mode: hostile.Die + "CreateContainer", words: "panic", within: promptly},
		{mode: hostile.Die + "StartContainer", words: "panic", within: promptly, long: true},
		{mode: hostile.Die + "Events", words: "panic", within: promptly, long: true},
		{mode: hostile.Die + "SignalProcess", lives: true, within: promptly, long: true},
		{mode: hostile.Die + "Shutdown", lives: true, within: promptly, long: true},
		{mode: hostile.Silent + "Configure", words: "identity", within: patiently, long: true},
		{mode: hostile.Silent + "CreateContainer", words: "didn't answer CreateContainer", within: patiently, long: true},
		{mode: hostile.Silent + "StartContainer", words: "didn't answer StartContainer", within: patiently, long: true},
		{mode: hostile.Silent + "SignalProcess", lives: true, within: patiently},
		{mode: hostile.Silent + "Shutdown", lives: true, within: patiently, long: true},
		{mode: hostile.Silent + "Events", lives: true, within: patiently, long: true},
		{mode: hostile.Undead, lives: true, within: patiently, long: true},
		{mode: hostile.Events, lives: true, within: promptly},
		{mode: hostile.Restless, within: promptly, long: true},
		{mode: hostile.Metrics, lives: true, within: promptly, long: true},
		{mode: hostile.Output, lives: true, within: promptly},
	} {
		t.Run(tc.mode, func(t *testing.T) {
			if tc.long {
				oneOfMany(t)
			}
			id := hostile.ID(h.Name(), tc.mode)
			peak := watchShim(h)
			began := time.Now()
			flags := []string{"run", "--runtime", "io.cube.v2", "--snapshotter", "cube"}
			if tc.lives {
				live(t, h, tc.mode, append(flags, stack.Image, id, "true"))
				began = time.Now() // what it has to say takes an emulated guest as long as it takes
				if r := h.Ctr("task", "metrics", id); tc.mode == hostile.Metrics && r.Err == nil {
					t.Errorf("nonsense was taken for metrics: %+v", r)
				}
				if r := h.Ctr("task", "rm", "-f", id); r.Err != nil {
					t.Error(r.Err)
				}
			} else {
				r := h.Ctr(append(flags, stack.Image, id, "true")...)
				if msg := strings.TrimSpace(r.Stderr); r.Code == 0 || strings.ContainsAny(msg, "\n\x1b") || len(msg) > 4<<10 || !strings.Contains(msg, tc.words) {
					t.Errorf("want an error of one line with %q, got code %d and %.4096q", tc.words, r.Code, r.Stderr)
				}
				h.Ctr("task", "rm", "-f", id) // there is none where its creation has failed
			}
			if r := h.Ctr("container", "rm", id); r.Err != nil {
				t.Error(r.Err)
			}
			took := time.Since(began)
			h.Eventually(t, 5*time.Second, "nothing left", func() bool {
				return len(h.VMLeaks()) == 0 && len(stack.CgroupLeaks(id)) == 0
			})
			if limit := h.Config.Timeout(tc.within); took > limit {
				t.Errorf("it took %v, more than %v", took, limit)
			}
			if p := peak(); p == 0 || p > shimMemory {
				t.Errorf("the shim had up to %d MiB, want 1 to %d", p>>20, shimMemory>>20)
			} else {
				t.Logf("%.1f s, shim %d MiB", took.Seconds(), p>>20)
			}
		})
	}
	if r := h.Cube("doctor"); r.Err != nil {
		t.Errorf("%+v", r)
	}
	if n := logSize(h); n > 8<<20 {
		t.Errorf("the guests have filled %d MiB of logs", n>>20)
	}
}

// live starts a container and, if its guest floods the host, lets it do so for a while.
func live(t *testing.T, h *stack.Stack, mode string, run []string) {
	t.Helper()
	switch mode {
	case hostile.Output:
		// A client that takes much, and then no more.
		out := stream(t, h.Command("ctr", run...))
		if n, err := io.CopyN(io.Discard, out, 16<<20); err != nil {
			t.Errorf("the output ended after %d bytes: %v", n, err)
		}
		return
	case hostile.Events:
		events := bufio.NewScanner(stream(t, h.Command("ctr", "events")))
		defer func() {
			for n := 0; n < 3 && events.Scan(); { // a second apart, whatever the guest sends
				if strings.Contains(events.Text(), "/tasks/oom") {
					n++
				}
			}
		}()
	}
	if r := h.Ctr(append([]string{"run", "-d"}, run[1:]...)...); r.Err != nil {
		t.Error(r.Err)
	}
}

// stream starts a command and returns its output. It ends with the test, or after two minutes (scaled).
func stream(t *testing.T, cmd *exec.Cmd) io.Reader {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	limit := time.AfterFunc(s.Config.Timeout(2*time.Minute), func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() {
		limit.Stop()
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // its end was forced
	})
	return out
}

// hostileStack is a stack whose guests' agent is the hostile one.
func hostileStack(t *testing.T) *stack.Stack {
	t.Helper()
	root, err := stack.Repository()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	agent := filepath.Join(dir, "agent")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", agent, "./integration/faults/hostile-agent")
	build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	command(t, build)
	if err := stack.PackGuest(dir, agent); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(s.Config.Artefacts, "qemu"), filepath.Join(dir, "qemu")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CUBE_ARTEFACTS", dir)
	h, err := stack.Start(root)
	if h != nil {
		t.Cleanup(func() {
			if t.Failed() {
				fmt.Print(h.Logs())
			}
			if err := h.Stop(); err != nil {
				t.Error(err)
			}
		})
	}
	if err == nil {
		err = h.ImportDemo()
	}
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func command(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", cmd.Args, err, out)
	}
}

// watchShim returns how much memory the stack's shims have had at most, each, until that is asked.
func watchShim(h *stack.Stack) (peak func() int64) {
	stop, result := make(chan struct{}), make(chan int64)
	go func() {
		var most int64
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				for _, p := range h.Processes("containerd-shim-cube-v2") {
					most = max(most, highWater(p.PID))
				}
			case <-stop:
				result <- most
				return
			}
		}
	}()
	return func() int64 { close(stop); return <-result }
}

// highWater is the most memory that a process has had, 0 if it has gone.
func highWater(pid int) (n int64) {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if _, after, ok := bytes.Cut(b, []byte("VmHWM:")); ok {
		fmt.Sscan(string(after), &n)
	}
	return n << 10
}

// logSize is how much the stack has written to its logs.
func logSize(h *stack.Stack) (n int64) {
	_ = filepath.WalkDir(h.Config.LogDir(), func(_ string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if st, err := d.Info(); err == nil {
				n += st.Size()
			}
		}
		return nil
	})
	return n
}
