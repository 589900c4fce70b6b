package task

import (
	"context"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
)

// TestHold: a pod that is held stands still, and does nothing that it is asked for, until it is released.
func TestHold(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.exec("created", "sleep")
	h.must(h.pod.Hold(t.Context()))
	machine := h.launcher.Last()
	if st := h.state(""); !machine.Paused() || st.Status != tasktypes.Status_PAUSED {
		t.Errorf("paused %v, state %s", machine.Paused(), st.Status)
	}
	calls := len(machine.Guest.Calls())
	refused := func(t *testing.T, what string, err error) {
		t.Helper()
		if !errdefs.IsFailedPrecondition(err) && !errdefs.IsFailedPrecondition(errgrpc.ToNative(err)) {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused(t, "a second hold", h.pod.Hold(t.Context()))
	refused(t, "pause", h.pause())
	refused(t, "resume", h.resume())
	refused(t, "start of an exec", second(h.Service.Start(t.Context(), &taskapi.StartRequest{ID: cid, ExecID: "created"})))
	refused(t, "stats", second(h.Stats(t.Context(), &taskapi.StatsRequest{ID: cid})))
	refused(t, "save", second(h.pod.Save(t.Context(), "one", "")))
	refused(t, "update", h.update(memoryLimit(64<<20)))
	if now := machine.Guest.Calls(); len(now) != calls {
		t.Errorf("the guest was asked for %v", now[calls:])
	}
	h.must(h.pod.Release(t.Context()))
	h.must(h.pod.Release(t.Context())) // nothing to do
	if st := h.state(""); machine.Paused() || st.Status != tasktypes.Status_RUNNING {
		t.Errorf("after the release: paused %v, state %s", machine.Paused(), st.Status)
	}
	if last := machine.Guest.Calls()[calls:]; len(last) != 1 || !strings.HasSuffix(last[0], "/Thaw") {
		t.Errorf("the release has asked for %v", last)
	}
	h.exec("later", "sleep")
	h.start("later")
	h.must(second(h.pod.Save(t.Context(), "one", "")))
	h.must(h.kill("", syscall.SIGKILL))
	h.wait("")
	_, err := h.delete("")
	h.must(err)
	list := h.until("/tasks/delete")
	want := []string{"/tasks/paused box", "/tasks/resumed box"}
	if got := slices.DeleteFunc(list, func(e string) bool { return !slices.Contains(want, e) }); !slices.Equal(got, want) {
		t.Errorf("events %v", got)
	}
}

// TestEndWhileHeld: a pod that is held ends at once, however it does, and without its guest's being asked.
func TestEndWhileHeld(t *testing.T) {
	for how, end := range map[string]func(h *harness){
		"SIGKILL": func(h *harness) { h.must(h.kill("", syscall.SIGKILL)) },
		"SIGTERM": func(h *harness) { h.must(h.kill("", syscall.SIGTERM)) },
		"a crash": func(h *harness) { h.launcher.Last().Crash("signal: killed") },
		"the end of its shim": func(h *harness) {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			h.must(h.pod.Close(ctx))
		},
	} {
		t.Run(how, func(t *testing.T) {
			h := newHarness(t)
			h.run("sleep")
			h.must(h.pod.Hold(t.Context()))
			goOn := h.launcher.Last().Guest.Stall() // as a guest whose CPUs stand still
			defer goOn()
			began := time.Now()
			end(h)
			if w := h.wait(""); w.ExitStatus != 137 {
				t.Errorf("status %d", w.ExitStatus)
			}
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("it took %v", took)
			}
			if err := h.pod.Release(t.Context()); err == nil {
				t.Error("what has ended was released")
			}
			_, err := h.delete("")
			h.must(err)
		})
	}
}

// TestHoldFails: a guest that doesn't come to rest in time goes on.
func TestHoldFails(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	defer h.launcher.Last().Guest.StallAt("Freeze")()
	if err := h.pod.Hold(t.Context()); err == nil {
		t.Error("it is held")
	}
	if st := h.state(""); h.launcher.Last().Paused() || st.Status != tasktypes.Status_RUNNING {
		t.Errorf("it is %s", st.Status)
	}
	h.exec("later", "sleep")
	h.start("later")
}

// TestHoldHasNoEnd: one that can't be released is ended.
func TestHoldHasNoEnd(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.must(h.pod.Hold(t.Context()))
	defer h.launcher.Last().Guest.StallAt("Thaw")()
	if err := h.pod.Release(t.Context()); err == nil {
		t.Error("it is released")
	}
	if w := h.wait(""); w.ExitStatus != 137 {
		t.Errorf("status %d", w.ExitStatus)
	}
}
