package task

import (
	"context"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm"
)

var small = pod.MachineRequest{Machine: spec.Machine{Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}}, NetNS: "/run/netns/x", Hostname: "host"}

// TestMachineOfThePod: it is there without containers, and ends when it is told to, with all of them.
func TestMachineOfThePod(t *testing.T) {
	h := newHarness(t)
	ctx := t.Context()
	if _, ok := h.pod.Machine(); ok {
		t.Error("a machine before the start")
	}
	if _, err := h.pod.WaitMachine(ctx); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("wait before the start: %v", err)
	}
	h.must(h.pod.StopMachine(ctx)) // of nothing
	if _, err := h.pod.StartMachine(ctx, small); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("start in a pod that isn't reserved: %v", err)
	}
	h.must(h.pod.Reserve(spec.Common{}))
	if err := h.pod.Reserve(spec.Common{}); !errdefs.IsAlreadyExists(err) {
		t.Errorf("second reservation: %v", err)
	}
	if err := h.member("early", nil, "sleep").tryCreate(ctx); err == nil {
		t.Error("a container before the machine")
	}
	pid, err := h.pod.StartMachine(ctx, small)
	h.must(err)
	m := h.launcher.Last()
	if s, ok := h.pod.Machine(); !ok || s.PID != pid || s.Since.IsZero() || s.Exit != nil {
		t.Errorf("status %+v", s)
	}
	if m.NetNS != small.NetNS || m.Guest.Identity().Hostname != "host" || !h.podState().Sandbox {
		t.Errorf("request %+v, identity %v, record %+v", m.Request, m.Guest.Identity(), h.podState())
	}
	if _, err := h.pod.StartMachine(ctx, small); !errdefs.IsAlreadyExists(err) {
		t.Errorf("second start: %v", err)
	}

	once := h.member("once", nil, "exit", "0").run()
	once.wait("")
	once.delete()
	h.must(second(h.Service.Shutdown(ctx, &taskapi.ShutdownRequest{ID: "once"})))
	app := h.member("app", nil, "sleep").run()
	if m.Stopped() || len(h.launcher.All()) != 1 {
		t.Error("the machine has ended with a container")
	}
	waited := make(chan pod.Exit, 1)
	go func() {
		e, err := h.pod.WaitMachine(context.Background())
		if err != nil {
			t.Error(err)
		}
		waited <- e
	}()
	for range 2 {
		h.must(h.pod.StopMachine(ctx))
	}
	if s := app.wait(""); s != 137 {
		t.Errorf("status %d", s)
	}
	if e := <-waited; e.Status != 137 || e.At.IsZero() {
		t.Errorf("exit %+v", e)
	}
	if s, ok := h.pod.Machine(); !ok || s.Exit == nil || !m.Stopped() || !h.podState().Undone {
		t.Errorf("status %+v, record %+v", s, h.podState())
	}
	app.delete()
	if err := h.member("late", nil, "sleep").tryCreate(ctx); err == nil {
		t.Error("a container in a machine that has ended")
	}
}

func TestDeathOfThePodsMachine(t *testing.T) {
	h := newHarness(t)
	h.must(h.pod.Reserve(spec.Common{}))
	_, err := h.pod.StartMachine(t.Context(), small)
	h.must(err)
	app := h.member("app", nil, "sleep").run()
	h.launcher.Last().Crash("guest panicked")
	e, err := h.pod.WaitMachine(t.Context())
	h.must(err)
	if s := app.wait(""); e.Status != 255 || s != 255 {
		t.Errorf("exits %+v and %d", e, s)
	}
	for deadline := time.Now().Add(10 * time.Second); !h.launcher.Last().Stopped(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("what the machine held isn't freed")
		}
	}
	h.must(h.pod.StopMachine(t.Context()))
}

// TestNoMemoryForTheMachine: none is started where the host has no memory left for it, whoever asks, and nothing is left.
func TestNoMemoryForTheMachine(t *testing.T) {
	h := newHarness(t)
	file := os.Getenv(config.FileEnv)
	text, err := os.ReadFile(file)
	h.must(err)
	h.must(os.WriteFile(file, append(text, "[admission]\nmemory_headroom = '1024TiB'\n"...), 0o600))
	h.spec("sleep")
	if _, err := h.Service.Create(t.Context(), h.createRequest()); !errdefs.IsUnavailable(errgrpc.ToNative(err)) || !strings.Contains(err.Error(), "0 MiB of memory left for machines (admission.memory_headroom = 1PiB is kept)") {
		t.Errorf("create: %v", err)
	}
	if n := len(h.launcher.All()); n != 0 {
		t.Errorf("%d machines were started", n)
	}
	h.must(os.WriteFile(file, text, 0o600))
	h.create("sleep")
	h.must(h.kill("", syscall.SIGKILL))
}

func TestFailedMachineOfThePod(t *testing.T) {
	h := newHarness(t)
	h.must(h.pod.Reserve(spec.Common{}))
	h.launcher.Fail = errors.New("boom")
	if _, err := h.pod.StartMachine(t.Context(), small); err == nil || !strings.Contains(err.Error(), "boom") {
		t.Errorf("error %v", err)
	}
	if _, ok := h.pod.Machine(); ok || !h.podState().Undone {
		t.Errorf("a machine; record %+v", h.podState())
	}
	h.launcher.Fail = nil
	_, err := h.pod.StartMachine(t.Context(), small)
	h.must(err)
	h.must(h.pod.StopMachine(t.Context()))
}
