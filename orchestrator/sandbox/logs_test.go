package sandbox

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/stdio"
)

// stream is a process's output.
type stream struct{ net.Conn }

func (stream) CloseWrite() error { return nil }

// shimLog is a log that the shim writes, and where its container writes.
func shimLog(t *testing.T, size config.Size, files int) (path string, w io.WriteCloser, written func()) {
	t.Helper()
	cfg := &config.Config{StateDir: t.TempDir(), Logs: config.Logs{MaxSize: size, MaxFiles: files}}
	uri := logURI(cfg, "c1").String()
	s, err := stdio.Open(t.Context(), stdio.Config{Stdout: uri, Stderr: uri}, stdio.Owner{
		ID: "c1", Namespace: "testing", Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Timeout: func(d time.Duration) time.Duration { return d },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	near, far := net.Pipe()
	t.Cleanup(func() { far.Close() })
	s.Attach(stdio.Streams{Stdout: stream{near}})
	return LogPath(cfg, "c1"), far, func() { s.Drain(10 * time.Second) }
}

// follow follows a log and returns its lines, one by one, and its end.
func follow(t *testing.T, path string, tail int, ended <-chan struct{}) (lines <-chan string, done <-chan error) {
	t.Helper()
	out, in := io.Pipe()
	t.Cleanup(func() { out.Close() })
	errs, texts := make(chan error, 1), make(chan string)
	go func() {
		err := CopyLog(t.Context(), in, path, LogStart{Tail: tail}, ended)
		in.Close()
		errs <- err
	}()
	go func() {
		defer close(texts)
		for s := bufio.NewScanner(out); s.Scan(); {
			texts <- s.Text()
		}
	}()
	return texts, errs
}

func next(t *testing.T, lines <-chan string) string {
	t.Helper()
	select {
	case s, ok := <-lines:
		if !ok {
			t.Fatal("it has ended")
		}
		return s
	case <-time.After(20 * time.Second):
		t.Fatal("nothing comes")
	}
	panic("unreachable")
}

func TestFollow(t *testing.T) {
	path, w, written := shimLog(t, 1<<20, 2)
	ended := make(chan struct{})
	io.WriteString(w, "first\nbefore\n") // its absence is seen below
	all, allDone := follow(t, path, -1, ended)
	for _, text := range []string{"first", "before"} {
		if got := next(t, all); got != text {
			t.Fatalf("got %q, want %q", got, text)
		}
	}
	lines, done := follow(t, path, 1, ended)
	if got := next(t, lines); got != "before" {
		t.Fatalf("got %q", got)
	}
	for _, text := range []string{"while", "last"} {
		io.WriteString(w, text+"\n")
		if got := next(t, lines); got != text {
			t.Fatalf("got %q, want %q", got, text)
		}
		if got := next(t, all); got != text {
			t.Fatalf("all: got %q, want %q", got, text)
		}
	}
	io.WriteString(w, "very last\n")
	w.Close()
	written()
	close(ended)
	for _, f := range []struct {
		lines <-chan string
		done  <-chan error
	}{{lines, done}, {all, allDone}} {
		if got := next(t, f.lines); got != "very last" {
			t.Errorf("got %q", got)
		}
		if err := <-f.done; err != nil {
			t.Error(err)
		}
		if s, ok := <-f.lines; ok {
			t.Errorf("more: %q", s)
		}
	}
}

// TestFollowOverRotations sees every line once and in order while the log is rotated some eighty times.
func TestFollowOverRotations(t *testing.T) {
	const count = 500000
	path, w, written := shimLog(t, 64<<10, 1000)
	ended := make(chan struct{})
	lines, done := follow(t, path, -1, ended)
	go func() {
		b := bufio.NewWriterSize(w, 8000)
		for i := range count {
			fmt.Fprintf(b, "line %d\n", i)
		}
		b.Flush()
		w.Close()
		written()
		close(ended)
	}()
	for i := range count {
		if got := next(t, lines); got != fmt.Sprintf("line %d", i) {
			t.Fatalf("got %q, want line %d", got, i)
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	numbers, err := logNumbers(path)
	if err != nil || len(numbers) < 50 {
		t.Errorf("only %d files, %v", len(numbers), err)
	}
}

// TestFollowTooSlowly: who reads slower than the files go misses some lines, but neither their order nor the end.
func TestFollowTooSlowly(t *testing.T) {
	path, w, written := shimLog(t, 64<<10, 2)
	io.WriteString(w, "begin\n")
	ended := make(chan struct{})
	lines, done := follow(t, path, -1, ended)
	if got := next(t, lines); got != "begin" {
		t.Fatalf("got %q", got)
	}
	for i := range 100000 {
		fmt.Fprintf(w, "line %06d\n", i)
	}
	w.Close()
	written()
	close(ended)
	last := ""
	for s := range lines {
		if s <= last {
			t.Fatalf("%q after %q", s, last)
		}
		last = s
	}
	if last != "line 099999" {
		t.Errorf("it ended with %q", last)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestTail(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "c1.log")
	long := strings.Repeat("x", 200<<10) // longer than what is looked at at a time
	for name, text := range map[string]string{
		"c1.log.10":       "1\n2\n",
		"c1.log.2":        "3\n4 begins, ",
		"c1.log.1":        "4 ends\n" + long + "\n",
		"c1.log":          "5\n6",
		"c1.log.x":        "not ours\n",
		"c1.log.1.log":    "another's\n",
		"c1.log.01":       "not ours\n",
		"another.log":     "another's\n",
		"c1.logs":         "not ours\n",
		"xc1.log":         "another's\n",
		"c1.log.1.log.1":  "another's\n",
		"c1.log.-1":       "not ours\n",
		"c1.log.99999999": "",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all := "1\n2\n3\n4 begins, 4 ends\n" + long + "\n5\n6"
	for n, want := range map[int]string{
		-1: all, 0: "", 1: "6", 2: "5\n6", 3: long + "\n5\n6", 4: "4 begins, 4 ends\n" + long + "\n5\n6",
		5: "3\n4 begins, 4 ends\n" + long + "\n5\n6", 6: "2\n3\n4 begins, 4 ends\n" + long + "\n5\n6", 7: all, 100: all,
	} {
		var got bytes.Buffer
		if err := CopyLog(t.Context(), &got, path, LogStart{Tail: n}, nil); err != nil || got.String() != want {
			t.Errorf("the last %d lines: %d bytes, want %d: %v", n, got.Len(), len(want), err)
		}
	}
	if err := removeLog(path); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 8 {
		t.Errorf("left %v, %v", left, err)
	}
	if err := CopyLog(t.Context(), io.Discard, path, LogStart{Tail: -1}, nil); !errors.Is(err, ErrNoLog) {
		t.Errorf("a log that isn't there: %v", err)
	}
	if err := removeLog(filepath.Join(dir, "none", "x.log")); err != nil {
		t.Errorf("there is no directory: %v", err)
	}
}
