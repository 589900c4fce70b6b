package reap

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var reaper *Reaper

func TestMain(m *testing.M) {
	// As PID 1 does, adopt orphans.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	reaper = New()
	os.Exit(m.Run())
}

func sh(script string) Command {
	return Command{Path: "/bin/sh", Args: []string{"-c", script}}
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestRun(t *testing.T) {
	for script, want := range map[string]uint32{"exit 0": 0, "exit 7": 7, "exit 255": 255, "kill -9 $$": 137, "kill -15 $$": 143} {
		if e, err := reaper.Run(testContext(t), sh(script)); err != nil || e.Status != want {
			t.Errorf("%s: status %d, %v, want %d", script, e.Status, err, want)
		}
	}
	if _, err := reaper.Run(testContext(t), Command{Path: "/nonexistent"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing program: %v", err)
	}
}

func TestPersonality(t *testing.T) {
	const addrNoRandomize = 0x0040000
	c := sh("test $(cat /proc/self/personality) = 00040000")
	c.Personality = addrNoRandomize
	if e, err := reaper.Run(testContext(t), c); err != nil || e.Status != 0 {
		t.Errorf("with a personality: %+v, %v", e, err)
	}
	if e, err := reaper.Run(testContext(t), sh("test $(cat /proc/self/personality) = 00000000")); err != nil || e.Status != 0 {
		t.Errorf("without: %+v, %v", e, err)
	}
}

func TestRunUntilContextEnds(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := reaper.Run(ctx, sh("sleep 60")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

// Many commands at a time, beside orphans that end whenever they like: nobody's status is stolen or mixed up.
func TestConcurrentRunsAndOrphans(t *testing.T) {
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			want := uint32(i + 1)
			script := "(true &) ; (sleep 0.01 &) ; exit " + strconv.Itoa(i+1)
			if e, err := reaper.Run(testContext(t), sh(script)); err != nil || e.Status != want {
				t.Errorf("status %d, %v, want %d", e.Status, err, want)
			}
		})
	}
	wg.Wait()
}

// An orphan's status is to be had although its pid is learnt only after its parent, and perhaps itself, has ended.
func TestClaimOrphan(t *testing.T) {
	for _, early := range []bool{false, true} {
		e := reaper.Expect()
		end, pid := orphan(t)
		var exit <-chan Exit
		if early {
			_ = end.Close()
			awaitEarly(t, pid)
			exit = e.Claim(pid)
		} else {
			exit = e.Claim(pid)
			_ = end.Close()
		}
		e.Done()
		select {
		case got := <-exit:
			if got.Status != 9 || time.Since(got.Time) > time.Minute {
				t.Errorf("early %v: %+v", early, got)
			}
		case <-testContext(t).Done():
			t.Fatalf("early %v: the exit never came", early)
		}
	}
	reaper.mu.Lock()
	defer reaper.mu.Unlock()
	if len(reaper.early) != 0 || reaper.expecting != 0 {
		t.Errorf("%d early exits are kept, %d expectations", len(reaper.early), reaper.expecting)
	}
}

// orphan makes a process without a parent, which ends with status 9 when end is closed.
func orphan(t *testing.T) (end *os.File, pid int) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	gate, end, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer gate.Close()
	c := sh("(read x <&2; exit 9) & echo $!") // its input is not the shell's
	c.Files = [3]*os.File{nil, w, gate}
	_, err = reaper.Run(testContext(t), c)
	_ = w.Close()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	n, err := r.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	if pid, err = strconv.Atoi(strings.TrimSpace(string(b[:n]))); err != nil {
		t.Fatal(err)
	}
	return end, pid
}

// awaitEarly returns when the exit of a process that nobody has claimed has come.
func awaitEarly(t *testing.T, pid int) {
	t.Helper()
	for ctx := testContext(t); ; time.Sleep(time.Millisecond) {
		reaper.mu.Lock()
		_, ok := reaper.early[pid]
		reaper.mu.Unlock()
		if ok {
			return
		}
		if ctx.Err() != nil {
			t.Fatal("the exit never came")
		}
	}
}
