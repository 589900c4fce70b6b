package task

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"
)

func (h *harness) pause() error {
	return second(h.Service.Pause(h.Context(), &taskapi.PauseRequest{ID: cid}))
}

func (h *harness) resume() error {
	return second(h.Service.Resume(h.Context(), &taskapi.ResumeRequest{ID: cid}))
}

func refused(t *testing.T, what string, err error) {
	t.Helper()
	if err == nil || !errdefs.IsFailedPrecondition(errgrpc.ToNative(err)) {
		t.Errorf("%s: %v", what, err)
	}
}

func TestPauseAndResume(t *testing.T) {
	h := newHarness(t)
	h.create("sleep")
	refused(t, "pause of a created container", h.pause())
	h.start("")
	h.exec("running", "sleep")
	h.start("running")
	h.exec("created", "sleep")
	refused(t, "resume of a running container", h.resume())
	h.must(h.pause())
	if !h.launcher.Last().Guest.Paused(cid) {
		t.Error("the guest wasn't told")
	}
	for _, id := range []string{"", "running"} {
		if st := h.state(id); st.Status != tasktypes.Status_PAUSED {
			t.Errorf("state of %q: %s", id, st.Status)
		}
	}
	refused(t, "second pause", h.pause())
	refused(t, "exec", second(h.Service.Exec(t.Context(), h.execRequest("e", "sleep"))))
	refused(t, "start of an exec", second(h.Service.Start(t.Context(), &taskapi.StartRequest{ID: cid, ExecID: "created"})))
	refused(t, "delete", second(h.delete("")))
	h.must(second(h.Stats(t.Context(), &taskapi.StatsRequest{ID: cid})))
	h.must(h.resume())
	if st := h.state(""); st.Status != tasktypes.Status_RUNNING {
		t.Errorf("state %s", st.Status)
	}
	h.start("created")

	// SIGKILL ends a paused container, others wait for it to go on.
	h.must(h.pause())
	h.must(h.kill("", syscall.SIGTERM))
	if st := h.state(""); st.Status != tasktypes.Status_PAUSED {
		t.Errorf("state %s", st.Status)
	}
	h.must(h.kill("", syscall.SIGKILL))
	if w := h.wait(""); w.ExitStatus != 137 {
		t.Errorf("status %d", w.ExitStatus)
	}
	refused(t, "resume of a stopped container", h.resume())
	_, err := h.delete("")
	h.must(err)
	list := h.until("/tasks/delete")
	checkOrder(t, slices.DeleteFunc(slices.Clone(list), func(e string) bool { return strings.HasPrefix(e, "/tasks/paused") }))
	want := []string{"/tasks/paused box", "/tasks/resumed box", "/tasks/paused box"}
	if got := slices.DeleteFunc(list, func(e string) bool { return !slices.Contains(want, e) }); !slices.Equal(got, want) {
		t.Errorf("events %q", got)
	}
}

// TestFailedPause: a container whose pause isn't answered runs on.
func TestFailedPause(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	guest := h.launcher.Last().Guest
	thaw := guest.Stall()
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		failed <- second(h.Service.Pause(ctx, &taskapi.PauseRequest{ID: cid}))
	}()
	for h.state("").Status != tasktypes.Status_PAUSING {
		time.Sleep(time.Millisecond)
	}
	refused(t, "exec while being paused", second(h.Service.Exec(t.Context(), h.execRequest("e", "sleep"))))
	cancel()
	thaw()
	if err := <-failed; err == nil {
		t.Error("paused")
	}
	if st := h.state(""); st.Status != tasktypes.Status_RUNNING || guest.Paused(cid) {
		t.Errorf("state %s, paused %v", st.Status, guest.Paused(cid))
	}
}

func TestMachineDeathWhilePaused(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.must(h.pause())
	h.launcher.Last().Crash("exit status 1")
	if w := h.wait(""); w.ExitStatus != 255 {
		t.Errorf("status %d", w.ExitStatus)
	}
}

func (h *harness) update(r any) error {
	b, err := json.Marshal(r)
	h.must(err)
	return second(h.Service.Update(h.Context(), &taskapi.UpdateTaskRequest{ID: cid, Resources: &anypb.Any{Value: b}}))
}

func memoryLimit(n int64) *specs.LinuxResources {
	return &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &n}}
}

func cpuLimit(quota int64) *specs.LinuxResources {
	period := uint64(100000)
	return &specs.LinuxResources{CPU: &specs.LinuxCPU{Quota: &quota, Period: &period}}
}

func TestUpdate(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.must(h.update(memoryLimit(64 << 20)))
	h.must(h.update(cpuLimit(50000)))
	m := h.launcher.Last()
	updates := m.Guest.Updates(cid)
	if len(updates) != 2 || *updates[0].Memory.Limit != 64<<20 || *updates[1].CPU.Quota != 50000 {
		t.Errorf("the guest got %v", updates)
	}
	if got := m.CPULimits(); !slices.Equal(got, []float64{0.5}) {
		t.Errorf("the machine's limits were %v", got)
	}
	refused(t, "more memory than the machine has", h.update(memoryLimit(1<<40)))
	refused(t, "more CPUs than the machine has", h.update(cpuLimit(100*100000)))
	for what, r := range map[string]any{"nothing": nil, "a list": []int{1}, "an empty update": &specs.LinuxResources{}} {
		if err := h.update(r); !errdefs.IsInvalidArgument(errgrpc.ToNative(err)) {
			t.Errorf("update with %s: %v", what, err)
		}
	}
	if got := len(m.Guest.Updates(cid)); got != 2 {
		t.Errorf("%d updates", got)
	}
	h.must(h.kill("", syscall.SIGKILL))
	h.wait("")
	refused(t, "update of a stopped container", h.update(memoryLimit(64<<20)))
}

// TestUpdateInAPod: a container's limit isn't that of a machine that it shares.
func TestUpdateInAPod(t *testing.T) {
	h := newHarness(t)
	h.member(cid, nil, "sleep").run()
	h.member("other", nil, "sleep").run()
	h.must(h.update(cpuLimit(50000)))
	m := h.launcher.Last()
	if got := m.CPULimits(); len(got) > 0 || len(m.Guest.Updates(cid)) != 1 || len(m.Guest.Updates("other")) != 0 {
		t.Errorf("the machine's limits were %v, the guest got %v and %v", got, m.Guest.Updates(cid), m.Guest.Updates("other"))
	}
}
