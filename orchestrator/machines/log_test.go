package machines

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

// TestFollowLog: lines are told when they are whole, cut where they are too long, and as of the time that they say.
func TestFollowLog(t *testing.T) {
	cfg := config.Default()
	cfg.StateDir = t.TempDir()
	m := &Machines{cfg: cfg}
	path := sandbox.LogPath(cfg, "iabc")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	write := func(text string) {
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	write("{\"time\":\"2026-01-31T12:00:00Z\",\"level\":\"WARN\",\"msg\":\"json\",\"n\":1}\r\nplain\n\n")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	told, ended, done := make(chan lifecycle.LogEntry), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- m.FollowLog(ctx, "iabc", lifecycle.LogStart{Tail: -1}, ended, func(e lifecycle.LogEntry) error { told <- e; return nil })
	}()
	next := func(want string) {
		t.Helper()
		select {
		case e := <-told:
			if got := fmt.Sprint(e.At.Format(time.TimeOnly), " ", e.Level, " ", e.Message, " ", e.Fields["n"]); got != want {
				t.Errorf("%q, not %q", got, want)
			}
		case err := <-done:
			t.Fatal("it has ended", err)
		}
	}
	next("12:00:00 warn json 1")
	next("12:00:00 info plain ")
	write("ha")
	write("lf\nunfinished" + strings.Repeat("x", 2*maxLine))
	next("12:00:00 info half ")
	close(ended)
	if e := <-told; len(e.Message) != maxLine || !strings.HasPrefix(e.Message, "unfinished") {
		t.Errorf("%d characters of the rest", len(e.Message))
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	var last []string
	if err := m.FollowLog(ctx, "iabc", lifecycle.LogStart{Tail: 2}, nil, func(e lifecycle.LogEntry) error { last = append(last, e.Message[:4]); return nil }); err != nil {
		t.Error(err)
	}
	if !slices.Equal(last, []string{"half", "unfi"}) {
		t.Errorf("the last ones: %q", last)
	}
	if err := m.FollowLog(ctx, "inone", lifecycle.LogStart{Tail: -1}, nil, nil); err != nil {
		t.Errorf("no log: %v", err)
	}
}

// TestFollowLogAfter: who has heard a part of a log goes on after it, wherever it is by then: each line is told once.
func TestFollowLogAfter(t *testing.T) {
	cfg := config.Default()
	cfg.StateDir = t.TempDir()
	m := &Machines{cfg: cfg}
	path := sandbox.LogPath(cfg, "iabc")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	write := func(text string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	rotate := func() {
		t.Helper()
		for n := 5; n >= 0; n-- {
			from := path
			if n > 0 {
				from = fmt.Sprintf("%s.%d", path, n)
			}
			_ = os.Rename(from, fmt.Sprintf("%s.%d", path, n+1))
		}
	}
	var place string
	// hear tells the lines after the last one that was told, at most so many.
	enough := errors.New("enough")
	hear := func(most int) (got []string) {
		t.Helper()
		err := m.FollowLog(t.Context(), "iabc", lifecycle.LogStart{Tail: -1, After: place}, nil, func(e lifecycle.LogEntry) error {
			got, place = append(got, e.Message), e.Place
			if len(got) == most {
				return enough
			}
			return nil
		})
		if err != nil && err != enough {
			t.Fatal(err)
		}
		return got
	}
	want := func(got []string, want ...string) {
		t.Helper()
		if !slices.Equal(got, want) {
			t.Errorf("%q, not %q", got, want)
		}
	}
	write("1\n2\r\n\n3\n4\n")
	want(hear(2), "1", "2")
	want(hear(1), "3")
	rotate()
	write("5 begins, ")
	want(hear(1), "4")
	// What follows is cut short amid a line, which is told when it is whole.
	ctx, cancel := context.WithCancel(t.Context())
	heard := func(e lifecycle.LogEntry) error { t.Errorf("%q is told", e.Message); return nil }
	time.AfterFunc(100*time.Millisecond, cancel)
	if err := m.FollowLog(ctx, "iabc", lifecycle.LogStart{After: place}, make(chan struct{}), heard); err != nil {
		t.Error(err)
	}
	write("5 ends\n")
	rotate()
	write("6\n")
	want(hear(-1), "5 begins, 5 ends", "6")
	want(hear(-1))
	rotate()
	write("7\n")
	rotate()
	write("8\n")
	if err := os.Remove(path + ".2"); err != nil { // where it was
		t.Fatal(err)
	}
	for n := 3; n <= 6; n++ {
		_ = os.Remove(fmt.Sprintf("%s.%d", path, n))
	}
	want(hear(-1), "7", "8")
	for _, bad := range []string{"x", "1-2", "1-2-3-4", "1--2-3", "-1-2-3", "1-2-ffffffffffffffff", "1-2-g", "11111111111111111-1-1"} {
		if err := m.FollowLog(t.Context(), "iabc", lifecycle.LogStart{After: bad}, nil, heard); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
