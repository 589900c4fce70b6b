package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"

	"github.com/containerd/console"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"golang.org/x/sys/unix"
)

// forwarded are the signals that are passed on to the process which the caller attends.
var forwarded = []os.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2}

// interrupts is how many SIGINTs or SIGTERMs it takes to kill a process that doesn't end of them: init processes
// ignore signals that they have no handler for.
const interrupts = 3

// Stdio is what a process in the foreground is attached to.
type Stdio struct {
	In  *os.File // nil: the process has no stdin
	Out *os.File
	Err *os.File
}

// terminal is the caller's side of a process in the foreground.
type terminal struct {
	Stdio
	tty     bool
	console console.Console // nil when the caller's side is no terminal
	stdin   *eofReader
}

// prepare looks at the caller's files; it changes nothing yet.
func (s Stdio) prepare(tty bool) (*terminal, error) {
	t := &terminal{Stdio: s, tty: tty}
	if s.In != nil {
		t.stdin = &eofReader{r: s.In, eof: make(chan struct{})}
	}
	if !tty {
		return t, nil
	}
	side := s.In
	if side == nil {
		side = s.Out
	}
	con, err := console.ConsoleFromFile(side)
	switch {
	case err == nil:
		t.console = con
	case !errors.Is(err, console.ErrNotAConsole):
		return nil, fmt.Errorf("open the terminal: %w", err)
	case s.In != nil:
		return nil, errors.New("stdin is not a terminal: leave out either -i or -t")
	}
	return t, nil
}

// creator makes the pipes to the process.
func (t *terminal) creator(fifoDir string) cio.Creator {
	var in io.Reader
	if t.stdin != nil {
		in = t.stdin
	}
	opts := []cio.Opt{cio.WithStreams(in, t.Out, t.Err), cio.WithFIFODir(fifoDir)}
	if t.tty {
		opts = append(opts, cio.WithTerminal)
	}
	return cio.NewCreator(opts...)
}

// forward passes signals, the size of the terminal and the end of stdin on to a started process until stop is called.
// A terminal whose input goes to the process is put in raw mode; restore undoes that.
func (t *terminal) forward(ctx context.Context, p client.Process) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded...)
	if t.console != nil {
		signal.Notify(signals, unix.SIGWINCH)
		t.resize(ctx, p)
		if t.stdin != nil {
			_ = t.console.SetRaw() // a terminal that can't is still of use
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		count := 0
		for {
			select {
			case <-ctx.Done():
				return
			case s := <-signals:
				if s == unix.SIGWINCH {
					t.resize(ctx, p)
					continue
				}
				if s == unix.SIGINT || s == unix.SIGTERM {
					count++
				}
				if count >= interrupts {
					s = unix.SIGKILL
				}
				_ = p.Kill(ctx, s.(unix.Signal)) // it may have ended just now
			}
		}
	})
	if t.stdin != nil {
		wg.Go(func() {
			select {
			case <-ctx.Done():
			case <-t.stdin.eof:
				_ = p.CloseIO(ctx, client.WithStdinCloser) // it may have ended just now
			}
		})
	}
	return func() {
		signal.Stop(signals)
		cancel()
		wg.Wait()
	}
}

func (t *terminal) resize(ctx context.Context, p client.Process) {
	size, err := t.console.Size()
	if err != nil {
		return
	}
	_ = p.Resize(ctx, uint32(size.Width), uint32(size.Height)) // it may have ended just now
}

func (t *terminal) restore() {
	if t.console != nil && t.stdin != nil {
		_ = t.console.Reset()
	}
}

// eofReader says when its reader has ended.
type eofReader struct {
	r    io.Reader
	once sync.Once
	eof  chan struct{}
}

func (e *eofReader) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	if err != nil {
		e.once.Do(func() { close(e.eof) })
	}
	return n, err
}
