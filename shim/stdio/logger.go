package stdio

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/undo"
)

const (
	// readyLimit bounds how long a log binary takes until it is ready.
	readyLimit = 10 * time.Second
	// flushLimit is how long it may go on after the output's end; containerd promises ten seconds.
	flushLimit = 10 * time.Second
	// termLimit is how long it may go on after SIGTERM, and after SIGKILL until it is given up.
	termLimit = 2 * time.Second
)

// logger is a log binary: a process that gets the output through pipes, fd 3 is stdout and fd 4 stderr. Only the shim
// has the writing ends, so that the logger of a shim that was killed reads its end too.
type logger struct {
	path     string
	cmd      *exec.Cmd
	out, err *os.File
	log      *slog.Logger
	timeout  func(time.Duration) time.Duration

	reaped chan struct{} // closed when the process has ended
	ended  chan struct{} // closed when it has, or when nothing makes it
	once   sync.Once
	lost   sync.Once
}

// startLogger starts a log binary and waits until it is ready.
func startLogger(ctx context.Context, t target, o Owner) (_ *sink, err error) {
	args, err := loggerArgs(t.query)
	if err != nil {
		return nil, invalid("log binary %s: query %q: %v", t.path, t.query, err)
	}
	l := &logger{path: t.path, log: o.Log, timeout: o.Timeout, reaped: make(chan struct{}), ended: make(chan struct{})}
	var theirs undo.Stack
	defer theirs.Release() // errors of closing pipes mean nothing
	var u undo.Stack
	defer u.Run(&err)
	outR, outW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	theirs.Push(outR.Close)
	u.Push(outW.Close)
	errR, errW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	theirs.Push(errR.Close)
	u.Push(errW.Close)
	ready, readyW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	theirs.Push(readyW.Close)
	defer ready.Close()

	l.out, l.err = outW, errW
	l.cmd = exec.Command(t.path, args...)
	l.cmd.Env = []string{"CONTAINER_ID=" + o.ID, "CONTAINER_NAMESPACE=" + o.Namespace}
	l.cmd.ExtraFiles = []*os.File{outR, errR, readyW}
	l.cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	if err := l.cmd.Start(); err != nil {
		return nil, invalid("log binary: %v", err)
	}
	go func() {
		l.cmd.Wait() // its status is in cmd then
		close(l.reaped)
	}()
	theirs.Release() // the end of ready is seen only without our writing end
	if err := l.awaitReady(ctx, ready, t.scheme == schemeBinaryV2); err != nil {
		l.kill()
		return nil, err
	}
	return &sink{stdout: loggerPipe{l, outW}, stderr: loggerPipe{l, errW}, close: l.close, ended: l.ended}, nil
}

// loggerArgs makes arguments of a query, key and value in turn, in its order. As with containerd, the first of several
// values counts.
func loggerArgs(query string) (args []string, err error) {
	seen := map[string]bool{}
	for pair := range strings.SplitSeq(query, "&") {
		if pair == "" {
			continue
		}
		k, v, _ := strings.Cut(pair, "=")
		if k, err = url.QueryUnescape(k); err != nil {
			return nil, err
		}
		if v, err = url.QueryUnescape(v); err != nil {
			return nil, err
		}
		if !seen[k] {
			seen[k] = true
			args = append(args, k, v)
		}
	}
	return args, nil
}

// awaitReady waits for a byte, or for the pipe's end where that will do: loggers of version 1 close it, and are taken to
// be ready also when they have died.
func (l *logger) awaitReady(ctx context.Context, ready *os.File, needByte bool) error {
	limit := l.timeout(readyLimit)
	ready.SetReadDeadline(time.Now().Add(limit))
	defer context.AfterFunc(ctx, func() { ready.SetReadDeadline(time.Now()) })()
	_, err := io.ReadFull(ready, make([]byte, 1))
	switch {
	case err == nil, err == io.EOF && !needByte:
		return nil
	case err == io.EOF:
		return invalid("log binary %s ended or closed its descriptor 5 before it was ready", l.path)
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return invalid("log binary %s was not ready within %s: it must write a byte to descriptor 5, or close it", l.path, limit)
	}
	return err
}

// close ends the output.
func (l *logger) close() {
	l.once.Do(func() {
		l.out.Close()
		l.err.Close()
		go l.end()
	})
}

// end has the process end: by itself, since it has read the end of the output, or not.
func (l *logger) end() {
	defer close(l.ended)
	if l.endsWithin(flushLimit) {
		return
	}
	l.cmd.Process.Signal(unix.SIGTERM) // it may have ended just now
	if l.endsWithin(termLimit) {
		return
	}
	l.log.Warn("the log binary ignores the end of its input and SIGTERM: it is killed", "binary", l.path)
	l.kill()
}

// kill ends the process and its children.
func (l *logger) kill() {
	unix.Kill(-l.cmd.Process.Pid, unix.SIGKILL) // it may have ended just now
	if !l.endsWithin(termLimit) {
		l.log.Error("the log binary can't be killed", "binary", l.path, "pid", l.cmd.Process.Pid)
	}
}

func (l *logger) endsWithin(limit time.Duration) bool {
	timer := time.NewTimer(l.timeout(limit))
	defer timer.Stop()
	select {
	case <-l.reaped:
		return true
	case <-timer.C:
		return false
	}
}

// loggerPipe discards what a logger doesn't read any more.
type loggerPipe struct {
	l *logger
	w *os.File
}

func (p loggerPipe) Write(b []byte) (int, error) {
	n, err := p.w.Write(b)
	if err == nil || errors.Is(err, os.ErrClosed) {
		return n, err
	}
	p.l.lost.Do(func() {
		p.l.log.Warn("output is lost: its log binary reads no more", "binary", p.l.path, "error", err)
	})
	return len(b), nil
}
