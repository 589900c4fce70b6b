package stdio

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// most is more than what window and buffers of a stream hold, and so reaches into the pipe, however small that is.
const most = mux.Window + 64<<10 + 5<<10

// coupled is a process that the test itself is: its ends of the pipes.
type coupled struct {
	*Process
	stdin, stdout *os.File
	thaw          chan struct{}
}

// couple couples the test with streams of a host. Its work is at rest until thaw is closed.
func couple(t *testing.T, s Streams) *coupled {
	t.Helper()
	c := &coupled{thaw: make(chan struct{})}
	p, err := Pipes(s, func() <-chan struct{} { return c.thaw })
	if err != nil {
		t.Fatal(err)
	}
	c.Process = p
	for i, into := range []**os.File{&c.stdin, &c.stdout} {
		fd, err := unix.Dup(int(p.Files()[i].Fd()))
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "pipe")
		_ = f.SetDeadline(time.Now().Add(30 * time.Second))
		*into = f
		t.Cleanup(func() { _ = f.Close() })
	}
	p.Start()
	t.Cleanup(p.Ended)
	return c
}

// leave ends the host's session after holding it, as a save of its machine would, and returns what has come over a
// stream until then.
func (h *host) leave(t *testing.T, st *mux.Stream) []byte {
	t.Helper()
	if err := h.Hold(testContext(t)); err != nil {
		t.Fatal(err)
	}
	h.Abort(errors.New("the machine is gone"))
	<-h.guest.Done()
	b, _ := io.ReadAll(st) // ends with the session's error
	return b
}

func pair(t *testing.T, h *host) (in, out *mux.Stream, s Streams) {
	t.Helper()
	in, gin := h.stream(t)
	out, gout := h.stream(t)
	return in, out, Streams{In: gin, Out: gout}
}

// read reads n bytes.
func read(t *testing.T, r io.Reader, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		t.Fatal(err)
	}
	return b
}

// What was on its way when a machine was saved is no business of a clone's, wherever it had got to. What comes after is.
func TestReplaceDropsWhatWasOnItsWay(t *testing.T) {
	for _, size := range []int{0, 1, 100 << 10, most} {
		h := newHost(t)
		in, out, s := pair(t, h)
		p := couple(t, s)
		if _, err := p.stdout.Write(make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		if _, err := in.Write(make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		h.leave(t, out)
		h2 := newHost(t)
		in, out, s = pair(t, h2)
		if err := p.Replace(testContext(t), s, false); err != nil {
			t.Fatal(err)
		}
		close(p.thaw)
		if _, err := p.stdout.WriteString("new"); err != nil {
			t.Fatal(err)
		}
		if got := read(t, out, 3); string(got) != "new" {
			t.Errorf("after %d bytes %q came", size, got)
		}
		if size > 0 {
			continue // of the old input, some is in the process's pipe
		}
		if _, err := in.Write([]byte("input")); err != nil {
			t.Fatal(err)
		}
		if got := read(t, p.stdin, 5); string(got) != "input" {
			t.Errorf("the process read %q", got)
		}
		_ = in.CloseWrite()
		if n, err := p.stdin.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("after the end of input: %d, %v", n, err)
		}
	}
}

// A machine that goes on in place of the saved one loses nothing and says nothing twice.
func TestReplaceGoesOn(t *testing.T) {
	for _, size := range []int{0, 1, 100 << 10, most} {
		h := newHost(t)
		in, out, s := pair(t, h)
		p := couple(t, s)
		written := make([]byte, size)
		_, _ = rand.NewChaCha8([32]byte{byte(size)}).Read(written) // never fails
		if _, err := p.stdout.Write(written); err != nil {
			t.Fatal(err)
		}
		sent := written[:min(size, 200<<10)]
		if _, err := in.Write(sent); err != nil {
			t.Fatal(err)
		}
		got := h.leave(t, out)
		sent = sent[:len(sent)-len(in.Unsent())]
		h2 := newHost(t)
		in, out, s = pair(t, h2)
		if err := p.Replace(testContext(t), s, true); err != nil {
			t.Fatal(err)
		}
		close(p.thaw)
		if _, err := p.stdout.WriteString("new"); err != nil {
			t.Fatal(err)
		}
		if got = append(got, read(t, out, size+3-len(got))...); !bytes.Equal(got, append(written, "new"...)) {
			t.Errorf("of %d bytes %d came, or others", size+3, len(got))
		}
		if _, err := in.Write([]byte("input")); err != nil {
			t.Fatal(err)
		}
		if got := read(t, p.stdin, len(sent)+5); !bytes.Equal(got, append(sent[:len(sent):len(sent)], "input"...)) {
			t.Errorf("of %d bytes of input others came", len(sent)+5)
		}
	}
}

// Without another host the output vanishes when the work goes on, and no earlier.
func TestNobodyReplaces(t *testing.T) {
	h := newHost(t)
	_, out, s := pair(t, h)
	p := couple(t, s)
	if _, err := p.stdout.Write(make([]byte, most)); err != nil {
		t.Fatal(err)
	}
	h.leave(t, out)
	_ = p.stdout.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	if n, err := p.stdout.Write(make([]byte, 1<<20)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("at rest, %d bytes were taken, %v", n, err)
	}
	close(p.thaw)
	_ = p.stdout.SetWriteDeadline(time.Now().Add(30 * time.Second))
	if _, err := p.stdout.Write(make([]byte, 1<<20)); err != nil {
		t.Error(err)
	}
	// Who comes even later gets what is written then.
	h2 := newHost(t)
	_, out, s = pair(t, h2)
	if err := p.Replace(testContext(t), s, false); err != nil {
		t.Fatal(err)
	}
	if _, err := p.stdout.WriteString("late"); err != nil {
		t.Fatal(err)
	}
	read(t, out, 4)
}

// A host can replace streams that it still has, read or not; the last one counts.
func TestReplaceOfLiveStreams(t *testing.T) {
	h := newHost(t)
	_, first, s := pair(t, h)
	p := couple(t, s)
	if _, err := p.stdout.Write(make([]byte, most)); err != nil {
		t.Fatal(err)
	}
	var out *mux.Stream
	for range 3 {
		_, out, s = pair(t, h)
		if err := p.Replace(testContext(t), s, false); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.stdout.WriteString("new"); err != nil {
		t.Fatal(err)
	}
	read(t, out, 3)
	if _, err := io.Copy(io.Discard, first); err != nil {
		t.Errorf("the first stream ended with %v", err)
	}
}

// Streams that a process has no use for end at once: it never had one, has closed it, or has ended.
func TestReplaceOfNothing(t *testing.T) {
	ends := func(what string, st *mux.Stream) {
		t.Helper()
		if n, err := st.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("%s: %d, %v", what, n, err)
		}
	}
	h := newHost(t)
	_, gout := h.stream(t)
	p, err := Pipes(Streams{Out: gout}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := start(t, p, "exec >&-; read x </dev/zero")
	defer func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	}()
	<-p.outputs[0].done
	in, out, s := pair(t, h)
	errs, gerr := h.stream(t)
	s.Err = gerr
	if err := p.Replace(testContext(t), s, false); err != nil {
		t.Fatal(err)
	}
	ends("input of a process without", in)
	ends("closed output", out)
	ends("error output of a process without", errs)
	_ = c.Process.Kill()
	finish(t, c, p)
	in, out, s = pair(t, h)
	if err := p.Replace(testContext(t), s, false); !errors.Is(err, ErrEnded) {
		t.Errorf("of an ended process: %v", err)
	}
	ends("input of an ended process", in)
	ends("output of an ended process", out)
}

// What an ended process has left in its pipe goes to the new host, if all goes on.
func TestReplaceBeforeTheEnd(t *testing.T) {
	h := newHost(t)
	_, out, s := pair(t, h)
	p := couple(t, s)
	if _, err := p.stdout.Write(make([]byte, most)); err != nil {
		t.Fatal(err)
	}
	got := len(h.leave(t, out))
	h2 := newHost(t)
	_, out, s = pair(t, h2)
	if err := p.Replace(testContext(t), s, true); err != nil {
		t.Fatal(err)
	}
	p.Ended()
	n, err := io.Copy(io.Discard, out)
	if got += int(n); got != most || err != nil {
		t.Errorf("%d bytes came, %v", got, err)
	}
}

func TestReplaceOfATerminal(t *testing.T) {
	for _, goesOn := range []bool{false, true} {
		h := newHost(t)
		_, theirs := h.stream(t)
		thaw := make(chan struct{})
		p := Terminal(Streams{In: theirs, Out: theirs}, func() <-chan struct{} { return thaw })
		master, slave := openTerminal(t)
		p.Attach(master)
		p.Start()
		if _, err := slave.WriteString("old"); err != nil {
			t.Fatal(err)
		}
		h.Abort(errors.New("the machine is gone"))
		<-h.guest.Done()
		h2 := newHost(t)
		ours, theirs := h2.stream(t)
		if err := p.Replace(testContext(t), Streams{In: theirs, Out: theirs}, goesOn); err != nil {
			t.Fatal(err)
		}
		close(thaw)
		if _, err := ours.Write([]byte("typed\n")); err != nil {
			t.Fatal(err)
		}
		if got := read(t, slave, 6); string(got) != "typed\n" {
			t.Errorf("the process read %q", got)
		}
		_ = slave.Close()
		p.Ended()
		p.Wait()
	}
}
