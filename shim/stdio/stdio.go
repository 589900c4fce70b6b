// Package stdio is a process's standard input and output on the host: the fifos and files that containerd names, and the
// copying between them and the streams that lead to the process in the guest.
//
// Nothing here depends on whether the process ever starts. A reader that is slow, or gone, holds up its own stream and
// nothing else; a fifo without a reader loses nothing, since the shim keeps both ends open, as it must for clients that
// detach and for a containerd that restarts.
package stdio

import (
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Config names the host's ends. An empty one is none: reads are at their end, writes vanish.
type Config struct {
	Stdin, Stdout, Stderr string
	// Terminal: stdout carries a terminal's output, and there is no stderr.
	Terminal bool
}

// Stream leads to a process in the guest. After CloseWrite, what was written still arrives, and then its end.
type Stream interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// Streams are a process's; nil where the Config names nothing.
type Streams struct{ Stdin, Stdout, Stderr Stream }

// copyBuffer is as much as a pipe holds.
const copyBuffer = 64 << 10

// IO is a process's stdio.
type IO struct {
	stdin   *input
	outputs []*output
	stdout  *output
	stderr  *output // the same as stdout where both have one name

	drained  chan struct{} // closed when all output has been copied
	progress atomic.Int64  // bytes copied to outputs
	once     sync.Once
}

// Open opens the host's ends. Nothing is read or written before Attach.
func Open(c Config) (_ *IO, err error) {
	s := &IO{drained: make(chan struct{})}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if c.Stdin != "" {
		if s.stdin, err = openInput(c.Stdin); err != nil {
			return nil, fmt.Errorf("stdin: %w", err)
		}
	}
	if c.Stdout != "" {
		if s.stdout, err = openOutput(c.Stdout); err != nil {
			return nil, fmt.Errorf("stdout: %w", err)
		}
		s.outputs = append(s.outputs, s.stdout)
	}
	switch {
	case c.Terminal || c.Stderr == "":
	case c.Stderr == c.Stdout:
		s.stderr = s.stdout
	default:
		if s.stderr, err = openOutput(c.Stderr); err != nil {
			return nil, fmt.Errorf("stderr: %w", err)
		}
		s.outputs = append(s.outputs, s.stderr)
	}
	return s, nil
}

// Attach starts the copying. It takes over the streams and is called at most once.
func (s *IO) Attach(st Streams) {
	var copies sync.WaitGroup
	forward := func(to *output, from Stream) {
		if from == nil || to == nil {
			return
		}
		copies.Add(1)
		go func() {
			defer copies.Done()
			defer from.Close()
			io.CopyBuffer(countingWriter{to.w, &s.progress}, onlyReader{from}, make([]byte, copyBuffer)) // either end may go at any time
		}()
	}
	forward(s.stdout, st.Stdout)
	forward(s.stderr, st.Stderr)
	if s.stdin != nil && st.Stdin != nil {
		go s.stdin.copyTo(st.Stdin)
	}
	go func() {
		copies.Wait()
		s.closeOutputs()
		s.once.Do(func() { close(s.drained) })
	}()
}

// CloseStdin says that no more input comes. The process reads what is in the fifo, then its end. It returns at once and
// may be called at any time.
func (s *IO) CloseStdin() {
	if s.stdin != nil {
		s.stdin.finish()
	}
}

// Drain is called when the process has ended: it stops the input and returns when all output has been copied, or after
// limit. Copying goes on after that for as long as it makes progress, so that a slow reader gets everything, and ends
// when nothing has moved for limit: somebody else holds the guest's end open, or nobody reads.
func (s *IO) Drain(limit time.Duration) {
	if s.stdin != nil {
		s.stdin.close()
	}
	if s.drainFor(limit) {
		return
	}
	go func() {
		for !s.drainFor(limit) {
		}
	}()
}

// drainFor waits for the end of the output for at most limit, and makes it the end when nothing has moved in that time.
func (s *IO) drainFor(limit time.Duration) (done bool) {
	before := s.progress.Load()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-s.drained:
		return true
	case <-timer.C:
	}
	if s.progress.Load() > before {
		return false
	}
	s.Close()
	return true
}

// Close ends all copying and closes the host's ends, so that clients read the end of the output. Idempotent.
func (s *IO) Close() {
	if s.stdin != nil {
		s.stdin.close()
	}
	s.closeOutputs()
	s.once.Do(func() { close(s.drained) })
}

func (s *IO) closeOutputs() {
	for _, o := range s.outputs {
		o.close()
	}
}

// output is a fifo or a file that is written to.
type output struct {
	w *os.File
	// r keeps a fifo readable when its reader has gone; nil for files.
	r *os.File
}

func openOutput(uri string) (*output, error) {
	path, file, err := parse(uri)
	if err != nil {
		return nil, err
	}
	if file {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		w, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_CLOEXEC, 0o644)
		return &output{w: w}, err
	}
	// The reading end first: with it, the writing end opens at once.
	r, err := openFifo(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	w, err := openFifo(path, os.O_WRONLY)
	if err != nil {
		r.Close()
		return nil, err
	}
	return &output{w: w, r: r}, nil
}

func (o *output) close() {
	o.w.Close()
	if o.r != nil {
		o.r.Close()
	}
}

// openFifo opens one end without waiting for the other; reads and writes then wait in Go's poller, and Close ends them.
func openFifo(path string, mode int) (*os.File, error) {
	f, err := os.OpenFile(path, mode|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil && fi.Mode().Type() != os.ModeNamedPipe {
		err = invalid("%s is not a fifo", path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// parse splits a stdio URI into a path and whether it is a plain file.
func parse(uri string) (path string, file bool, err error) {
	if !strings.Contains(uri, "://") {
		return uri, false, nil
	}
	u, err := url.Parse(uri)
	if err != nil {
		return "", false, invalid("%q is not a URI: %v", uri, err)
	}
	switch u.Scheme {
	case "fifo", "file":
		if !filepath.IsAbs(u.Path) {
			return "", false, invalid("%q names no absolute path", uri)
		}
		return u.Path, u.Scheme == "file", nil
	}
	return "", false, invalid("log URI %q: scheme %s is not supported by this version; use a fifo or file://", uri, u.Scheme)
}

func invalid(format string, args ...any) error {
	return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(format, args...))
}

// countingWriter counts what gets through, a part at a time, so that a reader who takes little counts too.
type countingWriter struct {
	w io.Writer
	n *atomic.Int64
}

func (c countingWriter) Write(p []byte) (int, error) {
	const part = 4 << 10
	done := 0
	for done < len(p) {
		n, err := c.w.Write(p[done:min(done+part, len(p))])
		done += n
		c.n.Add(int64(n))
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// onlyReader hides WriterTo and the like, so that copies use the buffer that they are given.
type onlyReader struct{ io.Reader }
