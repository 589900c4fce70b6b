package task

import (
	"context"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/shim/internal/fake"
	"github.com/cubesandbox/cube/shim/pod"
)

func (h *harness) save(name string) {
	h.Helper()
	info, err := h.pod.Save(h.Context(), name, "")
	h.must(err)
	if !info.Frozen || info.ID != name {
		h.Errorf("saved %+v", info)
	}
}

func (h *harness) rollback(name string) {
	h.Helper()
	pid, err := h.pod.Rollback(h.Context(), name)
	h.must(err)
	if pid != h.launcher.Last().PID() {
		h.Errorf("pid %d", pid)
	}
}

// TestRollback: memory goes back, tasks stay, and with them the execs that were there.
func TestRollback(t *testing.T) {
	h := newHarness(t)
	place := h.attached(nil)
	h.network.attach = func(context.Context) (*pod.Attachment, error) { return place, nil }
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	c.counts("1")
	h.exec("early", "sleep")
	h.start("early")
	h.exec("reused", "exit", "0")
	h.start("reused")
	h.wait("reused")
	h.save("one")
	c.counts("2")
	h.exec("late", "sleep")
	h.start("late")
	old := h.launcher.Last()
	for range 3 {
		h.rollback("one")
		h.network.asks("hold, renew")
		c.counts("2")
		c.counts("3")
		if !old.Stopped() || len(h.alive()) != 1 {
			t.Error("an old machine is left")
		}
	}
	if w := h.wait("late"); w.ExitStatus != 137 {
		t.Errorf("the late exec ended with %d", w.ExitStatus)
	}
	if st := h.state("early"); st.Status != tasktypes.Status_RUNNING {
		t.Errorf("the early exec is %s", st.Status)
	}
	h.must(h.kill("early", syscall.SIGTERM))
	if w := h.wait("early"); w.ExitStatus != 143 {
		t.Errorf("the early exec ended with %d", w.ExitStatus)
	}
	if h.network.released != 0 {
		t.Error("the place in the network was given back")
	}
	h.exec("new", "echo", "hi", "7")
	h.start("new")
	if w := h.wait("new"); w.ExitStatus != 7 {
		t.Errorf("a new exec ended with %d", w.ExitStatus)
	}
	if s := h.record(); s.PID != h.launcher.Last().PID() {
		t.Errorf("the record says %d", s.PID)
	}
	if s, err := h.podDir.State(); err != nil || s.Other != nil {
		t.Errorf("record %+v, %v", s, err)
	}
	c.end()
	h.network.ended("after all")
}

// TestFailedRollback: after any failure the old machine goes on, and nothing else is left.
func TestFailedRollback(t *testing.T) {
	h := newHarness(t)
	place := h.attached(nil)
	h.network.attach = func(context.Context) (*pod.Attachment, error) { return place, nil }
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	h.save("one")
	c.counts("1")
	h.launcher.Fail = errors.New("no memory")
	if _, err := h.pod.Rollback(t.Context(), "one"); err == nil || !strings.Contains(err.Error(), "no memory") {
		t.Errorf("rolled back: %v", err)
	}
	h.launcher.Fail = nil
	h.network.asks("hold, hold, resume")
	c.counts("2")
	h.launcher.Hostile = "silent-Configure"
	if _, err := h.pod.Rollback(t.Context(), "one"); err == nil {
		t.Error("rolled back to an agent that says nothing")
	}
	h.network.asks("hold, hold, resume")
	c.counts("3")
	// The other one may have sent something by then.
	h.launcher.Hostile = "silent-Thaw"
	if _, err := h.pod.Rollback(t.Context(), "one"); err == nil {
		t.Error("rolled back to an agent that doesn't let its work go on")
	}
	h.network.asks("hold, renew, hold, renew")
	h.launcher.Hostile = ""
	c.counts("4")
	if m := h.alive(); len(m) != 1 || m[0].Paused() {
		t.Errorf("machines %v", m)
	}
	for _, dir := range []string{h.runDir + "/vm", h.dir + "/state/store/disks"} {
		if left, _ := os.ReadDir(dir); len(left) > 1 {
			t.Errorf("left in %s: %v", dir, left)
		}
	}
	h.rollback("one")
	c.counts("1")
	c.end()
}

// TestNoRollback: what isn't the same pod can't be put back.
func TestNoRollback(t *testing.T) {
	h := newHarness(t)
	refused := func(what, snapshot string, is func(error) bool) {
		t.Helper()
		before := len(h.launcher.All())
		if _, err := h.pod.Rollback(t.Context(), snapshot); !is(err) {
			t.Errorf("%s: %v", what, err)
		}
		if len(h.launcher.All()) != before {
			t.Errorf("%s: a machine was made", what)
		}
	}
	refused("nothing", "one", errdefs.IsFailedPrecondition)
	h.member(cid, nil, "sleep").run()
	h.member("b", nil, "sleep").run()
	h.save("both")
	refused("no snapshot", "none", errdefs.IsNotFound)
	other := h.clone("other")
	h.spec("tally")
	stranger := h.teller(other, "other", "").begin()
	if _, err := stranger.pod.Rollback(t.Context(), "both"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("of another pod: %v", err)
	}
	stranger.end()
	h.member("added", nil, "sleep").run()
	refused("one more", "both", errdefs.IsFailedPrecondition)
	_, err := h.Service.Kill(t.Context(), &taskapi.KillRequest{ID: "added", Signal: 9})
	h.must(err)
	h.must(second(h.Service.Wait(t.Context(), &taskapi.WaitRequest{ID: "added"})))
	h.rollback("both") // a stopped one isn't in the way
	h.must(second(h.Service.Delete(t.Context(), &taskapi.DeleteRequest{ID: "added"})))
	_, err = h.Service.Kill(t.Context(), &taskapi.KillRequest{ID: "b", Signal: 9})
	h.must(err)
	h.must(second(h.Service.Wait(t.Context(), &taskapi.WaitRequest{ID: "b"})))
	refused("one less", "both", errdefs.IsFailedPrecondition)
}

// TestRollbackOfPaused: a task's state is containerd's, and stays.
func TestRollbackOfPaused(t *testing.T) {
	h := newHarness(t)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	h.save("running")
	h.must(h.pause())
	h.save("paused")
	h.rollback("running")
	if !h.launcher.Last().Guest.Paused(cid) || c.status() != tasktypes.Status_PAUSED {
		t.Error("it isn't paused any more")
	}
	h.must(h.resume())
	h.rollback("paused")
	if h.launcher.Last().Guest.Paused(cid) || c.status() != tasktypes.Status_RUNNING {
		t.Error("it is paused")
	}
	c.counts("1")
	c.end()
}

// TestDeathAfterRollback: the machine that counts is the one that has the pod.
func TestDeathAfterRollback(t *testing.T) {
	h := newHarness(t)
	h.spec("tally")
	h.teller(h.Service, cid, "").begin()
	h.save("one")
	h.rollback("one")
	h.launcher.Last().Crash("exit status 1")
	if w := h.wait(""); w.ExitStatus != 255 {
		t.Errorf("status %d", w.ExitStatus)
	}
	h.must(second(h.delete("")))
}

// alive are the machines that haven't been stopped.
func (h *harness) alive() (list []*fake.Machine) {
	for _, m := range h.launcher.All() {
		if !m.Stopped() {
			list = append(list, m)
		}
	}
	return list
}
