package stdio

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
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

// descriptors counts this process's.
func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestDoesNotLeakPipes: whatever becomes of a process, its stdio leaves no descriptor.
func TestDoesNotLeakPipes(t *testing.T) {
	dir := t.TempDir()
	configs := []Config{
		{Stdin: fifo(t), Stdout: fifo(t), Stderr: fifo(t)},
		{Stdin: fifo(t), Stdout: fifo(t), Terminal: true},
		{Stdout: "file://" + dir + "/log?max-size=1MiB", Stderr: "file://" + dir + "/log?max-size=1MiB"},
		{Stdout: logBinary(schemeBinary, dir, ":"), Stderr: logBinary(schemeBinaryV2, dir, "echo >&5; cat <&4")},
	}
	round := func() {
		for _, c := range configs {
			for _, attach := range []bool{false, true} {
				s := open(t, c)
				if attach {
					out, farOut := newPipe(t)
					in, farIn := newPipe(t)
					s.Attach(Streams{Stdin: in, Stdout: out})
					go io.WriteString(farOut, "text")
					farIn.Close()
					s.Drain(10 * time.Millisecond)
				}
				within(t, 10*time.Second, "close", s.Close)
			}
			c.Stderr = "/nowhere"
			c.Terminal = false
			if s, err := Open(t.Context(), c, owner(t)); err == nil {
				s.Close()
				t.Errorf("%+v was accepted", c)
			}
		}
	}
	round() // Go's poller has descriptors of its own, from the first use on
	before := descriptors(t)
	for range 5 {
		round()
	}
	// A reader that was told of the end by a close may still be about to let go of it.
	deadline := time.Now().Add(10 * time.Second)
	for descriptors(t) > before && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// TestNeverStarted: the end of the input and of everything comes at once for a process that there never was.
func TestNeverStarted(t *testing.T) {
	in, out := fifo(t), fifo(t)
	s := open(t, Config{Stdin: in, Stdout: out})
	r, err := os.OpenFile(out, os.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	within(t, time.Second, "CloseStdin", s.CloseStdin)
	within(t, time.Second, "Close", s.Close)
	if b, err := io.ReadAll(r); err != nil || len(b) > 0 {
		t.Errorf("%q, %v", b, err)
	}
}

// TestStdinReattach: clients come and go; the process sees no end until CloseStdin.
func TestStdinReattach(t *testing.T) {
	path := fifo(t)
	s := open(t, Config{Stdin: path})
	near, far := newPipe(t)
	s.Attach(Streams{Stdin: near})
	for _, word := range []string{"one", "two"} {
		w, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, word); err != nil {
			t.Fatal(err)
		}
		w.Close()
		got := make([]byte, len(word))
		if _, err := io.ReadFull(far, got); err != nil || string(got) != word {
			t.Fatalf("%q, %v", got, err)
		}
		select {
		case <-near.closed:
			t.Fatal("a client that leaves is taken for the end")
		default:
		}
	}
	s.CloseStdin()
	within(t, 5*time.Second, "the end", func() { <-near.closed })
}

// TestStoppedReader: one that is stopped for a while gets everything, and holds up nobody else.
func TestStoppedReader(t *testing.T) {
	path, other := fifo(t), fifo(t)
	s := open(t, Config{Stdout: path, Stderr: other})
	out, farOut := newPipe(t)
	errs, farErrs := newPipe(t)
	s.Attach(Streams{Stdout: out, Stderr: errs})
	cat := exec.Command("cat", path)
	var got bytes.Buffer
	cat.Stdout = &got
	if err := cat.Start(); err != nil {
		t.Fatal(err)
	}
	defer cat.Process.Kill() // in vain, if all went well
	if _, err := io.WriteString(farOut, "begin"); err != nil {
		t.Fatal(err)
	}
	if err := cat.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("0123456789"), 50000) // more than pipes hold
	written := make(chan struct{})
	go func() {
		defer close(written)
		farOut.Write(data) // what arrives is looked at below
		farOut.Close()
	}()
	collected := make(chan int)
	go func() {
		r, err := os.Open(other)
		if err != nil {
			t.Error(err)
		}
		n, _ := io.Copy(io.Discard, r)
		r.Close()
		collected <- int(n)
	}()
	within(t, 5*time.Second, "the other stream", func() {
		farErrs.Write(data) // likewise
		farErrs.Close()
	})
	select {
	case <-written:
		t.Error("nothing held it up")
	default:
	}
	if err := cat.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	within(t, 10*time.Second, "the rest", func() {
		<-written
		s.Drain(5 * time.Second)
		cat.Wait() // by its end
	})
	if want := "begin" + string(data); got.String() != want {
		t.Errorf("%d bytes of %d", got.Len(), len(want))
	}
	if n := <-collected; n != len(data) {
		t.Errorf("the other stream: %d bytes of %d", n, len(data))
	}
}

// TestFifoIsDeleted: those who have it open go on.
func TestFifoIsDeleted(t *testing.T) {
	path := fifo(t)
	s := open(t, Config{Stdout: path})
	near, far := newPipe(t)
	s.Attach(Streams{Stdout: near})
	r, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(path, 0o600); err != nil { // a client that makes what it misses gets a fifo of its own
		t.Fatal(err)
	}
	if _, err := io.WriteString(far, "text"); err != nil {
		t.Fatal(err)
	}
	far.Close()
	s.Drain(time.Second)
	if b, err := io.ReadAll(r); err != nil || string(b) != "text" {
		t.Errorf("%q, %v", b, err)
	}
}
