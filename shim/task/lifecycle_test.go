package task

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"

	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/vmm"
)

func TestLifecycle(t *testing.T) {
	h := newHarness(t)
	h.create("sleep")
	if st := h.state(""); st.Status != tasktypes.Status_CREATED || st.Pid == 0 || st.Bundle != h.bundle {
		t.Fatalf("state after create: %v", st)
	}
	if _, err := h.Service.Create(t.Context(), h.createRequest()); !errdefs.IsAlreadyExists(errgrpc.ToNative(err)) {
		t.Fatalf("second create: %v", err)
	}
	h.start("")
	if st := h.state(""); st.Status != tasktypes.Status_RUNNING {
		t.Fatalf("state after start: %v", st)
	}
	if r := h.record(); r.Undone || r.PID == 0 {
		t.Fatalf("record of a running container: %+v", r)
	}
	h.must(h.kill("", syscall.SIGTERM))
	if w := h.wait(""); w.ExitStatus != 143 || w.ExitedAt == nil {
		t.Fatalf("wait: %v", w)
	}
	if st := h.state(""); st.Status != tasktypes.Status_STOPPED || st.ExitStatus != 143 {
		t.Fatalf("state after exit: %v", st)
	}
	if e, err := record.Bundle(h.bundle).Exit(); err != nil || e.Status != 143 {
		t.Fatalf("recorded exit %+v, %v", e, err)
	}
	d, err := h.delete("")
	h.must(err)
	if d.ExitStatus != 143 || d.Pid == 0 || d.ExitedAt == nil {
		t.Fatalf("delete: %v", d)
	}
	if r := h.record(); !r.Undone {
		t.Fatalf("record after delete: %+v", r)
	}
	if _, err := h.delete(""); !errdefs.IsNotFound(errgrpc.ToNative(err)) {
		t.Fatalf("second delete: %v", err)
	}
	want := []string{"/tasks/create", "/tasks/start", "/tasks/exit box/box 143", "/tasks/delete box 143"}
	if got := h.until("/tasks/delete"); !slices.Equal(got, want) {
		t.Fatalf("events %q, want %q", got, want)
	}
	_, err = h.Service.Shutdown(t.Context(), &taskapi.ShutdownRequest{ID: cid})
	h.must(err)
	<-h.shutdown.Done()
}

func TestExitCodes(t *testing.T) {
	for _, code := range []uint32{0, 1, 2, 42, 127, 255} {
		t.Run(strconv.Itoa(int(code)), func(t *testing.T) {
			h := newHarness(t)
			h.run("exit", strconv.Itoa(int(code)))
			if w := h.wait(""); w.ExitStatus != code {
				t.Fatalf("exit status %d", w.ExitStatus)
			}
		})
	}
}

func TestShutdownIsNoOpWhileTheContainerLives(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	_, err := h.Service.Shutdown(t.Context(), &taskapi.ShutdownRequest{ID: cid})
	h.must(err)
	select {
	case <-h.shutdown.Done():
		t.Fatal("shut down")
	default:
	}
	h.state("")
}

// TestRefusals goes through what must be refused, and as what.
func TestRefusals(t *testing.T) {
	h := newHarness(t)
	notFound, precondition, exists, invalid := errdefs.IsNotFound, errdefs.IsFailedPrecondition, errdefs.IsAlreadyExists, errdefs.IsInvalidArgument
	check := func(what string, err error, is func(error) bool) {
		t.Helper()
		if err == nil || !is(errgrpc.ToNative(err)) {
			t.Errorf("%s: %v", what, err)
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: more than one line: %q", what, err)
		}
	}
	ctx := t.Context()
	startErr := func(execID string) error {
		_, err := h.Service.Start(ctx, &taskapi.StartRequest{ID: cid, ExecID: execID})
		return err
	}
	execErr := func(execID string, args ...string) error {
		_, err := h.Service.Exec(ctx, h.execRequest(execID, args...))
		return err
	}
	deleteErr := func(execID string) error { _, err := h.delete(execID); return err }
	resizeErr := func(execID string) error {
		_, err := h.ResizePty(ctx, &taskapi.ResizePtyRequest{ID: cid, ExecID: execID, Width: 80, Height: 25})
		return err
	}
	statsErr := func() error { _, err := h.Stats(ctx, &taskapi.StatsRequest{ID: cid}); return err }

	check("start of nothing", startErr(""), notFound)
	check("exec in nothing", execErr("e", "sleep"), notFound)
	check("kill of nothing", h.kill("", syscall.SIGKILL), notFound)
	check("delete of nothing", deleteErr(""), notFound)
	_, err := h.Service.State(ctx, &taskapi.StateRequest{ID: cid})
	check("state of nothing", err, notFound)
	c, err := h.Connect(ctx, &taskapi.ConnectRequest{ID: cid})
	if err != nil || c.TaskPid != 0 || c.ShimPid == 0 {
		t.Errorf("connect to nothing: %v, %v", c, err)
	}
	bad := h.createRequest()
	bad.ID = "../evil"
	h.spec("sleep")
	_, err = h.Service.Create(ctx, bad)
	check("bad id", err, invalid)
	bad = h.createRequest()
	bad.Checkpoint = "/some/where"
	_, err = h.Service.Create(ctx, bad)
	check("no checkpoint", err, invalid)

	h.create("sleep")
	check("exec in a created container", execErr("e", "sleep"), precondition)
	check("delete of nothing", deleteErr("e"), notFound)
	h.must(resizeErr(""))
	h.start("")
	check("second start", startErr(""), precondition)
	check("delete while running", deleteErr(""), precondition)
	check("start of an unknown exec", startErr("e"), notFound)
	check("bad exec id", execErr("e/../f", "sleep"), invalid)
	check("exec of nothing", execErr("e"), invalid)
	h.exec("e", "sleep")
	check("second exec of that id", execErr("e", "sleep"), exists)
	check("kill of an exec that isn't started", h.kill("e", syscall.SIGKILL), precondition)
	h.must(resizeErr("e"))
	h.start("e")
	check("second start of the exec", startErr("e"), precondition)
	check("delete of a running exec", deleteErr("e"), precondition)
	h.must(statsErr())

	h.must(h.kill("", syscall.SIGKILL))
	if h.wait("").ExitStatus != 137 || h.wait("e").ExitStatus != 137 {
		t.Error("not killed")
	}
	check("kill of a stopped container", h.kill("", syscall.SIGKILL), notFound)
	check("kill of a stopped exec", h.kill("e", syscall.SIGKILL), notFound)
	check("start of a stopped container", startErr(""), precondition)
	check("exec in a stopped container", execErr("f", "sleep"), precondition)
	check("resize of a stopped container", resizeErr(""), notFound)
	check("stats of a stopped container", statsErr(), notFound)
	_, err = h.CloseIO(ctx, &taskapi.CloseIORequest{ID: cid, Stdin: true})
	h.must(err)
	check("pause of a stopped container", second(h.Pause(ctx, &taskapi.PauseRequest{ID: cid})), precondition)
	check("checkpoint of a stopped container", second(h.Checkpoint(ctx, &taskapi.CheckpointTaskRequest{ID: cid, Path: t.TempDir()})), precondition)
	h.must(deleteErr("e"))
	check("second delete of the exec", deleteErr("e"), notFound)
	h.must(deleteErr(""))
	check("kill after delete", h.kill("", syscall.SIGKILL), notFound)
}

func second[T any](_ T, err error) error { return err }

func TestKillOfACreatedContainer(t *testing.T) {
	h := newHarness(t)
	h.create("sleep")
	h.must(h.kill("", syscall.SIGKILL))
	if w := h.wait(""); w.ExitStatus != 137 {
		t.Fatalf("status %d", w.ExitStatus)
	}
	want := []string{"/tasks/create", "/tasks/exit box/box 137"}
	if got := h.until("/tasks/exit"); !slices.Equal(got, want) {
		t.Fatalf("events %q", got)
	}
}

func TestDeleteOfWhatNeverRan(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.exec("e", "sleep")
	d, err := h.delete("e")
	h.must(err)
	if d.ExitStatus != 0 {
		t.Errorf("status %d", d.ExitStatus)
	}
	h.must(h.kill("", syscall.SIGKILL))
	h.wait("")
	_, err = h.delete("")
	h.must(err)

	h.create("sleep")
	_, err = h.delete("")
	h.must(err)
	for _, e := range h.until("/tasks/delete") {
		if strings.Contains(e, "/e ") {
			t.Errorf("event of an exec that never ran: %s", e)
		}
	}
}

func TestMissingCommand(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.exec("e", "nonsense")
	_, err := h.Service.Start(t.Context(), &taskapi.StartRequest{ID: cid, ExecID: "e"})
	if err == nil || !strings.Contains(err.Error(), "executable file not found in $PATH") {
		t.Fatalf("start: %v", err)
	}
	h.wait("e")
	if _, err := h.delete("e"); err != nil {
		t.Fatal(err)
	}
	h.must(h.kill("", syscall.SIGKILL))
	for _, e := range h.until("/tasks/exit box/box") {
		if strings.Contains(e, "started box/e") || strings.Contains(e, "exit box/e") {
			t.Errorf("event of a process that never was: %s", e)
		}
	}
}

func TestMissingCommandOfTheContainer(t *testing.T) {
	h := newHarness(t)
	h.create("nonsense")
	_, err := h.Service.Start(t.Context(), &taskapi.StartRequest{ID: cid})
	if err == nil || !strings.Contains(err.Error(), "executable file not found in $PATH") {
		t.Fatalf("start: %v", err)
	}
	h.wait("")
	if _, err := h.delete(""); err != nil {
		t.Fatal(err)
	}
	want := []string{"/tasks/create", "/tasks/delete box 127"}
	if got := h.until("/tasks/delete"); !slices.Equal(got, want) {
		t.Fatalf("events %q", got)
	}
}

func TestPids(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.exec("e", "sleep")
	h.exec("created", "sleep")
	h.start("e")
	r, err := h.Pids(t.Context(), &taskapi.PidsRequest{ID: cid})
	h.must(err)
	if len(r.Processes) != 2 {
		t.Fatalf("processes %v", r.Processes)
	}
	for _, p := range r.Processes {
		if p.Pid != uint32(os.Getpid()) {
			t.Errorf("pid %d is not the machine's", p.Pid)
		}
	}
	var d options.ProcessDetails
	h.must(typeurl.UnmarshalTo(r.Processes[1].Info, &d))
	if d.ExecID != "e" {
		t.Errorf("exec id %q", d.ExecID)
	}
}

func TestMetrics(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	r, err := h.Stats(t.Context(), &taskapi.StatsRequest{ID: cid})
	h.must(err)
	if r.Stats.TypeUrl != "io.containerd.cgroups.v2.Metrics" {
		t.Fatalf("type %s", r.Stats.TypeUrl)
	}
}

// TestFailedCreateLeavesNothing breaks Create at each of its steps.
func TestFailedCreateLeavesNothing(t *testing.T) {
	boom := errors.New("boom")
	for name, breakIt := range map[string]func(*harness, *taskapi.CreateTaskRequest){
		"no config.json": func(h *harness, _ *taskapi.CreateTaskRequest) { os.Remove(filepath.Join(h.bundle, "config.json")) },
		"machine": func(h *harness, _ *taskapi.CreateTaskRequest) {
			h.launcher.Fail = &vmm.BootError{Stage: "boot", Console: "a\nb", Err: boom}
		},
		"no such image": func(_ *harness, r *taskapi.CreateTaskRequest) { r.Rootfs[0].Source += ".missing" },
		"disk": func(h *harness, _ *taskapi.CreateTaskRequest) {
			h.launcher.Disks = func(vmm.Disk) error { return boom }
		},
		"no such fifo": func(h *harness, r *taskapi.CreateTaskRequest) { r.Stdout = filepath.Join(h.bundle, "missing") },
		"log binary":   func(_ *harness, r *taskapi.CreateTaskRequest) { r.Stdout = "binary:///nowhere/logger" },
		"hook": func(h *harness, _ *taskapi.CreateTaskRequest) {
			s := h.spec("sleep")
			s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/bin/false"}}}
			h.writeSpec(s)
		},
		"guest": func(h *harness, _ *taskapi.CreateTaskRequest) {
			h.launcher.Disks = func(vmm.Disk) error { h.launcher.Last().Crash("exit status 1"); return nil }
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.spec("sleep")
			r := h.createRequest()
			breakIt(h, r)
			_, err := h.Service.Create(t.Context(), r)
			if err == nil {
				t.Fatal("no error")
			}
			t.Log(err)
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than one line: %q", err)
			}
			if errdefs.IsNotImplemented(errgrpc.ToNative(err)) {
				t.Error("NotImplemented, which containerd misunderstands")
			}
			if st, err := record.Bundle(h.bundle).State(); err == nil && !st.Undone {
				t.Errorf("record %+v", st)
			}
			if _, err := h.Service.State(t.Context(), &taskapi.StateRequest{ID: cid}); !errdefs.IsNotFound(errgrpc.ToNative(err)) {
				t.Errorf("state: %v", err)
			}
			if got := h.recorder.list; len(got) > 0 {
				t.Errorf("events %q", got)
			}
			// What failed can be tried again, and Shutdown after a failure ends the shim.
			h.must(second(h.Service.Shutdown(t.Context(), &taskapi.ShutdownRequest{ID: cid})))
			<-h.shutdown.Done()
		})
	}
}

func TestHooksRunOnTheHost(t *testing.T) {
	h := newHarness(t)
	out := filepath.Join(t.TempDir(), "out")
	s := h.spec("sleep")
	hook := func(name string) []specs.Hook {
		return []specs.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c", "echo " + name + " >> " + out + "; cat >> " + out + "; echo >> " + out}}}
	}
	s.Hooks = &specs.Hooks{CreateRuntime: hook("createRuntime"), Poststart: hook("poststart"), Poststop: hook("poststop")}
	//lint:ignore SA1019 it is still in use
	s.Hooks.Prestart = hook("prestart")
	h.writeSpec(s)
	_, err := h.Service.Create(t.Context(), h.createRequest())
	h.must(err)
	h.start("")
	h.must(h.kill("", syscall.SIGKILL))
	h.wait("")
	_, err = h.delete("")
	h.must(err)
	b, err := os.ReadFile(out)
	h.must(err)
	var order []string
	for _, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		if !strings.HasPrefix(line, "{") {
			order = append(order, line)
		} else if !strings.Contains(line, `"id":"box"`) || !strings.Contains(line, h.bundle) {
			t.Errorf("state %s", line)
		}
	}
	if want := []string{"prestart", "createRuntime", "poststart", "poststop"}; !slices.Equal(order, want) {
		t.Fatalf("hooks %q", order)
	}
	if h.launcher.Last().Guest.Spec(cid).Hooks != nil {
		t.Error("the guest got the host's hooks")
	}
}

func TestIdentity(t *testing.T) {
	h := newHarness(t)
	h.create("sleep")
	id := h.launcher.Last().Guest.Identity()
	if len(id.Entropy) < 32 || id.Hostname != cid || id.SandboxId != cid || time.Since(time.Unix(0, id.UnixNanos)).Abs() > time.Minute {
		t.Fatalf("identity %v", id)
	}
}

// TestNothingIsLeftOfExecs: neither descriptors nor goroutines grow with the number of processes that ran.
func TestNothingIsLeftOfExecs(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	round := func(i int) {
		r := h.execRequest(fmt.Sprintf("e%d", i), [][]string{{"cat"}, {"exit", "3"}, {"nonsense"}}[i%3]...)
		r.Stdin, r.Stdout, r.Stderr = h.fifo("in"), h.fifo("out"), h.fifo("err")
		h.must(second(h.Service.Exec(t.Context(), r)))
		if i%4 != 3 {
			h.Service.Start(t.Context(), &taskapi.StartRequest{ID: cid, ExecID: r.ExecID}) // fails for some
			h.must(second(h.CloseIO(t.Context(), &taskapi.CloseIORequest{ID: cid, ExecID: r.ExecID, Stdin: true})))
			h.wait(r.ExecID)
		}
		h.must(second(h.delete(r.ExecID)))
	}
	count := func() (fds, goroutines int) {
		list, err := os.ReadDir("/proc/self/fd")
		h.must(err)
		return len(list), runtime.NumGoroutine()
	}
	for i := range 12 {
		round(i)
	}
	fds, goroutines := count()
	for i := range 60 {
		round(100 + i)
	}
	// What has just ended may still be on its way.
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		f, g := count()
		if f <= fds && g <= goroutines {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors and %d goroutines have become %d and %d", fds, goroutines, f, g)
		}
	}
}

// TestDeletedTwice: whoever deletes a container while another deletion of it is being answered hears the same, so that nobody
// has nothing to tell if the shim ends first. Later ones hear that there is none, and one that is made anew isn't taken for it.
func TestDeletedTwice(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.must(h.kill("", syscall.SIGTERM))
	h.wait("")
	answered := h.Service.pod.Answer()
	first, err := h.delete("")
	h.must(err)
	second, err := h.delete("")
	h.must(err)
	if first.ExitStatus != 143 || !proto.Equal(first, second) {
		t.Errorf("%v and %v", first, second)
	}
	if _, err := h.delete("another"); !errdefs.IsNotFound(errgrpc.ToNative(err)) {
		t.Errorf("of a process: %v", err)
	}
	h.create("sleep")
	again, err := h.delete("")
	h.must(err)
	if proto.Equal(first, again) {
		t.Errorf("another container's deletion: %v", again)
	}
	answered()
	if _, err := h.delete(""); !errdefs.IsNotFound(errgrpc.ToNative(err)) {
		t.Errorf("a later one: %v", err)
	}
}
