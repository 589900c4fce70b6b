package audit

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, f File) *Log {
	t.Helper()
	l, err := Open(f, slog.New(slog.DiscardHandler))
	must(t, err)
	return l
}

// entries are those of all files, the oldest first, and how many lines are none.
func entries(t *testing.T, f File) (all []Entry, torn int) {
	t.Helper()
	for n := f.Files + 1; n >= 0; n-- {
		path := f.Path
		if n > 0 {
			path = fmt.Sprintf("%s.%d", f.Path, n)
		}
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		must(t, err)
		if int64(len(b)) > f.Size {
			t.Errorf("%s has %d bytes", path, len(b))
		}
		for line := range bytes.Lines(b) {
			e, err := Parse(line)
			if err != nil {
				torn++
				continue
			}
			all = append(all, e)
		}
	}
	return all, torn
}

// TestLog: several processes record at once, all of it is there, in files that are root's and bounded.
func TestLog(t *testing.T) {
	f := File{Path: filepath.Join(t.TempDir(), "logs", "audit.jsonl"), Size: 20_000, Files: 100}
	logs := []*Log{open(t, f), open(t, f)}
	const each, writers = 100, 4
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for n := range each {
				logs[w%2].Record(Entry{Action: Create, Result: OK, Team: fmt.Sprint(w), Sandbox: fmt.Sprint(n), By: By{Via: API, From: "192.0.2.1:1"}})
			}
		})
	}
	wg.Go(func() {
		for n := range each / 10 {
			if err := Append(f, Entry{Action: KeyCreate, Result: OK, Team: "cli", Sandbox: fmt.Sprint(n), By: By{Via: CLI}}); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	all, torn := entries(t, f)
	next := map[string]int{}
	for _, e := range all {
		if e.Sandbox != fmt.Sprint(next[e.Team]) {
			t.Errorf("of %s came %s before %d", e.Team, e.Sandbox, next[e.Team])
		}
		next[e.Team]++
	}
	if len(all) != writers*each+each/10 || torn > 0 {
		t.Errorf("%d entries, %d lines that are none", len(all), torn)
	}
	for _, l := range logs {
		must(t, l.Close())
	}
	files, err := filepath.Glob(f.Path + "*")
	must(t, err)
	if len(files) < 3 {
		t.Errorf("never rotated: %q", files)
	}
	for _, path := range files {
		if st, err := os.Stat(path); err != nil || st.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", path, st.Mode(), err)
		}
	}
	// Fewer are kept from now on.
	f.Files = 2
	f.Size = 1
	must(t, Append(f, Entry{Action: Kill, Result: OK, By: By{Via: CLI}}))
	if files, err = filepath.Glob(f.Path + "*"); err != nil || len(files) != 2 {
		t.Errorf("kept %q, %v", files, err)
	}
}

// TestLogFails: what can't be recorded keeps others from making anything until it can, and the record says so.
func TestLogFails(t *testing.T) {
	dir := t.TempDir()
	f := File{Path: filepath.Join(dir, "audit.jsonl"), Size: 1 << 20, Files: 3}
	var said strings.Builder
	l, err := Open(f, slog.New(slog.NewTextHandler(&said, nil)))
	must(t, err)
	defer l.Close()
	l.Record(Entry{Action: Create, Result: OK, Sandbox: "one"})
	must(t, l.Ready())
	must(t, os.Remove(f.Path))
	must(t, os.Mkdir(f.Path, 0o700))
	l.Record(Entry{Action: Kill, Result: OK, Sandbox: "two"})
	l.Record(Entry{Action: Kill, Result: OK, Sandbox: "three"})
	if err := l.Ready(); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), f.Path) {
		t.Errorf("while it fails: %v", err)
	}
	if !strings.Contains(said.String(), "two") || !strings.Contains(said.String(), "three") {
		t.Errorf("the daemon's log: %s", said.String())
	}
	must(t, os.Remove(f.Path))
	must(t, l.Ready())
	must(t, l.Ready())
	l.Record(Entry{Action: Create, Result: OK, Sandbox: "four"})
	all, _ := entries(t, f)
	if len(all) != 2 || all[0].Action != Gap || !strings.Contains(all[0].Why, "2 entries") || all[1].Sandbox != "four" {
		t.Errorf("recorded: %+v", all)
	}
}

// TestTorn: what the host's end has cut short is no part of another line.
func TestTorn(t *testing.T) {
	f := File{Path: filepath.Join(t.TempDir(), "audit.jsonl"), Size: 1 << 20, Files: 3}
	must(t, Append(f, Entry{Action: Create, Result: OK, Sandbox: "one"}))
	file, err := os.OpenFile(f.Path, os.O_WRONLY|os.O_APPEND, 0)
	must(t, err)
	_, err = file.WriteString(`{"time":"2026-`)
	must(t, errors.Join(err, file.Close()))
	l := open(t, f)
	l.Record(Entry{Action: Kill, Result: OK, Sandbox: "two"})
	must(t, l.Close())
	if all, torn := entries(t, f); len(all) != 2 || torn != 1 || all[1].Sandbox != "two" {
		t.Errorf("%+v, %d", all, torn)
	}
	l.Record(Entry{Action: Kill, Result: OK}) // which is no deadlock
}

func TestFilter(t *testing.T) {
	now := time.Now()
	e := Entry{Time: now, Team: "blue", Sandbox: "child", Origin: "parent"}
	for f, want := range map[Filter]bool{
		{}: true, {Team: "blue"}: true, {Team: "red"}: false, {Sandbox: "child"}: true, {Sandbox: "parent"}: true, {Sandbox: "other"}: false,
		{Since: now}: true, {Since: now.Add(time.Second)}: false,
	} {
		if f.Has(e) != want {
			t.Errorf("%+v: %v", f, !want)
		}
	}
}

func TestClass(t *testing.T) {
	for want, err := range map[string]error{"not_found": errdefs.ErrNotFound, "resource_exhausted": fmt.Errorf("x: %w", errdefs.ErrResourceExhausted), "internal": errors.New("e2b_secret")} {
		if got := Class(err); got != want {
			t.Errorf("%v is %s", err, got)
		}
	}
}
