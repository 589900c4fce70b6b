package stdio

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// host is a channel's host end, with the guest's end to take streams from.
type host struct {
	*mux.Session
	guest *mux.Session
	next  uint32
}

func newHost(t *testing.T) *host {
	t.Helper()
	h, g := net.Pipe()
	sessions := make(chan *mux.Session, 1)
	go func() { _ = mux.Serve(g, func(s *mux.Session) { sessions <- s }) }()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	s, err := mux.Connect(ctx, h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = s.Close(), g.Close() })
	return &host{Session: s, guest: <-sessions, next: 2}
}

// stream makes a stream; every wait on its host end is bounded.
func (h *host) stream(t *testing.T) (ours, theirs *mux.Stream) {
	t.Helper()
	ours, err := h.Open(h.next)
	if err != nil {
		t.Fatal(err)
	}
	_ = ours.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := h.Control().Write([]byte{0}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(h.guest.Control(), make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if theirs, err = h.guest.Take(h.next); err != nil {
		t.Fatal(err)
	}
	h.next++
	return ours, theirs
}

// start runs a script with its standard streams coupled.
func start(t *testing.T, p *Process, script string) *exec.Cmd {
	t.Helper()
	c := exec.Command("/bin/sh", "-c", script)
	files := p.Files()
	for i, set := range []func(*os.File){
		func(f *os.File) { c.Stdin = f }, func(f *os.File) { c.Stdout = f }, func(f *os.File) { c.Stderr = f },
	} {
		if files[i] != nil {
			set(files[i])
		}
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	p.Start()
	return c
}

func finish(t *testing.T, c *exec.Cmd, p *Process) {
	t.Helper()
	_ = c.Wait()
	p.Ended()
	done := make(chan struct{})
	go func() { p.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("copying didn't end")
	}
}

func TestRoundTrip(t *testing.T) {
	h := newHost(t)
	in, gin := h.stream(t)
	out, gout := h.stream(t)
	errs, gerr := h.stream(t)
	p, err := Pipes(Streams{In: gin, Out: gout, Err: gerr}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := start(t, p, "cat; echo done >&2")
	want := bytes.Repeat([]byte("0123456789abcde\n"), 20<<20/16)
	go func() {
		_, _ = in.Write(want)
		_ = in.CloseWrite()
	}()
	got, err := io.ReadAll(out)
	if !bytes.Equal(got, want) || err != nil {
		t.Errorf("got %d of %d bytes, %v", len(got), len(want), err)
	}
	if b, err := io.ReadAll(errs); string(b) != "done\n" || err != nil {
		t.Errorf("standard error: %q, %v", b, err)
	}
	finish(t, c, p)
}

// All that a process has written is sent, also when it has ended long before the host reads, and also when another
// process keeps the pipe open and goes on writing to it.
func TestDrainOfAnEndedProcess(t *testing.T) {
	const size = 200_000 // less than a pipe holds
	for name, script := range map[string]string{
		"alone":               "head -c 200000 /dev/zero",
		"grandchild silent":   "sleep 60 & echo $! >&2; head -c 200000 /dev/zero",
		"grandchild chatting": "head -c 200000 /dev/zero; (while echo x; do :; done; echo gone >&2) & echo $! >&2",
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			out, gout := h.stream(t)
			p, err := Pipes(Streams{Out: gout}, nil)
			if err != nil {
				t.Fatal(err)
			}
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			p.theirs[2] = w
			c := start(t, p, script)
			_ = c.Wait()
			p.Ended()
			got, err := io.ReadAll(out)
			if len(got) < size || len(got) > size+2*pipeSize+mux.Window || err != nil {
				t.Errorf("got %d bytes, %v", len(got), err)
			}
			finish(t, c, p)
			if name == "grandchild silent" {
				b := make([]byte, 20)
				n, _ := r.Read(b)
				pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n])))
				if err != nil {
					t.Fatal(err)
				}
				_ = unix.Kill(pid, unix.SIGKILL)
			}
			if name == "grandchild chatting" { // it must have been told
				_ = r.SetReadDeadline(time.Now().Add(30 * time.Second))
				if b, err := io.ReadAll(r); err != nil {
					t.Errorf("the grandchild still writes: %q, %v", b, err)
				}
			}
			_ = r.Close()
		})
	}
}

// A host that reads slowly slows the process down; nothing is lost, and its error stream isn't held up.
func TestBackPressure(t *testing.T) {
	h := newHost(t)
	out, gout := h.stream(t)
	errs, gerr := h.stream(t)
	p, err := Pipes(Streams{Out: gout, Err: gerr}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := start(t, p, "(head -c 3000000 /dev/zero; echo all written >&2) & echo beside >&2; wait")
	b := make([]byte, len("beside\n"))
	if _, err := io.ReadFull(errs, b); string(b) != "beside\n" || err != nil {
		t.Fatalf("%q, %v", b, err)
	}
	_ = errs.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	if n, err := errs.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("nobody reads, yet the process wrote all (%q, %v)", b[:n], err)
	}
	_ = errs.SetReadDeadline(time.Time{})
	if n, err := io.Copy(io.Discard, out); n != 3_000_000 || err != nil {
		t.Errorf("read %d bytes, %v", n, err)
	}
	finish(t, c, p)
}

func TestEndOfInput(t *testing.T) {
	h := newHost(t)
	out, gout := h.stream(t)
	p, err := Pipes(Streams{Out: gout}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := start(t, p, "cat; echo no input") // without a stream: empty
	if b, err := io.ReadAll(out); string(b) != "no input\n" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	finish(t, c, p)
}

// A process that doesn't read lets the host know, and its end doesn't wait for input.
func TestInputThatNobodyReads(t *testing.T) {
	h := newHost(t)
	in, gin := h.stream(t)
	p, err := Pipes(Streams{In: gin}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := start(t, p, "exec <&-; sleep 60")
	for err = nil; err == nil; {
		_, err = in.Write(make([]byte, 10_000))
	}
	if !errors.Is(err, mux.ErrReset) {
		t.Errorf("writing to a process that closed its input: %v", err)
	}
	_ = c.Process.Kill()
	finish(t, c, p)

	in, gin = h.stream(t)
	if p, err = Pipes(Streams{In: gin}, nil); err != nil {
		t.Fatal(err)
	}
	c = start(t, p, "sleep 60")
	stuck := make(chan error)
	go func() {
		_, err := in.Write(make([]byte, 10<<20))
		stuck <- err
	}()
	_ = c.Process.Kill()
	finish(t, c, p)
	if err := <-stuck; !errors.Is(err, mux.ErrReset) {
		t.Errorf("writing to a process that ended: %v", err)
	}
}

// A host that gives output up makes the process's next write fail; a host that is gone makes it vanish.
func TestOutputThatNobodyReads(t *testing.T) {
	const script = "while echo x; do :; done 2>/dev/null; exit 3"
	h := newHost(t)
	out, gout := h.stream(t)
	p, err := Pipes(Streams{Out: gout}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := start(t, p, "trap '' PIPE; "+script)
	_ = out.Close()
	_ = c.Wait()
	if code := c.ProcessState.ExitCode(); code != 3 {
		t.Errorf("ended with %d, want 3 after a failed write", code)
	}
	finish(t, c, p)

	_, gout = h.stream(t)
	_, gin := h.stream(t)
	if p, err = Pipes(Streams{In: gin, Out: gout}, nil); err != nil {
		t.Fatal(err)
	}
	c = start(t, p, "head -c 5000000 /dev/zero; read x && exit 1; exit 2")
	_ = h.Close()
	ended := make(chan struct{})
	go func() {
		_ = c.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		t.Errorf("%v, although neither its output nor its input has ended", c.ProcessState)
	case <-time.After(300 * time.Millisecond):
	}
	_ = c.Process.Kill()
	<-ended
	finish(t, c, p)
}

func TestTerminal(t *testing.T) {
	h := newHost(t)
	in, gin := h.stream(t)
	out, gout := h.stream(t)
	p := Terminal(Streams{In: gin, Out: gout}, nil)
	master, slave := openTerminal(t)
	p.Attach(master)
	c := exec.Command("/bin/sh", "-c", "stty size; read line; echo got $line; head -c 100000 /dev/zero | tr '\\0' x")
	c.Stdin, c.Stdout, c.Stderr = slave, slave, slave
	c.SysProcAttr = &unix.SysProcAttr{Setsid: true, Setctty: true}
	if err := p.Resize(99, 33); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	_ = slave.Close()
	p.Start()
	if _, err := in.Write([]byte("hello\n")); err != nil {
		t.Fatal(err)
	}
	_ = in.CloseWrite()
	b, err := io.ReadAll(out)
	if err != nil || !bytes.Contains(b, []byte("33 99\r\n")) || !bytes.Contains(b, []byte("got hello\r\n")) || bytes.Count(b, []byte("x")) != 100000 {
		t.Errorf("%d bytes: %.60q, %v", len(b), b, err)
	}
	finish(t, c, p)
	if err := p.Resize(1, 1); err != nil {
		t.Errorf("resize after the end: %v", err)
	}
}

// openTerminal returns the master as a runtime's console socket would bring it.
func openTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), "terminal"), slave
}

func TestAbandon(t *testing.T) {
	h := newHost(t)
	in, gin := h.stream(t)
	out, gout := h.stream(t)
	p, err := Pipes(Streams{In: gin, Out: gout}, nil)
	if err != nil {
		t.Fatal(err)
	}
	p.Abandon()
	if b, err := io.ReadAll(out); len(b) != 0 || err != nil {
		t.Errorf("read %q, %v", b, err)
	}
	for err = nil; err == nil; {
		_, err = in.Write(make([]byte, 1000))
	}
	if !errors.Is(err, mux.ErrReset) {
		t.Error(err)
	}
}
