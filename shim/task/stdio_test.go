package task

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
)

func TestOutputThenExit(t *testing.T) {
	h := newHarness(t)
	text := strings.Repeat("line\n", 50)
	h.spec("echo", text, "7")
	r := h.createRequest()
	r.Stdout = h.fifo("stdout")
	got := collect(r.Stdout)
	_, err := h.Service.Create(t.Context(), r)
	h.must(err)
	h.start("")
	if w := h.wait(""); w.ExitStatus != 7 {
		t.Errorf("status %d", w.ExitStatus)
	}
	if s := <-got; s != text {
		t.Errorf("%d bytes of %d", len(s), len(text))
	}
}

// TestStdin sends 20 MB through an exec and back, and lets the client keep its end open.
func TestStdin(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	r := h.execRequest("e", "cat")
	r.Stdin, r.Stdout = h.fifo("stdin"), h.fifo("stdout")
	got := collect(r.Stdout)
	_, err := h.Service.Exec(t.Context(), r)
	h.must(err)
	h.start("e")
	data := make([]byte, 20<<20)
	rand.NewChaCha8([32]byte{1}).Read(data)
	in, err := os.OpenFile(r.Stdin, os.O_WRONLY, 0)
	h.must(err)
	defer in.Close()
	_, err = in.Write(data)
	h.must(err)
	_, err = h.CloseIO(t.Context(), &taskapi.CloseIORequest{ID: cid, ExecID: "e", Stdin: true})
	h.must(err)
	_, err = h.CloseIO(t.Context(), &taskapi.CloseIORequest{ID: cid, ExecID: "e", Stdin: true})
	h.must(err)
	if w := h.wait("e"); w.ExitStatus != 0 {
		t.Errorf("status %d", w.ExitStatus)
	}
	if sha256.Sum256([]byte(<-got)) != sha256.Sum256(data) {
		t.Error("not what was sent")
	}
}

// TestStdinReattach: clients come and go; only CloseIO is the end.
func TestStdinReattach(t *testing.T) {
	h := newHarness(t)
	h.spec("cat")
	r := h.createRequest()
	r.Stdin, r.Stdout = h.fifo("stdin"), h.fifo("stdout")
	got := collect(r.Stdout)
	_, err := h.Service.Create(t.Context(), r)
	h.must(err)
	h.start("")
	for _, word := range []string{"one ", "two ", "three"} {
		in, err := os.OpenFile(r.Stdin, os.O_WRONLY, 0)
		h.must(err)
		_, err = io.WriteString(in, word)
		h.must(err)
		in.Close()
	}
	_, err = h.CloseIO(t.Context(), &taskapi.CloseIORequest{ID: cid, Stdin: true})
	h.must(err)
	h.wait("")
	if s := <-got; s != "one two three" {
		t.Errorf("%q", s)
	}
}

// TestCloseIOBeforeStart: an exec whose input was closed before it ran reads its end.
func TestCloseIOBeforeStart(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	r := h.execRequest("e", "cat")
	r.Stdin = h.fifo("stdin")
	_, err := h.Service.Exec(t.Context(), r)
	h.must(err)
	_, err = h.CloseIO(t.Context(), &taskapi.CloseIORequest{ID: cid, ExecID: "e", Stdin: true})
	h.must(err)
	h.start("e")
	h.wait("e")
}

// TestBlockedReader: one whose reader stands still holds up neither the others nor, for long, its own exit.
func TestBlockedReader(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	stuck := h.execRequest("stuck", "spew", "10000000")
	stuck.Stdout = h.fifo("stuck")
	reader, err := os.OpenFile(stuck.Stdout, os.O_RDONLY|syscall.O_NONBLOCK, 0) // and never read from
	h.must(err)
	defer reader.Close()
	_, err = h.Service.Exec(t.Context(), stuck)
	h.must(err)
	h.start("stuck")

	fine := h.execRequest("fine", "spew", "8000000")
	fine.Stdout = h.fifo("fine")
	got := collect(fine.Stdout)
	_, err = h.Service.Exec(t.Context(), fine)
	h.must(err)
	h.start("fine")
	h.wait("fine")
	if n := len(<-got); n != 8000000 {
		t.Errorf("%d bytes beside a blocked reader", n)
	}

	began := time.Now()
	h.must(h.kill("stuck", syscall.SIGKILL))
	h.wait("stuck")
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the exit took %s", took)
	}
	_, err = h.delete("stuck")
	h.must(err)
}

// TestOutputKeptOpen: the exit is the process's, also when something else keeps its output.
func TestOutputKeptOpen(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	r := h.execRequest("e", "leave")
	r.Stdout = h.fifo("stdout")
	got := collect(r.Stdout)
	_, err := h.Service.Exec(t.Context(), r)
	h.must(err)
	h.start("e")
	began := time.Now()
	h.wait("e")
	<-got // the client's end comes, too
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
}

func TestFileOutput(t *testing.T) {
	h := newHarness(t)
	path := filepath.Join(t.TempDir(), "new", "log")
	for range 2 {
		h.spec("echo", "text\n", "0")
		r := h.createRequest()
		r.Stdout, r.Stderr = "file://"+path, "file://"+path
		_, err := h.Service.Create(t.Context(), r)
		h.must(err)
		h.start("")
		h.wait("")
		_, err = h.delete("")
		h.must(err)
	}
	b, err := os.ReadFile(path)
	h.must(err)
	if string(b) != "text\ntext\n" {
		t.Errorf("%q", b)
	}
}

// TestSlowReader gets everything although the exit doesn't wait for it.
func TestSlowReader(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	r := h.execRequest("e", "spew", "300000") // more than the fifo holds, less than the stream's window
	r.Stdout = h.fifo("stdout")
	reader, err := os.OpenFile(r.Stdout, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	h.must(err)
	defer reader.Close()
	_, err = h.Service.Exec(t.Context(), r)
	h.must(err)
	h.start("e")
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.Service.Wait(context.Background(), &taskapi.WaitRequest{ID: cid, ExecID: "e"}) // looked at below
	}()
	var got bytes.Buffer
	part := make([]byte, 20000)
	for {
		n, err := reader.Read(part)
		got.Write(part[:n])
		if err == io.EOF {
			break
		}
		h.must(err)
		time.Sleep(80 * time.Millisecond) // in all longer than the drain's limit
	}
	<-done
	if got.Len() != 300000 {
		t.Errorf("%d bytes", got.Len())
	}
}
