package task

import (
	"context"
	"strings"
	"syscall"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// saving is a save under way, with the guest at rest.
type saving struct {
	done <-chan error
	info **snapshot.Info
	goOn func()
}

// stuck begins a save that doesn't come to its end by itself.
func (h *harness) stuck(name string) *saving {
	h.Helper()
	begun, release, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	h.launcher.Saving = func(ctx context.Context) {
		close(begun)
		select {
		case <-release:
		case <-ctx.Done():
		}
	}
	info := new(*snapshot.Info)
	go func() {
		var err error
		*info, err = h.pod.Save(context.Background(), name, "")
		done <- err
	}()
	select {
	case <-begun:
	case <-time.After(10 * time.Second):
		h.Fatal("the save doesn't begin")
	}
	h.launcher.Saving = nil
	return &saving{done: done, info: info, goOn: func() { close(release) }}
}

// soon is what comes of something that is under way.
func soon(t *testing.T, what string, c <-chan error) error {
	t.Helper()
	select {
	case err := <-c:
		return err
	case <-time.After(10 * time.Second):
		t.Fatalf("%s doesn't end", what)
		return nil
	}
}

// waits sees that something is under way and doesn't end.
func waits(t *testing.T, what string, c <-chan error) {
	t.Helper()
	select {
	case err := <-c:
		t.Errorf("%s has ended: %v", what, err)
	case <-time.After(100 * time.Millisecond):
	}
}

func async(do func() error) <-chan error {
	c := make(chan error, 1)
	go func() { c <- do() }()
	return c
}

// TestSaveBetweenChanges: a save finds a process started or not, never half.
func TestSaveBetweenChanges(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	guest := h.launcher.Last().Guest
	h.exec("before", "sleep")
	guest.HoldExec = make(chan struct{})
	starts := async(func() error {
		return second(h.Service.Start(context.Background(), &taskapi.StartRequest{ID: cid, ExecID: "before"}))
	})
	for len(guest.Calls()) == 0 || !strings.HasSuffix(guest.Calls()[len(guest.Calls())-1], "/ExecProcess") {
		time.Sleep(time.Millisecond)
	}
	info := new(*snapshot.Info)
	saves := async(func() (err error) {
		*info, err = h.pod.Save(context.Background(), "one", "")
		return err
	})
	waits(t, "the save", saves)
	close(guest.HoldExec)
	h.must(soon(t, "the start", starts))
	h.must(soon(t, "the save", saves))
	p, err := saved.Decode((*info).Note)
	h.must(err)
	if n := p.Containers[0].Processes; len(n) != 2 || n[1].ExecID != "before" {
		t.Errorf("saved %+v", n)
	}

	s := h.stuck("two")
	h.exec("after", "sleep")
	for what, change := range map[string]func() error{
		"start": func() error {
			return second(h.Service.Start(context.Background(), &taskapi.StartRequest{ID: cid, ExecID: "after"}))
		},
		"update": func() error { return h.update(memoryLimit(64 << 20)) },
	} {
		c := async(change)
		waits(t, what, c)
		defer func() { h.must(soon(t, what, c)) }()
	}
	s.goOn()
	h.must(soon(t, "the save", s.done))
	if p, err = saved.Decode((*s.info).Note); err != nil || len(p.Containers[0].Processes) != 2 {
		t.Errorf("saved %+v, %v", p.Containers[0], err)
	}
}

// TestChangeThatTakesLong: a save doesn't wait for ever for a guest that has been asked for something else.
func TestChangeThatTakesLong(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	guest := h.launcher.Last().Guest
	guest.HoldExec = make(chan struct{})
	h.exec("e", "sleep")
	starts := async(func() error {
		return second(h.Service.Start(context.Background(), &taskapi.StartRequest{ID: cid, ExecID: "e"}))
	})
	for len(guest.Calls()) == 0 || !strings.HasSuffix(guest.Calls()[len(guest.Calls())-1], "/ExecProcess") {
		time.Sleep(time.Millisecond)
	}
	err := soon(t, "the save", async(func() error { return second(h.pod.Save(context.Background(), "one", "")) }))
	if !errdefs.IsUnavailable(err) {
		t.Errorf("saved: %v", err)
	}
	close(guest.HoldExec)
	h.must(soon(t, "the start", starts))
}

// TestKilledWhileSaved: a save that is stuck doesn't keep a container alive, nor takes a neighbour with it.
func TestKilledWhileSaved(t *testing.T) {
	h := newHarness(t)
	h.member(cid, nil, "sleep").run()
	h.member("other", nil, "sleep").run()
	s := h.stuck("one")
	// Nothing of a save is a death.
	if st := h.state(""); st.Status != tasktypes.Status_RUNNING {
		t.Errorf("state %s", st.Status)
	}
	h.must(soon(t, "the kill", async(func() error { return h.kill("", syscall.SIGKILL) })))
	if err := soon(t, "the save", s.done); !errdefs.IsAborted(err) || !strings.Contains(err.Error(), "box is to be killed") {
		t.Errorf("saved: %v", err)
	}
	if w := h.wait(""); w.ExitStatus != 137 {
		t.Errorf("status %d", w.ExitStatus)
	}
	if h.launcher.Last().Guest.Resting() || len(h.snapshots()) > 0 {
		t.Errorf("at rest, or a snapshot: %v", h.snapshots())
	}
	// The deletion of what has ended is as urgent.
	s = h.stuck("two")
	h.must(soon(t, "the deletion", async(func() error { return second(h.delete("")) })))
	if err := soon(t, "the save", s.done); !errdefs.IsAborted(err) {
		t.Errorf("saved: %v", err)
	}
	if r, err := h.State(t.Context(), &taskapi.StateRequest{ID: "other"}); err != nil || r.Status != tasktypes.Status_RUNNING {
		t.Errorf("the other: %v, %v", r, err)
	}
}

// TestSignalWhileSaved: another signal comes when the guest goes on.
func TestSignalWhileSaved(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	s := h.stuck("one")
	c := async(func() error { return h.kill("", syscall.SIGTERM) })
	waits(t, "the signal", c)
	s.goOn()
	h.must(soon(t, "the save", s.done))
	h.must(soon(t, "the signal", c))
	if w := h.wait(""); w.ExitStatus != 143 {
		t.Errorf("status %d", w.ExitStatus)
	}
}

// TestClosedWhileSaved: a shim that ends calls a save off.
func TestClosedWhileSaved(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	s := h.stuck("one")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	h.must(h.pod.Close(ctx))
	if err := soon(t, "the save", s.done); !errdefs.IsUnavailable(err) {
		t.Errorf("saved: %v", err)
	}
	if len(h.snapshots()) > 0 {
		t.Errorf("snapshots %v", h.snapshots())
	}
}

// TestDeathWhileSaved: a machine that dies while it is saved has died, and of the save nothing is left.
func TestDeathWhileSaved(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	s := h.stuck("one")
	h.launcher.Last().Crash("signal: killed")
	s.goOn()
	if err := soon(t, "the save", s.done); err == nil || !strings.Contains(err.Error(), "signal: killed") {
		t.Errorf("saved: %v", err)
	}
	if w := h.wait(""); w.ExitStatus != 137 {
		t.Errorf("status %d", w.ExitStatus)
	}
	h.must(second(h.delete("")))
	if len(h.snapshots()) > 0 {
		t.Errorf("snapshots %v", h.snapshots())
	}
}

// TestStalledAgent: one that doesn't bring the guest to rest delays a save by the deadline. What is saved then is good for
// nothing but to be put back to.
func TestStalledAgent(t *testing.T) {
	h := newHarness(t)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	c.counts("1")
	guest := h.launcher.Last().Guest
	goOn := guest.StallAt("Freeze")
	info, err := h.pod.Save(t.Context(), "unfrozen", "")
	h.must(err)
	if info.Frozen {
		t.Error("it takes the guest for frozen")
	}
	dir := t.TempDir()
	if err := second(h.Checkpoint(t.Context(), &taskapi.CheckpointTaskRequest{ID: cid, Path: dir})); !errdefs.IsUnavailable(errgrpc.ToNative(err)) || !strings.Contains(err.Error(), "come to rest") {
		t.Errorf("checkpoint: %v", err)
	}
	if ids := h.snapshots(); len(ids) != 1 {
		t.Errorf("snapshots %v", ids)
	}
	goOn()
	c.counts("2")
	h.must(saved.Checkpoint{Snapshot: "unfrozen", Container: cid}.Write(dir))
	clone := &teller{harness: h, Service: h.clone("clone"), id: "clone"}
	if err := clone.try(func(r *taskapi.CreateTaskRequest) { r.Checkpoint = dir }); !errdefs.IsFailedPrecondition(errgrpc.ToNative(err)) || !strings.Contains(err.Error(), "not at rest") {
		t.Errorf("a clone: %v", err)
	}
	h.rollback("unfrozen")
	c.counts("2")
	c.end()
}

// TestLateThaw: a save is made although the guest can't be told at once to go on; it is told as soon as it hears.
func TestLateThaw(t *testing.T) {
	h := newHarness(t)
	t.Setenv("CUBE_TIMEOUT_SCALE", hostileScale)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	guest := h.launcher.Last().Guest
	goOn := guest.StallAt("Thaw")
	info, err := h.pod.Save(t.Context(), "one", "")
	h.must(err)
	if !info.Frozen || !guest.Resting() {
		t.Errorf("frozen %v, at rest %v", info.Frozen, guest.Resting())
	}
	// Until then there is no other save, which it might thaw.
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := h.pod.Save(ctx, "two", ""); err == nil {
		t.Error("saved while at rest")
	}
	goOn()
	h.save("three")
	c.counts("1")
	// One that never goes on is of no use.
	goOn = guest.StallAt("Thaw")
	defer goOn()
	h.save("four")
	if w := h.wait(""); w.ExitStatus != 137 {
		t.Errorf("status %d", w.ExitStatus)
	}
	h.must(second(h.delete("")))
}
