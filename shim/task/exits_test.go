package task

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	tasktypes "github.com/containerd/containerd/api/types/task"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/record"
)

// checkOrder verifies what everyone relies on in a container's events.
func checkOrder(t *testing.T, list []string) {
	t.Helper()
	at := map[string]int{}
	for i, e := range list {
		if _, twice := at[e]; twice {
			t.Errorf("twice: %s", e)
		}
		at[e] = i
	}
	initExit := -1
	for e, i := range at {
		if strings.HasPrefix(e, "/tasks/exit box/box") {
			initExit = i
		}
	}
	for e, i := range at {
		switch {
		case strings.HasPrefix(e, "/tasks/exec-started box/"):
			id := strings.TrimPrefix(e, "/tasks/exec-started ")
			exits := 0
			for other, j := range at {
				if strings.HasPrefix(other, "/tasks/exit "+id+" ") {
					exits++
					if j < i {
						t.Errorf("%s came before %s", other, e)
					}
				}
			}
			if exits != 1 {
				t.Errorf("%d exits of %s", exits, id)
			}
			if initExit >= 0 && i > initExit {
				t.Errorf("%s came after init's exit", e)
			}
		case strings.HasPrefix(e, "/tasks/exit box/"):
			id := strings.Fields(e)[1]
			if _, started := at["/tasks/exec-started "+id]; id != "box/box" && !started {
				t.Errorf("%s without a start", e)
			}
			if initExit >= 0 && i > initExit {
				t.Errorf("%s came after init's exit", e)
			}
		}
	}
}

// TestExitOrder races starts, exits, signals and the end of init against one another.
func TestExitOrder(t *testing.T) {
	rounds := 30
	if testing.Short() {
		rounds = 5
	}
	for range rounds {
		t.Run("", func(t *testing.T) {
			h := newHarness(t)
			h.create("sleep")
			guest := h.launcher.Last().Guest
			guest.Jitter = 2 * time.Millisecond
			h.start("")
			var wg sync.WaitGroup
			for i := range 12 {
				id := fmt.Sprintf("e%d", i)
				args := [][]string{{"exit", "3"}, {"sleep"}, {"nonsense"}}[i%3]
				wg.Go(func() {
					if _, err := h.Service.Exec(t.Context(), h.execRequest(id, args...)); err != nil {
						return // init has gone
					}
					if _, err := h.Service.Start(t.Context(), &taskapi.StartRequest{ID: cid, ExecID: id}); err != nil {
						return
					}
					if args[0] == "sleep" {
						time.Sleep(rand.N(3 * time.Millisecond))
						h.kill(id, syscall.SIGTERM) // it may have gone with init
					}
					h.wait(id)
				})
			}
			time.Sleep(rand.N(15 * time.Millisecond))
			h.must(h.kill("", syscall.SIGKILL))
			if w := h.wait(""); w.ExitStatus != 137 {
				t.Errorf("init's status %d", w.ExitStatus)
			}
			wg.Wait()
			_, err := h.delete("")
			h.must(err)
			checkOrder(t, h.until("/tasks/delete"))
		})
	}
}

// TestLostExits: a guest that doesn't tell of its execs' ends can't hold init's.
func TestLostExits(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.launcher.Last().Guest.LoseExits = true
	h.exec("e", "sleep")
	h.start("e")
	began := time.Now()
	h.must(h.kill("", syscall.SIGTERM))
	if w := h.wait(""); w.ExitStatus != 143 {
		t.Errorf("init's status %d", w.ExitStatus)
	}
	if w := h.wait("e"); w.ExitStatus != 137 {
		t.Errorf("the exec's status %d", w.ExitStatus)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
	checkOrder(t, h.until("/tasks/exit box/box"))
}

// TestLateStart: an exec whose start is answered after its container has ended never comes to life.
func TestLateStart(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	guest := h.launcher.Last().Guest
	guest.HoldExec = make(chan struct{})
	h.exec("e", "sleep")
	failed := make(chan error, 1)
	go func() {
		_, err := h.Service.Start(context.Background(), &taskapi.StartRequest{ID: cid, ExecID: "e"})
		failed <- err
	}()
	for !strings.Contains(strings.Join(guest.Calls(), " "), "ExecProcess") {
		time.Sleep(time.Millisecond)
	}
	h.must(h.kill("", syscall.SIGKILL))
	h.wait("")
	close(guest.HoldExec)
	if err := <-failed; err == nil {
		t.Error("started")
	}
	for _, e := range h.until("/tasks/exit box/box") {
		if strings.Contains(e, "started box/e") || strings.Contains(e, "exit box/e") {
			t.Errorf("event %s", e)
		}
	}
}

// TestMachineDeath: whatever runs gets an exit, nobody waits for ever, and everything answers and can be deleted.
func TestMachineDeath(t *testing.T) {
	for reason, status := range map[string]uint32{"guest panicked": 255, "signal: killed": 137} {
		t.Run(reason, func(t *testing.T) {
			h := newHarness(t)
			h.run("sleep")
			h.exec("running", "sleep")
			h.start("running")
			h.exec("created", "sleep")
			waited := make(chan uint32, 2)
			for _, id := range []string{"running", ""} {
				go func() {
					r, err := h.Service.Wait(context.Background(), &taskapi.WaitRequest{ID: cid, ExecID: id})
					if err != nil {
						t.Error(err)
					}
					waited <- r.GetExitStatus()
				}()
			}
			began := time.Now()
			h.launcher.Last().Crash(reason)
			for range 2 {
				if got := <-waited; got != status {
					t.Errorf("status %d, want %d", got, status)
				}
			}
			h.wait("created")
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("took %s", took)
			}
			if e, err := record.Bundle(h.bundle).Exit(); err != nil || e.Status != status {
				t.Errorf("recorded exit %+v, %v", e, err)
			}
			list := h.until("/tasks/exit box/box")
			checkOrder(t, list)
			for _, e := range list {
				if strings.HasPrefix(e, "/tasks/exit box/created") {
					t.Errorf("%s of an exec that never ran", e)
				}
			}
			if st := h.state(""); st.Status != tasktypes.Status_STOPPED {
				t.Errorf("state %v", st)
			}
			for _, id := range []string{"running", "created", ""} {
				_, err := h.delete(id)
				h.must(err)
			}
		})
	}
}

// TestStartDuringDeath: a start whose machine dies underneath is an error with the machine's reason, and no exit.
func TestStartDuringDeath(t *testing.T) {
	h := newHarness(t)
	h.create("sleep")
	m := h.launcher.Last()
	defer m.Guest.Stall()()
	failed := make(chan error, 1)
	go func() {
		_, err := h.Service.Start(context.Background(), &taskapi.StartRequest{ID: cid})
		failed <- err
	}()
	for !strings.Contains(strings.Join(m.Guest.Calls(), " "), "StartContainer") {
		time.Sleep(time.Millisecond)
	}
	m.Crash("guest panicked")
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "guest panicked") {
		t.Fatalf("start: %v", err)
	}
	h.wait("")
	_, err := h.delete("")
	h.must(err)
	for _, e := range h.until("/tasks/delete") {
		if strings.HasPrefix(e, "/tasks/start") || strings.HasPrefix(e, "/tasks/exit") {
			t.Errorf("event %s", e)
		}
	}
}

// TestSilentAgent: reads answer while the agent doesn't, and SIGKILL reaches the machine then.
func TestSilentAgent(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.exec("e", "sleep")
	thaw := h.launcher.Last().Guest.Stall()
	defer thaw()
	hung := make(chan struct{})
	go func() {
		defer close(hung)
		h.Service.Start(context.Background(), &taskapi.StartRequest{ID: cid, ExecID: "e"}) // it can't succeed
	}()
	for range 20 {
		began := time.Now()
		h.state("")
		h.state("e")
		_, err := h.Pids(t.Context(), &taskapi.PidsRequest{ID: cid})
		h.must(err)
		_, err = h.Connect(t.Context(), &taskapi.ConnectRequest{ID: cid})
		h.must(err)
		if took := time.Since(began); took > time.Second {
			t.Fatalf("reads took %s", took)
		}
	}
	_, err := h.Stats(t.Context(), &taskapi.StatsRequest{ID: cid})
	if err == nil || !strings.Contains(err.Error(), "in time") {
		t.Errorf("stats: %v", err)
	}
	h.must(h.kill("", syscall.SIGKILL))
	if w := h.wait(""); w.ExitStatus != 137 {
		t.Errorf("status %d", w.ExitStatus)
	}
	<-hung
	_, err = h.delete("")
	h.must(err)
	checkOrder(t, h.until("/tasks/delete"))
}

// TestHostileEvents: what a guest tells of things that aren't there changes nothing.
func TestHostileEvents(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	h.exec("e", "sleep")
	guest := h.launcher.Last().Guest
	for _, e := range []*api.Exit{
		{Id: "other", Status: 1},
		{Id: cid, ExecId: "unknown", Status: 1},
		{Id: cid, ExecId: "e", Status: 1}, // not started
		{Id: "a\nb\x1b[0m", Status: 1},
	} {
		guest.Emit(&api.Event{Event: &api.Event_Exit{Exit: e}})
	}
	guest.Emit(&api.Event{})
	for range 1000 {
		guest.Emit(&api.Event{Event: &api.Event_Oom{Oom: &api.OOM{Id: cid}}})
	}
	guest.Emit(&api.Event{Event: &api.Event_Exit{Exit: &api.Exit{Id: cid, Status: 0xffffff00 | 7}}})
	if w := h.wait(""); w.ExitStatus != 7 {
		t.Errorf("status %d", w.ExitStatus)
	}
	ooms := 0
	for _, e := range h.until("/tasks/exit box/box") {
		switch {
		case e == "/tasks/oom box":
			ooms++
		case strings.HasPrefix(e, "/tasks/exit box/") && !strings.HasPrefix(e, "/tasks/exit box/box"):
			t.Errorf("event %s", e)
		}
	}
	if ooms < 1 || ooms > 3 {
		t.Errorf("%d OOM events", ooms)
	}
}
