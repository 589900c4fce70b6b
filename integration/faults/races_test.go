package faults

import (
	"context"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
)

// TestDeleteTwice deletes a task that has ended from two clients at once: one does, the other hears that it is gone or
// the same end.
func TestDeleteTwice(t *testing.T) {
	id, _ := start(t, "twice", nil, "sh", "-c", "exit 5")
	ch := exits(t, id)
	tasks := []*asked{ask(t, id), ask(t, id)}
	tasks[0].wait(10*time.Second, 5)
	var wg sync.WaitGroup
	var deleted [2]bool
	for i, a := range tasks {
		wg.Go(func() {
			a.within(10*time.Second, "Delete", func(ctx context.Context) error {
				status, err := a.Delete(ctx)
				if errdefs.IsNotFound(err) {
					return nil
				}
				if err == nil && status.ExitCode() != 5 {
					t.Errorf("deleted with status %d", status.ExitCode())
				}
				deleted[i] = err == nil
				return err
			})
		})
	}
	wg.Wait()
	if !deleted[0] && !deleted[1] {
		t.Error("nobody has deleted it")
	}
	remove(t, id)
	nothingLeft(t, id)
	if len(ch) > 1 {
		t.Errorf("%d exits", len(ch))
	}
}

// TestKillRacesExit kills a container that is ending by itself, each time a little later. Whichever is first, there is one
// end, and all agree on it.
func TestKillRacesExit(t *testing.T) {
	rounds := 4
	if os.Getenv("CUBE_TEST_LONG") != "" {
		rounds = 12
	}
	id := s.ID(t, "race")
	won := map[int]int{}
	for i := range rounds {
		r := run(t, id)
		r.await(running, r.ended)
		a := ask(t, id)
		r.finish()
		<-time.After(time.Duration(i) * 16 * time.Millisecond / time.Duration(rounds))
		a.within(heard, "Kill", func(ctx context.Context) error {
			if err := a.Kill(ctx, unix.SIGKILL); err != nil && !errdefs.IsNotFound(err) {
				return err
			}
			return nil
		})
		r.returns(t)
		end := r.cmd.ProcessState.ExitCode()
		if end != code && end != 137 || r.text.Len() > 0 {
			t.Errorf("the client ended with %d: %s", end, r.text.String())
		}
		won[end]++
		remove(t, id)
		nothingLeft(t, id)
		r.catchUp()
		if len(r.exits) != 1 || int(r.exits[0].ExitStatus) != end {
			t.Errorf("the client ended with %d, the events tell %v", end, r.exits)
		}
	}
	t.Logf("ends by status: %v", won)
}

// TestContainerdKilledMidExec: an exec outlives the containerd that started it, and the next one can end and delete it.
func TestContainerdKilledMidExec(t *testing.T) {
	id, _ := start(t, "exec", nil, "sleep", "1000")
	cube, old := readiness().PID, containerd()
	cmd := s.Command("ctr", "task", "exec", "--exec-id", "e", id, "sh", "-c", "echo up; sleep 1000")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait() // it fails with its containerd
	if _, err := io.ReadFull(out, make([]byte, len("up\n"))); err != nil {
		t.Fatal(err)
	}
	s.End(t, old, unix.SIGKILL)
	awaitReady(t, cube, []int{old})
	a := ask(t, id)
	a.state(heard, client.Running)
	var e client.Process
	a.within(heard, "find the exec", func(ctx context.Context) (err error) { e, err = a.LoadProcess(ctx, "e", nil); return err })
	if e == nil {
		t.FailNow()
	}
	a.within(heard, "end the exec", func(ctx context.Context) error {
		ch, err := e.Wait(ctx)
		if err != nil {
			return err
		}
		if err := e.Kill(ctx, unix.SIGKILL); err != nil {
			return err
		}
		if end := <-ch; end.ExitCode() != 137 {
			t.Errorf("the exec ended with %d: %v", end.ExitCode(), end.Error())
		}
		_, err = e.Delete(ctx)
		return err
	})
	if r := s.Ctr("task", "exec", "--exec-id", "e", id, "echo", "again"); r.Stdout != "again\n" {
		t.Errorf("%+v", r)
	}
	remove(t, id)
	nothingLeft(t, id)
}

// TestReaderGone kills a client while its container's output flows: the container goes on, whoever attaches gets what
// comes from then on, and with nobody reading it can be deleted.
func TestReaderGone(t *testing.T) {
	id := s.ID(t, "reader")
	flood := func(args ...string) {
		t.Helper()
		var c counter
		cmd := s.Command("ctr", args...)
		cmd.Stdout = &c
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		s.Eventually(t, 30*time.Second, "output", func() bool { return c.n.Load() > 1<<20 })
		_ = cmd.Process.Kill() // it doesn't end by itself
		_ = cmd.Wait()
	}
	flood("run", "--runtime", "io.cube.v2", "--snapshotter", "cube", stack.Image, id, "sh", "-c", "while :; do echo "+strings.Repeat("line ", 100)+"; done")
	a := ask(t, id)
	a.state(prompt, client.Running)
	flood("task", "attach", id)
	a.state(prompt, client.Running)
	a.stats(2 * prompt)
	remove(t, id)
	nothingLeft(t, id)
}
