package pod

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/shim/internal/fake"
	"github.com/cubesandbox/cube/vmm"
)

// hasty makes minutes of milliseconds.
func hasty(d time.Duration) time.Duration { return d / 500 }

func newTestVM(t *testing.T) (*vm, *fake.Machine) {
	t.Helper()
	l := &fake.Launcher{}
	m, err := l.Launch(t.Context(), vmm.Request{ID: "box", Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	g, err := guest.Connect(t.Context(), m.Agent(), hasty)
	if err != nil {
		t.Fatal(err)
	}
	v := newVM(m, g, slog.New(slog.NewTextHandler(t.Output(), nil)), hasty, func() error { return nil })
	t.Cleanup(func() { v.stop() }) // the fake's never fails
	return v, l.Last()
}

func awaitDown(t *testing.T, v *vm) {
	t.Helper()
	select {
	case <-v.down:
	case <-time.After(10 * time.Second):
		t.Fatal("the machine isn't down")
	}
}

func TestTimeIsCorrected(t *testing.T) {
	_, m := newTestVM(t)
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		calls := m.Guest.Calls()
		if len(slices.DeleteFunc(calls, func(c string) bool { return !strings.HasSuffix(c, "/SetTime") })) > 2 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("calls %v", calls)
		}
	}
}

// TestSilenceIsTheEnd: a machine whose agent has gone silent is ended by us.
func TestSilenceIsTheEnd(t *testing.T) {
	v, m := newTestVM(t)
	defer m.Guest.Stall()()
	awaitDown(t, v)
	if !m.Stopped() || v.lost != statusKilled {
		t.Errorf("stopped %v, status %d", m.Stopped(), v.lost)
	}
	if err := v.explain(fmt.Errorf("start it: %w", guest.ErrGone)); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "has not answered") {
		t.Errorf("a call that met its end says %v", err)
	}
}

// TestLostChannel: without its agent a machine is of no use, also if it goes on.
func TestLostChannel(t *testing.T) {
	v, m := newTestVM(t)
	m.HangUp()
	awaitDown(t, v)
	if v.lost != statusLost || v.why() == nil {
		t.Errorf("status %d, because %v", v.lost, v.why())
	}
}

// TestStopTwice: stopping a machine twice, or one that is dead, is fine and quick.
func TestStopTwice(t *testing.T) {
	v, m := newTestVM(t)
	m.Crash("exit status 1")
	awaitDown(t, v)
	for range 2 {
		if err := v.stop(); err != nil {
			t.Error(err)
		}
	}
	if slices.ContainsFunc(m.Guest.Calls(), func(c string) bool { return strings.HasSuffix(c, "/Shutdown") }) {
		t.Error("a dead guest was asked to shut down")
	}
}

func TestTransitionsAreComplete(t *testing.T) {
	for o := opStart; o <= opSave; o++ {
		for s := Created; s <= Deleted; s++ {
			refuse, ok := transitions[o][s]
			if !ok {
				t.Errorf("op %d has no entry for %s", o, s)
			}
			if refuse != nil && !strings.Contains(refuse("container x").Error(), "container x") {
				t.Errorf("op %d in %s doesn't say what is refused", o, s)
			}
		}
	}
}

func TestHostname(t *testing.T) {
	for id, want := range map[string]string{"box": "box", strings.Repeat("a", 76): strings.Repeat("a", 63), strings.Repeat("a", 62) + "-b": strings.Repeat("a", 62)} {
		if got := hostname(id); got != want {
			t.Errorf("%s: %s", id, got)
		}
	}
}
