package faults

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"
)

// TestStalledGuest stops a machine's process. What is in memory is answered at once, what only the guest knows is given up
// in time.
func TestStalledGuest(t *testing.T) {
	stalled := func(t *testing.T, name string) (string, *asked, int) {
		id, pid := start(t, name, nil, "sleep", "1000")
		a := ask(t, id)
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		t.Logf("State %v, Pids %v", a.state(time.Second, client.Running), a.pids(time.Second))
		return id, a, pid
	}
	t.Run("killed", func(t *testing.T) {
		id, a, _ := stalled(t, "stalled")
		ch := exits(t, id)
		took := a.within(10*time.Second, "Stats", func(ctx context.Context) error {
			if _, err := a.Metrics(ctx); err != nil {
				return nil
			}
			return errors.New("a guest that stands still has answered")
		})
		t.Logf("Stats given up after %v, Kill %v, Wait %v", took, a.kill(15*time.Second), a.wait(10*time.Second, 137))
		mustHear(t, id, ch)
	})
	t.Run("goes on", func(t *testing.T) {
		id, a, pid := stalled(t, "pausing")
		ch := exits(t, id)
		if err := unix.Kill(pid, unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		a.stats(3 * time.Second)
		if r := s.Ctr("task", "exec", "--exec-id", "e", id, "echo", "awake"); r.Stdout != "awake\n" {
			t.Errorf("%+v", r)
		}
		a.kill(3 * time.Second)
		a.wait(5*time.Second, 137)
		mustHear(t, id, ch)
	})
	t.Run("deleted", func(t *testing.T) {
		oneOfMany(t)
		id, _, _ := stalled(t, "gone")
		began := time.Now()
		remove(t, id)
		nothingLeft(t, id)
		t.Logf("deleted after %v", time.Since(began))
	})
}
