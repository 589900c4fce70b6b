package stdio

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// pipe is a stream whose other end the test holds.
type pipe struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

func (p *pipe) CloseWrite() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

func newPipe(t *testing.T) (*pipe, net.Conn) {
	t.Helper()
	a, b := net.Pipe()
	t.Cleanup(func() { a.Close(); b.Close() })
	return &pipe{Conn: a, closed: make(chan struct{})}, b
}

func fifo(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func owner(t *testing.T) Owner {
	return Owner{
		ID:        "box",
		Namespace: "testing",
		Log:       slog.New(slog.NewTextHandler(t.Output(), nil)),
		Timeout:   func(d time.Duration) time.Duration { return d },
	}
}

func open(t *testing.T, c Config) *IO {
	t.Helper()
	s, err := Open(t.Context(), c, owner(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// within fails the test if f takes longer.
func within(t *testing.T, limit time.Duration, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(limit):
		t.Fatalf("%s took more than %s", what, limit)
	}
}

// TestOpenWaitsForNobody: fifos without a client open at once.
func TestOpenWaitsForNobody(t *testing.T) {
	within(t, time.Second, "open", func() {
		open(t, Config{Stdin: fifo(t), Stdout: fifo(t), Stderr: "fifo://" + fifo(t)})
	})
}

// TestReaderComesAndGoes: a reader that leaves neither kills anyone nor loses what comes after.
func TestReaderComesAndGoes(t *testing.T) {
	path := fifo(t)
	s := open(t, Config{Stdout: path})
	near, far := newPipe(t)
	s.Attach(Streams{Stdout: near})
	for _, word := range []string{"one", "two"} {
		r, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(far, word); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 3)
		if _, err := io.ReadFull(r, got); err != nil || string(got) != word {
			t.Fatalf("%q, %v", got, err)
		}
		r.Close()
	}
	if _, err := io.WriteString(far, "three"); err != nil { // nobody reads
		t.Fatal(err)
	}
	r, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	far.Close()
	s.Drain(time.Second)
	b, err := io.ReadAll(r)
	if err != nil || string(b) != "three" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestDrainIsBounded: neither an open stream nor a full fifo holds an exit longer than the limit.
func TestDrainIsBounded(t *testing.T) {
	path := fifo(t)
	reader, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	s := open(t, Config{Stdout: path, Stderr: fifo(t)})
	out, farOut := newPipe(t)
	err1, _ := newPipe(t)
	s.Attach(Streams{Stdout: out, Stderr: err1})
	go farOut.Write(make([]byte, 1<<20)) // it is cut off
	within(t, 2*time.Second, "drain", func() { s.Drain(100 * time.Millisecond) })
}

// TestCloseStdinAfterData: the end comes after all that was written, also when the reader is slow and the client stays.
func TestCloseStdinAfterData(t *testing.T) {
	path := fifo(t)
	s := open(t, Config{Stdin: path})
	near, far := newPipe(t)
	s.Attach(Streams{Stdin: near})
	w, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	data := bytes.Repeat([]byte("0123456789"), 20000)
	var got bytes.Buffer
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 1000)
		for got.Len() < len(data) {
			n, err := far.Read(buf)
			got.Write(buf[:n])
			if err != nil {
				return
			}
		}
	}()
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	within(t, time.Second, "CloseStdin", s.CloseStdin)
	s.CloseStdin()
	within(t, 5*time.Second, "reading", func() { <-read })
	within(t, time.Second, "the end", func() { <-near.closed })
	if !bytes.Equal(got.Bytes(), data) {
		t.Errorf("%d bytes of %d", got.Len(), len(data))
	}
}

// TestCloseStdinOfABlockedProcess returns although the process reads nothing.
func TestCloseStdinOfABlockedProcess(t *testing.T) {
	path := fifo(t)
	s := open(t, Config{Stdin: path})
	near, _ := newPipe(t)
	s.Attach(Streams{Stdin: near})
	w, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Write(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	within(t, time.Second, "CloseStdin", s.CloseStdin)
	within(t, time.Second, "Drain", func() { s.Drain(100 * time.Millisecond) })
}

// TestProcessStopsReading: clients learn it by EPIPE instead of filling a fifo that nobody reads.
func TestProcessStopsReading(t *testing.T) {
	path := fifo(t)
	s := open(t, Config{Stdin: path})
	near, far := newPipe(t)
	s.Attach(Streams{Stdin: near})
	w, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	far.Close()
	within(t, 5*time.Second, "EPIPE", func() {
		for {
			if _, err := w.Write(make([]byte, 1000)); err != nil {
				return
			}
		}
	})
}

func TestSameSink(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	s := open(t, Config{Stdout: "file://" + path, Stderr: "file://" + path})
	out, farOut := newPipe(t)
	errs, farErrs := newPipe(t)
	s.Attach(Streams{Stdout: out, Stderr: errs})
	for _, far := range []net.Conn{farOut, farErrs} {
		if _, err := io.WriteString(far, "text\n"); err != nil {
			t.Fatal(err)
		}
		far.Close()
	}
	s.Drain(time.Second)
	b, err := os.ReadFile(path)
	if err != nil || string(b) != "text\ntext\n" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestTerminalHasNoStderr(t *testing.T) {
	s := open(t, Config{Stdout: fifo(t), Stderr: "/nowhere", Terminal: true})
	if s.stderr != nil {
		t.Error("stderr was opened")
	}
}

func TestNothing(t *testing.T) {
	s := open(t, Config{})
	s.Attach(Streams{})
	s.CloseStdin()
	within(t, time.Second, "drain", func() { s.Drain(10 * time.Second) })
}

func TestRefused(t *testing.T) {
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), Config{Stdin: "binary:///bin/cat"}, owner(t)); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a log binary as stdin: %v", err)
	}
	for uri, says := range map[string]string{
		"ttrpc+unix:///run/x?streaming_id=1": "ttrpc+unix",
		"fifo://relative":                    "absolute",
		"file://":                            "absolute",
		"%zz://x":                            "not a URI",
		plain:                                "not a fifo",
		filepath.Join(t.TempDir(), "missing", "one"): "no such file",
	} {
		s, err := Open(t.Context(), Config{Stdout: uri}, owner(t))
		if err == nil {
			s.Close()
			t.Errorf("%s was accepted", uri)
			continue
		}
		if !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", uri, err)
		}
		if says != "no such file" && !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v is not InvalidArgument", uri, err)
		}
	}
}
