package task

import (
	"context"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/cubesandbox/cube/internal/hostile"
)

const (
	// hostileScale makes the deadlines of what is never answered short.
	hostileScale = "0.1"
	// hostileLimit is how long a container of a hostile guest may take from its creation to its deletion.
	hostileLimit = 15 * time.Second
	// hostileMemory is how much more a shim may hold because of it: windows and messages, each of bounded size. What
	// the guest itself holds is counted too, as it lives in this process.
	hostileMemory = 32 << 20
)

// TestHostileGuests gives the shim guests that break one rule each. Whatever they do, each call ends in time, with an
// error of one line if it must; what needs no guest is answered at once; the container can be killed and deleted; and
// nothing is left.
func TestHostileGuests(t *testing.T) {
	abuse(t, hostile.Output, "", true) // so that what is made once is there
	const protocol, silent, died = "doesn't keep to the protocol", "in time", "kernel panic"
	for _, tc := range []struct {
		mode string
		// fails is in the error of the creation, or the start, if there must be one: "*" if there may be.
		fails string
		read  bool // somebody reads the output
		long  bool
	}{
		{mode: hostile.Garbage, fails: protocol},
		{mode: hostile.HugeFrame, fails: protocol},
		{mode: hostile.HugeMessage, fails: "4294967280 bytes"},
		{mode: hostile.Stray, fails: protocol},
		{mode: hostile.WrongID, fails: "isn't waiting for any"},
		{mode: hostile.WrongType, fails: "where an answer belongs"},
		{mode: hostile.Twice, fails: "isn't waiting for any"},
		{mode: hostile.Torn, fails: "can't be read"},
		{mode: hostile.Text, fails: "…"},
		{mode: hostile.Metrics},
		{mode: hostile.Undead},
		{mode: hostile.Events},
		{mode: hostile.Restless, fails: "*"},
		{mode: hostile.Output},
		{mode: hostile.Output, read: true},
		{mode: hostile.Deaf, fails: silent, long: true},
		{mode: hostile.Silent + "Configure", fails: silent},
		{mode: hostile.Silent + "CreateContainer", fails: silent, long: true},
		{mode: hostile.Silent + "StartContainer", fails: silent},
		{mode: hostile.Silent + "Stats"},
		{mode: hostile.Silent + "SignalProcess"},
		{mode: hostile.Silent + "Shutdown"},
		{mode: hostile.Silent + "Events"},
		{mode: hostile.Die + "Configure", fails: died},
		{mode: hostile.Die + "CreateContainer", fails: died},
		{mode: hostile.Die + "StartContainer", fails: died},
		{mode: hostile.Die + "Stats"},
		{mode: hostile.Die + "SignalProcess"},
		{mode: hostile.Die + "Shutdown"},
		{mode: hostile.Die + "Events", fails: "*"},
	} {
		t.Run(tc.mode, func(t *testing.T) {
			if tc.long && os.Getenv("CUBE_TEST_LONG") == "" {
				t.Skip("one of those that wait: set CUBE_TEST_LONG=1")
			}
			before := resources(t)
			abuse(t, tc.mode, tc.fails, tc.read)
			for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
				after := resources(t)
				if after.fds <= before.fds && after.goroutines <= before.goroutines {
					if grown := after.memory - before.memory; grown > hostileMemory {
						t.Errorf("the shim holds %d MiB more", grown>>20)
					}
					return
				}
				if time.Now().After(deadline) {
					stacks := make([]byte, 64<<10)
					t.Fatalf("%+v has become %+v\n%s", before, after, stacks[:runtime.Stack(stacks, true)])
				}
			}
		})
	}
}

// abuse takes a container of a hostile guest through its life, as far as it gets.
func abuse(t *testing.T, mode, fails string, read bool) {
	t.Run("life", func(t *testing.T) {
		h := newHarness(t)
		h.launcher.Hostile = mode
		t.Setenv("CUBE_TIMEOUT_SCALE", hostileScale)
		h.spec("sleep")
		ctx, cancel := context.WithTimeout(t.Context(), hostileLimit)
		defer cancel()
		check := func(what string, err error) bool {
			t.Helper()
			switch {
			case ctx.Err() != nil:
				t.Fatalf("%s: not within %v", what, hostileLimit)
			case err == nil:
				return true
			}
			native, text := errgrpc.ToNative(err), err.Error()
			if errdefs.IsInternal(native) || errdefs.IsCanceled(native) || strings.ContainsAny(text, "\n\r\x1b\x00") || len(text) > 2<<10 {
				t.Errorf("%s: %.2048q", what, text)
			}
			t.Logf("%s: %.200v", what, err)
			return false
		}
		r := h.createRequest()
		r.Stdout = h.fifo("out")
		if read {
			f, err := os.OpenFile(r.Stdout, os.O_RDWR, 0)
			h.must(err)
			copied := make(chan struct{})
			go func() {
				defer close(copied)
				io.Copy(io.Discard, f) // until it is closed
			}()
			defer func() {
				f.Close()
				<-copied
			}()
		}
		err := second(h.Service.Create(ctx, r))
		created := check("create", err)
		if created {
			err = second(h.Service.Start(ctx, &taskapi.StartRequest{ID: cid}))
			check("start", err)
		}
		if fails != "*" && (err == nil) != (fails == "") || err != nil && !strings.Contains(err.Error(), strings.Trim(fails, "*")) {
			t.Errorf("create and start: %.2048v, want %q", err, fails)
		}
		if !created {
			return
		}
		check("stats", second(h.Stats(ctx, &taskapi.StatsRequest{ID: cid})))
		asked := time.Now()
		h.state("")
		check("pids", second(h.Pids(ctx, &taskapi.PidsRequest{ID: cid})))
		if d := time.Since(asked); d > time.Second {
			t.Errorf("State and Pids took %v", d)
		}
		before := resources(t).memory
		check("kill", second(h.Kill(ctx, &taskapi.KillRequest{ID: cid, Signal: uint32(syscall.SIGKILL)})))
		check("wait", second(h.Service.Wait(ctx, &taskapi.WaitRequest{ID: cid})))
		if grown := resources(t).memory - before; grown > hostileMemory {
			t.Errorf("the shim holds %d MiB more", grown>>20)
		}
		if !check("delete", second(h.Service.Delete(ctx, &taskapi.DeleteRequest{ID: cid}))) {
			return
		}
		events := h.until("/tasks/delete")
		exits := slices.DeleteFunc(slices.Clone(events), func(e string) bool { return !strings.HasPrefix(e, "/tasks/exit") })
		if started := slices.Contains(events, "/tasks/start"); len(exits) > 1 || started && len(exits) == 0 {
			t.Errorf("events %q", events)
		}
	})
}

// A machine of two containers that their SIGKILLs don't end goes on for the second until that has been killed, too.
func TestHostileGuestOfTwo(t *testing.T) {
	for _, mode := range []string{hostile.Undead, hostile.Silent + "SignalProcess"} {
		t.Run(mode, func(t *testing.T) {
			if mode == hostile.Undead && os.Getenv("CUBE_TEST_LONG") == "" {
				t.Skip("the other one ends in the same way: set CUBE_TEST_LONG=1")
			}
			h := newHarness(t)
			h.launcher.Hostile = mode
			t.Setenv("CUBE_TIMEOUT_SCALE", hostileScale)
			a := h.member("a", nil, "sleep").run()
			b := h.member("b", nil, "sleep").run()
			kill := func(m *member) {
				err := second(h.Kill(t.Context(), &taskapi.KillRequest{ID: m.id, Signal: uint32(syscall.SIGKILL)}))
				if (err == nil) != (mode == hostile.Undead) {
					t.Errorf("kill %s: %v", m.id, err)
				}
			}
			kill(a)
			select {
			case <-h.launcher.Last().Done():
				t.Fatal("the machine was ended under the other container")
			case <-time.After(3 * time.Second): // longer than a SIGKILL may take at this scale
			}
			kill(b)
			for _, m := range []*member{a, b} {
				if status := m.wait(""); status != 137 {
					t.Errorf("%s has status %d", m.id, status)
				}
				m.delete()
			}
		})
	}
}

// use is what a process holds.
type use struct {
	fds, goroutines int
	memory          int64
}

func resources(t *testing.T) use {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return use{fds: len(list), goroutines: runtime.NumGoroutine(), memory: int64(m.HeapAlloc)}
}
