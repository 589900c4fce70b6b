package stdio

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// logBinary is the URI of a shell script. $0 is a directory for its files.
func logBinary(scheme, dir, script string) string {
	u := url.URL{Scheme: scheme, Path: "/bin/sh"}
	u.RawQuery = "-c=" + url.QueryEscape(script) + "&" + url.QueryEscape(dir) + "=" + "first&second=2+b&second=3"
	return u.String()
}

// slept scales deadlines, so that nobody has to wait for them.
func slept(t *testing.T, scale float64) Owner {
	o := owner(t)
	o.Timeout = func(d time.Duration) time.Duration { return time.Duration(float64(d) * scale) }
	return o
}

func read(t *testing.T, path ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// gone waits until a process, whose pid is in a file, has ended.
func gone(t *testing.T, path string) {
	t.Helper()
	pid, err := strconv.Atoi(strings.TrimSpace(read(t, path)))
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 10000)
		if err == unix.EINTR {
			continue
		}
		if n != 1 || err != nil {
			unix.Kill(pid, unix.SIGKILL)
			t.Errorf("process %d lives", pid)
		}
		return
	}
}

func TestLogBinary(t *testing.T) {
	// What the test was started with isn't stdio's fault.
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	for scheme, ready := range map[string]string{schemeBinary: "exec 5>&-", schemeBinaryV2: "echo >&5; exec 5>&-"} {
		t.Run(scheme, func(t *testing.T) {
			dir := t.TempDir()
			uri := logBinary(scheme, dir, `cd "$0"; printf '%s,' "$@" >args; env | sort >env; ls /proc/self/fd >fds; echo $(ps -o pgid= $$) $$ >group; `+
				ready+`; cat <&3 >out & cat <&4 >err & wait; sleep 0.2; echo flushed >>out`)
			s := open(t, Config{Stdout: uri, Stderr: uri})
			out, farOut := newPipe(t)
			errs, farErrs := newPipe(t)
			s.Attach(Streams{Stdout: out, Stderr: errs})
			text := strings.Repeat("text\n", 50000)
			io.WriteString(farOut, text)
			io.WriteString(farErrs, "error\n")
			farOut.Close()
			farErrs.Close()
			within(t, 10*time.Second, "drain", func() { s.Drain(10 * time.Second) })
			within(t, 10*time.Second, "close", s.Close)
			if got := read(t, dir, "out"); got != text+"flushed\n" {
				t.Errorf("stdout: %d bytes, ending %q", len(got), got[max(0, len(got)-20):])
			}
			if got := read(t, dir, "err"); got != "error\n" {
				t.Errorf("stderr: %q", got)
			}
			if got := read(t, dir, "args"); got != "first,second,2 b," {
				t.Errorf("arguments %q", got)
			}
			env := strings.Fields(read(t, dir, "env"))
			env = slices.DeleteFunc(env, func(e string) bool {
				return strings.HasPrefix(e, "PWD=") || strings.HasPrefix(e, "OLDPWD=") || strings.HasPrefix(e, "_=") || strings.HasPrefix(e, "SHLVL=")
			}) // the shell's own
			if !slices.Equal(env, []string{"CONTAINER_ID=box", "CONTAINER_NAMESPACE=testing"}) {
				t.Errorf("environment %q", env)
			}
			if got := strings.Fields(read(t, dir, "fds")); !slices.Equal(got, []string{"0", "1", "2", "3", "4", "5", "6"}) { // the last is ls's own
				t.Errorf("descriptors %q", got)
			}
			if group := strings.Fields(read(t, dir, "group")); len(group) != 2 || group[0] != group[1] {
				t.Errorf("process group, pid: %q", group)
			}
		})
	}
}

// TestLogBinaryFails: one that isn't ready is an error, and nothing of it is left.
func TestLogBinaryFails(t *testing.T) {
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	before := descriptors(t)
	for _, tc := range []struct{ name, uri, script, says string }{
		{name: "missing", uri: "binary:///nowhere/logger", says: "/nowhere/logger: no such file"},
		{name: "not executable", uri: "binary-v2://" + plain, says: "permission denied"},
		{name: "query", uri: "binary:///bin/sh?%zz", says: "query"},
		{name: "dies", script: "exit 3", says: "before it was ready"},
		{name: "closes", script: "exec 5>&-; sleep 1000", says: "before it was ready"},
		{name: "hangs", script: "trap '' TERM; sleep 1000", says: "not ready within"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			uri := tc.uri
			if uri == "" {
				uri = logBinary(schemeBinaryV2, dir, `cd "$0"; echo $$ >pid; `+tc.script)
			}
			s, err := Open(t.Context(), Config{Stdin: fifo(t), Stdout: uri, Stderr: uri}, slept(t, 0.05))
			if err == nil {
				s.Close()
				t.Fatal("no error")
			}
			if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), tc.says) || strings.Contains(err.Error(), "\n") {
				t.Error(err)
			}
			if tc.script != "" {
				gone(t, filepath.Join(dir, "pid"))
			}
		})
	}
	t.Run("cancelled", func(t *testing.T) {
		dir := t.TempDir()
		if err := unix.Mkfifo(filepath.Join(dir, "pid"), 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			os.ReadFile(filepath.Join(dir, "pid")) // it runs, then
			cancel()
		}()
		s, err := Open(ctx, Config{Stdout: logBinary(schemeBinaryV2, dir, `cd "$0"; echo $$ >pid; exec sleep 1000`)}, owner(t))
		if !errors.Is(err, context.Canceled) {
			s.Close()
			t.Error(err)
		}
	})
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// syncBuffer is written by goroutines that aren't the test's.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// TestLogBinaryDies: its output is discarded, the process goes on, and it is said once.
func TestLogBinaryDies(t *testing.T) {
	dir := t.TempDir()
	uri := logBinary(schemeBinary, dir, `exec 5>&-; head -c 5 <&3 >"$0/out"`)
	o := owner(t)
	var said syncBuffer
	o.Log = slog.New(slog.NewTextHandler(&said, nil))
	s, err := Open(t.Context(), Config{Stdout: uri, Stderr: uri}, o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	out, farOut := newPipe(t)
	errs, farErrs := newPipe(t)
	s.Attach(Streams{Stdout: out, Stderr: errs})
	within(t, 20*time.Second, "writing to nobody", func() {
		for range 100 {
			for _, far := range []io.Writer{farOut, farErrs} {
				if _, err := far.Write(bytes.Repeat([]byte("text\n"), 1000)); err != nil {
					t.Error(err)
				}
			}
		}
	})
	farOut.Close()
	farErrs.Close()
	within(t, 10*time.Second, "drain", func() { s.Drain(10 * time.Second) })
	if n := strings.Count(said.String(), "reads no more"); n != 1 {
		t.Errorf("said %d times: %s", n, said.String())
	}
	if got := read(t, dir, "out"); got != "text\n" {
		t.Errorf("%q", got)
	}
}

// TestLogBinaryHangs: one that reads nothing and ignores SIGTERM holds up its own stream only, and is killed in the end
// with its children.
func TestLogBinaryHangs(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "fine")
	s, err := Open(t.Context(), Config{
		Stdout: logBinary(schemeBinary, dir, `cd "$0"; trap '' TERM; echo $$ >pid; exec 5>&-; sh -c 'echo $$ >child; exec sleep 1000'; :`),
		Stderr: "file://" + path,
	}, slept(t, 0.05))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	out, farOut := newPipe(t)
	errs, farErrs := newPipe(t)
	s.Attach(Streams{Stdout: out, Stderr: errs})
	go farOut.Write(make([]byte, 1<<20)) // it is cut off
	within(t, 10*time.Second, "the other stream", func() {
		if _, err := farErrs.Write(make([]byte, 1<<20)); err != nil {
			t.Error(err)
		}
		farErrs.Close()
	})
	within(t, 5*time.Second, "drain", func() { s.Drain(200 * time.Millisecond) })
	within(t, 10*time.Second, "close", s.Close)
	gone(t, filepath.Join(dir, "pid"))
	gone(t, filepath.Join(dir, "child"))
	if fi, err := os.Stat(path); err != nil || fi.Size() != 1<<20 {
		t.Errorf("%+v, %v", fi, err)
	}
}

// TestLogBinaryIsTerminated: SIGTERM is for those that the end of their input doesn't end.
func TestLogBinaryIsTerminated(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(t.Context(), Config{
		Stdout:   logBinary(schemeBinaryV2, dir, `cd "$0"; trap 'echo yes >asked; kill $!; exit' TERM; echo >&5; sleep 1000 & wait`),
		Terminal: true,
	}, slept(t, 0.1))
	if err != nil {
		t.Fatal(err)
	}
	within(t, 20*time.Second, "close", s.Close)
	if got := read(t, dir, "asked"); got != "yes\n" {
		t.Errorf("%q", got)
	}
}

const killedOwner = "STDIO_TEST_KILLED_OWNER"

// TestLogBinaryOfAKilledShim ends by itself, having read what was written.
func TestLogBinaryOfAKilledShim(t *testing.T) {
	if uri := os.Getenv(killedOwner); uri != "" {
		s := open(t, Config{Stdout: uri})
		near, far := newPipe(t)
		s.Attach(Streams{Stdout: near})
		io.WriteString(far, "text\n")
		io.WriteString(far, "more\n") // it is taken when the first has been passed on
		// No child of the shim keeps the pipe.
		child := exec.Command("sleep", "1000")
		child.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		fmt.Println("written")
		select {}
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestLogBinaryOfAKilledShim$")
	cmd.Env = append(os.Environ(), killedOwner+"="+logBinary(schemeBinaryV2, dir, `cd "$0"; echo $$ >pid; echo >&5; exec 5>&-; cat <&3 >out; echo ended >>out`))
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(stdout, make([]byte, len("written\n"))); err != nil {
		t.Error(err)
	}
	cmd.Process.Kill()
	cmd.Wait() // killed
	gone(t, filepath.Join(dir, "pid"))
	if got := read(t, dir, "out"); !strings.HasPrefix(got, "text\n") || !strings.HasSuffix(got, "ended\n") {
		t.Errorf("%q", got)
	}
}
