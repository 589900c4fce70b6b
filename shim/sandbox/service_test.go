package sandbox

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	"github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"

	"github.com/cubesandbox/cube/shim/sandbox/cri"
)

// TestLife: all calls, in the order of a pod's life.
func TestLife(t *testing.T) {
	h := newHarness(t)
	r := h.request(&cri.PodSandboxConfig{Hostname: "web-1"})
	r.NetnsPath = "/proc/self/ns/net"
	h.must(second(h.CreateSandbox(t.Context(), r)))
	if s := h.status(false); s.State != "SANDBOX_NOTREADY" || s.Pid != 0 || s.CreatedAt == nil || s.ExitedAt != nil {
		t.Errorf("before the start: %v", s)
	}
	if len(h.launcher.All()) != 0 {
		t.Error("a machine before the start")
	}
	p, err := h.Platform(t.Context(), &sandboxapi.PlatformRequest{SandboxID: id})
	h.must(err)
	if p.Platform.OS != "linux" || p.Platform.Architecture != runtime.GOARCH {
		t.Errorf("platform %v", p.Platform)
	}

	started := h.start()
	m := h.launcher.Last()
	if int(started.Pid) != m.PID() || started.CreatedAt.AsTime().IsZero() {
		t.Errorf("start answers %v", started)
	}
	if m.Guest.Identity().Hostname != "web-1" || !strings.HasPrefix(m.NetNS, "/proc/self/fd/") {
		t.Errorf("identity %v, network namespace %s", m.Guest.Identity(), m.NetNS)
	}
	if _, err := os.Stat(m.NetNS); err != nil {
		t.Errorf("the network namespace isn't held: %v", err)
	}
	s := h.status(true)
	want := map[string]string{"pid": strconv.Itoa(m.PID()), "state": "SANDBOX_READY", "networkSandboxPath": "/proc/self/ns/net"}
	if s.State != "SANDBOX_READY" || s.Pid != started.Pid || !s.CreatedAt.AsTime().Equal(started.CreatedAt.AsTime()) {
		t.Errorf("status %v", s)
	}
	for k, v := range want {
		if s.Info[k] != v {
			t.Errorf("info %s is %q, want %q", k, s.Info[k], v)
		}
	}
	h.must(second(h.PingSandbox(t.Context(), &sandboxapi.PingRequest{SandboxID: id})))
	metrics, err := h.SandboxMetrics(t.Context(), &sandboxapi.SandboxMetricsRequest{SandboxID: id})
	h.must(err)
	if metrics.Metrics.ID != id || metrics.Metrics.Data.GetTypeUrl() != "io.containerd.cgroups.v2.Metrics" || metrics.Metrics.Timestamp == nil {
		t.Errorf("metrics %v", metrics.Metrics)
	}
	h.refused("update", second(h.UpdateSandbox(t.Context(), &sandboxapi.UpdateSandboxRequest{SandboxID: id})), codes.Unimplemented)

	waited := make(chan *sandboxapi.WaitSandboxResponse, 1)
	go func() {
		w, err := h.WaitSandbox(context.Background(), &sandboxapi.WaitSandboxRequest{SandboxID: id})
		if err != nil {
			t.Error(err)
		}
		waited <- w
	}()
	for range 2 {
		h.must(h.stopped())
	}
	if w := <-waited; w.GetExitStatus() != 137 || w.GetExitedAt().AsTime().Before(started.CreatedAt.AsTime()) {
		t.Errorf("wait answers %v", w)
	}
	if s := h.status(false); s.State != "SANDBOX_NOTREADY" || s.Pid != started.Pid || s.ExitedAt == nil {
		t.Errorf("after the stop: %v", s)
	}
	if _, err := os.Stat(m.NetNS); err == nil {
		t.Error("the network namespace is still held")
	}
	h.refused("ping of a stopped one", second(h.PingSandbox(t.Context(), &sandboxapi.PingRequest{SandboxID: id})), codes.Unavailable)
	h.refused("start of a stopped one", second(h.StartSandbox(t.Context(), &sandboxapi.StartSandboxRequest{SandboxID: id})), codes.FailedPrecondition)
	if h.ended() {
		t.Error("the shim has ended with the sandbox")
	}
	h.must(h.shutDown(id))
	h.ends()
	if _, err := os.Stat(h.socket); err == nil {
		t.Error("the shim can still be reached")
	}
}

// TestOrder: calls that come too early, twice or for another sandbox.
func TestOrder(t *testing.T) {
	h := newHarness(t)
	ctx := t.Context()
	start := func(id string) error {
		return second(h.StartSandbox(ctx, &sandboxapi.StartSandboxRequest{SandboxID: id}))
	}
	h.refused("start before create", start(id), codes.FailedPrecondition)
	h.refused("stop before create", h.stopped(), codes.NotFound)
	h.refused("status before create", second(h.SandboxStatus(ctx, &sandboxapi.SandboxStatusRequest{SandboxID: id})), codes.NotFound)
	h.refused("wait before create", second(h.WaitSandbox(ctx, &sandboxapi.WaitSandboxRequest{SandboxID: id})), codes.NotFound)
	other := h.request(nil)
	other.SandboxID = "other"
	h.refused("create of another", second(h.CreateSandbox(ctx, other)), codes.InvalidArgument)

	h.create(nil)
	h.refused("second create", second(h.CreateSandbox(ctx, h.request(nil))), codes.AlreadyExists)
	h.refused("start of another", start("other"), codes.FailedPrecondition)
	h.refused("wait before start", second(h.WaitSandbox(ctx, &sandboxapi.WaitSandboxRequest{SandboxID: id})), codes.FailedPrecondition)
	h.refused("ping before start", second(h.PingSandbox(ctx, &sandboxapi.PingRequest{SandboxID: id})), codes.FailedPrecondition)
	h.refused("metrics before start", second(h.SandboxMetrics(ctx, &sandboxapi.SandboxMetricsRequest{SandboxID: id})), codes.FailedPrecondition)
	h.refused("container before start", h.tryMember("early", nil, "sleep"), codes.FailedPrecondition)

	h.start()
	h.refused("second start", start(id), codes.AlreadyExists)
	h.refused("create of a started one", second(h.CreateSandbox(ctx, h.request(nil))), codes.AlreadyExists)
	h.refused("status of another", second(h.SandboxStatus(ctx, &sandboxapi.SandboxStatusRequest{SandboxID: "other"})), codes.NotFound)
	h.refused("shutdown of another", h.shutDown("other"), codes.NotFound)
	if h.ended() || len(h.launcher.All()) != 1 {
		t.Error("something has happened")
	}
}

// TestStopWithoutStart: a sandbox that never was started can be stopped, waited for and shut down.
func TestStopWithoutStart(t *testing.T) {
	h := newHarness(t)
	h.create(nil)
	h.must(h.stopped())
	w, err := h.WaitSandbox(t.Context(), &sandboxapi.WaitSandboxRequest{SandboxID: id})
	h.must(err)
	if w.ExitStatus != 0 || w.ExitedAt == nil {
		t.Errorf("wait answers %v", w)
	}
	if s := h.status(false); s.State != notReady || s.ExitedAt == nil {
		t.Errorf("status %v", s)
	}
	h.must(h.shutDown(id))
	h.ends()
}

// TestStopDuringStart: the start is given up, and no machine is left.
func TestStopDuringStart(t *testing.T) {
	h := newHarness(t)
	h.create(nil)
	hold, launched := make(chan struct{}), make(chan struct{})
	h.launcher.Before = func(context.Context) { close(launched); <-hold }
	failed := make(chan error, 1)
	go func() {
		failed <- second(h.StartSandbox(context.Background(), &sandboxapi.StartSandboxRequest{SandboxID: id}))
	}()
	<-launched
	h.refused("start during a start", second(h.StartSandbox(t.Context(), &sandboxapi.StartSandboxRequest{SandboxID: id})), codes.FailedPrecondition)
	stopped := make(chan error, 1)
	go func() { stopped <- h.stopped() }()
	for h.status(false).ExitedAt == nil {
		time.Sleep(time.Millisecond)
	}
	close(hold)
	h.refused("the start", <-failed, codes.Canceled)
	h.must(<-stopped)
	if len(h.launcher.All()) > 0 || h.status(false).State != notReady {
		t.Error("there is a machine")
	}
}

// TestFailedStart: it can be tried again, and shut down.
func TestFailedStart(t *testing.T) {
	h := newHarness(t)
	h.create(nil)
	h.launcher.Fail = errors.New("boom\nbang")
	_, err := h.StartSandbox(t.Context(), &sandboxapi.StartSandboxRequest{SandboxID: id})
	if err == nil || !strings.Contains(err.Error(), "boom; bang") {
		t.Errorf("error %v", err)
	}
	h.launcher.Fail = nil
	h.start()
	h.must(h.shutDown(id))
	h.ends()
	if !h.launcher.Last().Stopped() {
		t.Error("the machine is left")
	}
}

// TestShutdownWithoutSandbox: containerd calls it after a creation that failed, too.
func TestShutdownWithoutSandbox(t *testing.T) {
	h := newHarness(t)
	h.member("app", nil, "sleep") // in a pod that is no sandbox
	h.refused("shutdown of a pod with containers", h.shutDown(id), codes.FailedPrecondition)
	h.must(second(h.task.Kill(t.Context(), &task.KillRequest{ID: "app", Signal: 9})))
	h.wait("app")
	h.must(second(h.task.Delete(t.Context(), &task.DeleteRequest{ID: "app"})))
	h.must(h.shutDown(id))
	h.ends()
}

// TestDeath: a machine that ends by itself ends the sandbox, with all containers; it can still be stopped.
func TestDeath(t *testing.T) {
	h := newHarness(t)
	h.create(nil)
	h.start()
	h.member("app", nil, "sleep")
	h.launcher.Last().Crash("guest panicked")
	w, err := h.WaitSandbox(t.Context(), &sandboxapi.WaitSandboxRequest{SandboxID: id})
	h.must(err)
	if got := h.wait("app"); w.ExitStatus != 255 || got != 255 {
		t.Errorf("statuses %d and %d", w.ExitStatus, got)
	}
	if s := h.status(false); s.State != notReady {
		t.Errorf("status %v", s)
	}
	h.refused("ping", second(h.PingSandbox(t.Context(), &sandboxapi.PingRequest{SandboxID: id})), codes.Unavailable)
	h.refused("metrics", second(h.SandboxMetrics(t.Context(), &sandboxapi.SandboxMetricsRequest{SandboxID: id})), codes.Unavailable)
	h.must(h.stopped())
	h.delete("app")
	h.must(h.shutDown(id))
}

// TestSilentAgent: a ping has an end.
func TestSilentAgent(t *testing.T) {
	h := newHarness(t)
	h.create(nil)
	h.start()
	thaw := h.launcher.Last().Guest.Stall()
	began := time.Now()
	h.refused("ping", second(h.PingSandbox(t.Context(), &sandboxapi.PingRequest{SandboxID: id})), codes.Unavailable)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
	thaw()
	h.must(second(h.PingSandbox(t.Context(), &sandboxapi.PingRequest{SandboxID: id})))
}

// TestMembers: containers come and go; the sandbox ends when it is told to, and takes them with it.
func TestMembers(t *testing.T) {
	h := newHarness(t)
	h.create(nil)
	h.start()
	h.member("once", nil, "exit", "3")
	if got := h.wait("once"); got != 3 {
		t.Errorf("status %d", got)
	}
	h.delete("once")
	if s := h.status(false); s.State != ready || h.ended() {
		t.Fatalf("after the last container's delete: %v", s)
	}
	h.member("a", nil, "sleep")
	h.member("b", nil, "exit", "4")
	h.wait("b")
	h.must(h.stopped())
	if got := h.wait("a"); got != 137 {
		t.Errorf("status %d", got)
	}
	h.refused("container in a stopped one", h.tryMember("late", nil, "sleep"), codes.FailedPrecondition)
	h.must(h.shutDown(id))
	for _, name := range []string{"a", "b"} {
		h.refused("state of "+name, second(h.task.State(t.Context(), &task.StateRequest{ID: name})), codes.NotFound)
	}
	if ids, err := h.podDir.Members(); err != nil || len(ids) > 0 {
		t.Errorf("members %v, %v", ids, err)
	}
}

// TestNamespaces: those that the pod has in common are the guest's, which no container has to last for. The pid namespace
// is that of the first one that asks for it, until it ends.
func TestNamespaces(t *testing.T) {
	h := newHarness(t)
	h.create(nil)
	h.start()
	agent := h.launcher.Last().Guest
	all := joins(specs.PIDNamespace, specs.IPCNamespace, specs.UTSNamespace)
	for _, c := range []struct {
		name   string
		change func(*specs.Spec)
		want   map[string]string
	}{
		{"own", nil, map[string]string{}},
		{"first", all, map[string]string{"ipc": "", "uts": ""}},
		{"second", all, map[string]string{"pid": "first", "ipc": "", "uts": ""}},
		{"no-pids", joins(specs.IPCNamespace), map[string]string{"ipc": ""}},
	} {
		h.member(c.name, c.change, "sleep")
		got := agent.Request(c.name).Namespaces
		if len(got) != len(c.want) {
			t.Errorf("%s has %v", c.name, got)
		}
		for _, ns := range got {
			if want, ok := c.want[ns.Type]; !ok || ns.Container != want {
				t.Errorf("%s has %v, want %v", c.name, got, c.want)
			}
		}
	}
	h.must(second(h.task.Kill(t.Context(), &task.KillRequest{ID: "first", Signal: 9})))
	h.wait("first")
	h.member("third", all, "sleep")
	h.member("fourth", all, "sleep")
	if got := agent.Request("third").Namespaces; len(got) != 2 {
		t.Errorf("the next one has %v", got)
	}
	if got := agent.Request("fourth").Namespaces; len(got) != 3 || got[0].Container != "third" {
		t.Errorf("the one after it has %v", got)
	}
}
