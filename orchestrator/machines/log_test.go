package machines

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

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
		done <- m.FollowLog(ctx, "iabc", -1, ended, func(e lifecycle.LogEntry) error { told <- e; return nil })
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
	if err := m.FollowLog(ctx, "iabc", 2, nil, func(e lifecycle.LogEntry) error { last = append(last, e.Message[:4]); return nil }); err != nil {
		t.Error(err)
	}
	if !slices.Equal(last, []string{"half", "unfi"}) {
		t.Errorf("the last ones: %q", last)
	}
	if err := m.FollowLog(ctx, "inone", -1, nil, nil); err != nil {
		t.Errorf("no log: %v", err)
	}
}
