package task

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/hostile"
	"github.com/cubesandbox/cube/shim/internal/fake"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// amid has do called when a rollback is about to make the other machine, and rolls back.
func (h *harness) amid(name string, do func(ctx context.Context, old *fake.Machine)) error {
	h.Helper()
	old := h.launcher.Last()
	h.launcher.Before = func(ctx context.Context) { do(ctx, old) }
	defer func() { h.launcher.Before = nil }()
	return soon(h.T, "the rollback", async(func() error { return second(h.pod.Rollback(context.Background(), name)) }))
}

// TestOldDiesWhileRolledBack: with the old machine the pod has ended, and of both nothing is left.
func TestOldDiesWhileRolledBack(t *testing.T) {
	h := newHarness(t)
	place := h.attached(nil)
	h.network.attach = func(context.Context) (*pod.Attachment, error) { return place, nil }
	h.run("sleep")
	h.save("one")
	err := h.amid("one", func(_ context.Context, old *fake.Machine) {
		old.Crash("signal: killed")
		h.wait("") // is told while the other machine is being made
		if s, err := h.podDir.State(); err != nil || s.Undone || s.Other == nil {
			t.Errorf("record %+v, %v", s, err) // whoever cleans up after the shim has to find both
		}
	})
	if !errdefs.IsFailedPrecondition(err) {
		t.Errorf("rolled back: %v", err)
	}
	if len(h.alive()) > 0 {
		t.Error("a machine is left")
	}
	h.must(second(h.delete("")))
	if s, err := h.podDir.State(); err != nil || !s.Undone || s.Other != nil {
		t.Errorf("record %+v, %v", s, err)
	}
	h.network.ended("after all")
}

// TestOtherDiesWhileRolledBack: at whatever step the other machine dies, or its agent is silent, the old one goes on.
func TestOtherDiesWhileRolledBack(t *testing.T) {
	h := newHarness(t)
	t.Setenv("CUBE_TIMEOUT_SCALE", hostileScale)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	h.save("one")
	c.counts("1")
	for i, mode := range []string{hostile.Die + "Configure", hostile.Die + "AttachProcess", hostile.Die + "Thaw", hostile.Silent + "Thaw"} {
		h.launcher.Hostile = mode
		err := second(h.pod.Rollback(t.Context(), "one"))
		h.launcher.Hostile = ""
		if err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", mode, err)
		}
		c.counts([]string{"2", "3", "4", "5"}[i])
		if s, err := h.podDir.State(); err != nil || s.Other != nil || s.Undone || len(h.alive()) != 1 {
			t.Errorf("%s: record %+v, %v", mode, s, err)
		}
	}
	h.rollback("one")
	c.counts("1")
	c.end()
}

// TestKilledWhileRolledBack: whoever is to be killed doesn't come back.
func TestKilledWhileRolledBack(t *testing.T) {
	h := newHarness(t)
	h.member(cid, nil, "sleep").run()
	h.member("other", nil, "sleep").run()
	h.save("both")
	var kill <-chan error
	err := h.amid("both", func(ctx context.Context, old *fake.Machine) {
		if !old.Paused() {
			t.Error("the old machine goes on")
		}
		kill = async(func() error { return h.kill("", syscall.SIGKILL) })
		<-ctx.Done() // it takes too long
	})
	if !errdefs.IsAborted(err) || !strings.Contains(err.Error(), "box is to be killed") {
		t.Errorf("rolled back: %v", err)
	}
	h.must(soon(t, "the kill", kill))
	if w := h.wait(""); w.ExitStatus != 137 {
		t.Errorf("status %d", w.ExitStatus)
	}
	if r, err := h.State(t.Context(), &taskapi.StateRequest{ID: "other"}); err != nil || r.Status != tasktypes.Status_RUNNING {
		t.Errorf("the other: %v, %v", r, err)
	}
}

// TestKillReachesTheOther: a signal that comes while the machines change is for the one that the container is in then.
func TestKillReachesTheOther(t *testing.T) {
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		h := newHarness(t)
		h.run("sleep")
		h.save("one")
		var kill <-chan error
		h.must(h.amid("one", func(context.Context, *fake.Machine) {
			kill = async(func() error { return h.kill("", signal) })
			waits(t, "the kill", kill)
		}))
		h.must(soon(t, "the kill", kill))
		if w := h.wait(""); w.ExitStatus != 128+uint32(signal) {
			t.Errorf("status %d", w.ExitStatus)
		}
		h.must(second(h.delete("")))
	}
}

// TestLimitsAfterRollback: what a container may use is containerd's word, and stays.
func TestLimitsAfterRollback(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.save("one")
	h.must(h.update(memoryLimit(64 << 20)))
	h.must(h.update(cpuLimit(50000)))
	h.must(h.update(memoryLimit(96 << 20)))
	h.rollback("one")
	m := h.launcher.Last()
	if u := m.Guest.Updates(cid); len(u) != 1 || *u[0].Memory.Limit != 96<<20 || *u[0].CPU.Quota != 50000 {
		t.Errorf("the guest got %v", u)
	}
	if m.Request.CPULimit != 0.5 {
		t.Errorf("the machine's limit is %v", m.Request.CPULimit)
	}
}

// TestNoRollbackOfAKilled: whoever is being killed isn't brought back.
func TestNoRollbackOfAKilled(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.save("one")
	goOn := h.launcher.Last().Guest.StallAt("SignalProcess")
	kill := async(func() error { return h.kill("", syscall.SIGKILL) })
	calls := func() []string { return h.launcher.Last().Guest.Calls() }
	for !strings.HasSuffix(calls()[len(calls())-1], "/SignalProcess") {
		time.Sleep(time.Millisecond)
	}
	if _, err := h.pod.Rollback(t.Context(), "one"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "being killed") {
		t.Errorf("rolled back: %v", err)
	}
	if _, err := h.pod.Save(t.Context(), "two", ""); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "being killed") {
		t.Errorf("saved: %v", err)
	}
	goOn()
	h.must(soon(t, "the kill", kill))
	if w := h.wait(""); w.ExitStatus != 137 {
		t.Errorf("status %d", w.ExitStatus)
	}
}

// TestAllAtOnce: saves, rollbacks, deletions of snapshots and changes of all kinds, at the same time, get in each other's way
// only with an error that says so; afterwards the pod is whole.
func TestAllAtOnce(t *testing.T) {
	h := newHarness(t)
	h.member(cid, nil, "sleep").run()
	h.member("other", nil, "sleep").run()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	names := []string{"one", "two", "three"}
	ids := []string{cid, "other"}
	var wg sync.WaitGroup
	for worker := range 6 {
		r := rand.New(rand.NewPCG(random.Uint64(), 0))
		wg.Go(func() {
			for n := range 25 {
				name, id := names[r.IntN(len(names))], ids[r.IntN(len(ids))]
				exec := string(rune('a'+worker)) + string(rune('a'+n))
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				for what, err := range h.operation(ctx, r.IntN(8), id, exec, name) {
					if err != nil && !refusedAs(err) && !refusedAs(errgrpc.ToNative(err)) {
						t.Errorf("%s: %v", what, err)
					}
				}
				cancel()
			}
		})
	}
	wg.Wait()
	for _, id := range ids {
		_, _ = h.Resume(t.Context(), &taskapi.ResumeRequest{ID: id}) // unless it isn't paused
		r, err := h.State(t.Context(), &taskapi.StateRequest{ID: id})
		if err != nil || r.Status != tasktypes.Status_RUNNING {
			t.Errorf("%s: %v, %v", id, r, err)
		}
	}
	if len(h.alive()) != 1 || h.launcher.Last().Guest.Resting() {
		t.Errorf("%d machines live", len(h.alive()))
	}
	h.save("last")
	h.rollback("last")
}

// refusedAs tells whether an error is one of those that what comes at the wrong time ends with.
func refusedAs(err error) bool {
	return errdefs.IsUnavailable(err) || errdefs.IsFailedPrecondition(err) || errdefs.IsNotFound(err) || errdefs.IsAlreadyExists(err)
}

// operation is one of those that may come at any time.
func (h *harness) operation(ctx context.Context, what int, id, exec, name string) map[string]error {
	switch what {
	case 0, 1:
		return map[string]error{"save " + name: second(h.pod.Save(ctx, name, ""))}
	case 2:
		return map[string]error{"roll back to " + name: second(h.pod.Rollback(ctx, name))}
	case 3:
		return map[string]error{"delete " + name: second(h.store().Delete(name))}
	case 4:
		return map[string]error{"pause": second(h.Pause(ctx, &taskapi.PauseRequest{ID: id})), "resume": second(h.Resume(ctx, &taskapi.ResumeRequest{ID: id}))}
	case 5:
		return map[string]error{"state": second(h.State(ctx, &taskapi.StateRequest{ID: id})), "stats": second(h.Stats(ctx, &taskapi.StatsRequest{ID: id}))}
	}
	r := h.execRequest(exec, "exit", "0")
	r.ID = id
	err := second(h.Service.Exec(ctx, r))
	if err != nil {
		return map[string]error{"exec": err}
	}
	if err = second(h.Service.Start(ctx, &taskapi.StartRequest{ID: id, ExecID: exec})); err == nil {
		err = second(h.Service.Wait(ctx, &taskapi.WaitRequest{ID: id, ExecID: exec}))
	}
	return map[string]error{"run " + exec: err, "delete " + exec: second(h.Service.Delete(ctx, &taskapi.DeleteRequest{ID: id, ExecID: exec}))}
}

func (h *harness) store() *snapshot.Store {
	cfg, err := config.Load("")
	h.must(err)
	return snapshot.New(cfg, slog.New(slog.DiscardHandler))
}
