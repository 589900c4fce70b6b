// Package faults ends the parts of a running sandbox in hard ways and checks that containerd hears of it and nothing
// stays behind.
package faults

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/typeurl/v2"

	"github.com/cubesandbox/cube/integration/stack"
)

var s *stack.Stack

func TestMain(m *testing.M) { stack.Main(m, &s) }

// oneOfMany skips a test whose like is in the short form already.
func oneOfMany(t *testing.T) {
	t.Helper()
	if os.Getenv("CUBE_TEST_LONG") == "" {
		t.Skip("one of many: set CUBE_TEST_LONG=1")
	}
}

// heard is how soon an exit must be reported after the machine's end.
const heard = 5 * time.Second

// start runs a detached container and returns its id and its QEMU's pid.
func start(t *testing.T, name string, flags []string, cmd ...string) (string, int) {
	t.Helper()
	id := s.ID(t, name)
	args := append([]string{"run", "-d", "--runtime", "io.cube.v2", "--snapshotter", "cube"}, flags...)
	if r := s.Ctr(append(append(args, stack.Image, id), cmd...)...); r.Err != nil {
		t.Fatal(r.Err)
	}
	t.Cleanup(func() {
		s.Ctr("task", "rm", "-f", id)
		s.Ctr("container", "rm", id)
	})
	return id, s.PID(t, id)
}

// exits subscribes to the exits of a container's init before the fault, and returns the channel of their statuses.
func exits(t *testing.T, id string) <-chan uint32 {
	t.Helper()
	return subscribe(t, `topic=="/tasks/exit"`, func(event any) (uint32, bool) {
		e, ok := event.(*events.TaskExit)
		return e.GetExitStatus(), ok && e.ContainerID == id && e.ID == id
	})
}

// ooms subscribes to what is told of a container's running out of memory.
func ooms(t *testing.T, id string) <-chan struct{} {
	t.Helper()
	return subscribe(t, `topic=="/tasks/oom"`, func(event any) (struct{}, bool) {
		e, ok := event.(*events.TaskOOM)
		return struct{}{}, ok && e.ContainerID == id
	})
}

// subscribe returns a channel of what pick takes from containerd's events.
func subscribe[T any](t *testing.T, filter string, pick func(event any) (T, bool)) <-chan T {
	t.Helper()
	c, err := client.New(s.Config.ContainerdSocket())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(namespaces.WithNamespace(context.Background(), s.Config.Containerd.Namespace))
	t.Cleanup(func() { cancel(); c.Close() })
	ch, errs := c.Subscribe(ctx, filter)
	picked := make(chan T, 1024) // enough for all events of a test
	go func() {
		for {
			select {
			case e := <-ch:
				if v, err := typeurl.UnmarshalAny(e.Event); err == nil {
					if p, ok := pick(v); ok {
						picked <- p
					}
				}
			case <-errs:
				return
			}
		}
	}()
	return picked
}

// mustHear waits for the one exit and sees that ctr can clean up and that nothing is left.
func mustHear(t *testing.T, id string, exits <-chan uint32) uint32 {
	t.Helper()
	var status uint32
	select {
	case status = <-exits:
	case <-time.After(s.Config.Timeout(heard)):
		t.Fatalf("no exit within %v", heard)
	}
	s.Ctr("task", "rm", "-f", id)
	if r := s.Ctr("container", "rm", id); r.Err != nil {
		t.Error(r.Err)
	}
	if r := s.Ctr("task", "ls"); strings.Contains(r.Stdout, id) {
		t.Errorf("the task is still listed: %s", r.Stdout)
	}
	s.Eventually(t, 5*time.Second, "nothing left", func() bool {
		return len(s.VMLeaks()) == 0 && len(stack.CgroupLeaks(id)) == 0
	})
	select {
	case again := <-exits:
		t.Errorf("a second exit, with status %d", again)
	default:
	}
	return status
}

func TestKilledQEMU(t *testing.T) {
	id, pid := start(t, "qemu", nil, "sleep", "1000")
	ch := exits(t, id)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if status := mustHear(t, id, ch); status == 0 {
		t.Error("a killed machine's task ended with status 0")
	}
}

func TestKilledShim(t *testing.T) {
	id, _ := start(t, "shim", nil, "sleep", "1000")
	ch := exits(t, id)
	if err := syscall.Kill(shimOf(t, id), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	mustHear(t, id, ch) // which sees that QEMU has gone, too
}

func TestPanickedGuest(t *testing.T) {
	// A process with all capabilities crashes the guest's kernel; the agent dies with it.
	id, _ := start(t, "panic", []string{"--privileged"}, "sleep", "1000")
	ch := exits(t, id)
	s.Ctr("task", "exec", "--exec-id", "crash", id, "sh", "-c", "echo c > /proc/sysrq-trigger")
	if status := mustHear(t, id, ch); status == 0 {
		t.Error("a panicked machine's task ended with status 0")
	}
}

// shimOf finds the shim's process by the container's id on its command line.
func shimOf(t *testing.T, id string) int {
	t.Helper()
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		cmdline, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		argv := strings.Split(string(cmdline), "\x00")
		if !strings.HasSuffix(argv[0], "containerd-shim-cube-v2") {
			continue
		}
		for _, a := range argv {
			if a == id {
				pid, err := strconv.Atoi(e.Name())
				if err != nil {
					t.Fatal(err)
				}
				return pid
			}
		}
	}
	t.Fatalf("no shim of %s", id)
	return 0
}
