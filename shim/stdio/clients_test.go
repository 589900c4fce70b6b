package stdio

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

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
