// Package stdio is a process's standard input and output on the host: the fifos and files that containerd names, and the
// copying between them and the streams that lead to the process in the guest.
//
// Nothing here depends on whether the process ever starts. A reader that is slow, or gone, holds up its own stream and
// nothing else; a fifo without a reader loses nothing, since the shim keeps both ends open, as it must for clients that
// detach and for a containerd that restarts. Logs are different: a file that can't be written or a log binary that has
// died loses output, and the process goes on.
package stdio

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// Config names the host's ends by URIs as containerd defines them:
//
//	PATH, fifo://PATH                               a fifo that exists
//	file://PATH[?max-size=SIZE[&max-files=NUMBER]]  a file, made if need be and appended to; with a size, it is rotated
//	binary://PATH[?KEY=VALUE…]                      a program that gets the output
//	binary-v2://PATH[?KEY=VALUE…]                   one that must say when it is ready
//
// An empty one is none: reads are at their end, writes vanish. Equal ones for stdout and stderr are one thing. Stdin is
// a fifo or a file.
type Config struct {
	Stdin, Stdout, Stderr string
	// Terminal: stdout carries a terminal's output, and there is no stderr.
	Terminal bool
}

// Owner is the process that stdio belongs to.
type Owner struct {
	// ID is the container's, or the exec's. Log binaries are told it, and the namespace.
	ID, Namespace string
	Log           *slog.Logger
	// Timeout scales deadlines for this host.
	Timeout func(time.Duration) time.Duration
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
	stdin  *input
	sinks  []*sink
	stdout io.Writer
	stderr io.Writer

	drained  chan struct{} // closed when all output has been copied
	progress atomic.Int64  // bytes copied to outputs
	once     sync.Once
}

// Open opens the host's ends and waits until log binaries are ready. Nothing is read or written before Attach. The error
// is InvalidArgument where the Config is to blame.
func Open(ctx context.Context, c Config, o Owner) (_ *IO, err error) {
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
	var stdout, stderr target
	if stdout, err = parse(c.Stdout); err != nil {
		return nil, fmt.Errorf("stdout: %w", err)
	}
	if !c.Terminal {
		if stderr, err = parse(c.Stderr); err != nil {
			return nil, fmt.Errorf("stderr: %w", err)
		}
	}
	if stdout.scheme == schemeFile && stderr.scheme == schemeFile && stdout.path == stderr.path && stdout.query != stderr.query {
		return nil, invalid("stdout and stderr name the file %s with different limits", stdout.path)
	}
	if stdout.scheme != "" {
		sink, err := s.open(ctx, stdout, o)
		if err != nil {
			return nil, fmt.Errorf("stdout: %w", err)
		}
		s.stdout = sink.stdout
		if stderr == stdout {
			s.stderr = sink.stderr
			return s, nil
		}
	}
	if stderr.scheme != "" {
		sink, err := s.open(ctx, stderr, o)
		if err != nil {
			return nil, fmt.Errorf("stderr: %w", err)
		}
		s.stderr = sink.stderr
	}
	return s, nil
}

func (s *IO) open(ctx context.Context, t target, o Owner) (*sink, error) {
	sink, err := openSink(ctx, t, o)
	if err == nil {
		s.sinks = append(s.sinks, sink)
	}
	return sink, err
}

// Attach starts the copying. It takes over the streams and is called at most once.
func (s *IO) Attach(st Streams) {
	var copies sync.WaitGroup
	forward := func(to io.Writer, from Stream) {
		if from == nil || to == nil {
			return
		}
		copies.Add(1)
		go func() {
			defer copies.Done()
			defer from.Close()
			io.CopyBuffer(countingWriter{to, &s.progress}, onlyReader{from}, make([]byte, copyBuffer)) // either end may go at any time
		}()
	}
	forward(s.stdout, st.Stdout)
	forward(s.stderr, st.Stderr)
	if s.stdin != nil && st.Stdin != nil {
		go s.stdin.copyTo(st.Stdin)
	}
	go func() {
		copies.Wait()
		s.closeSinks()
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
	s.Cut()
	return true
}

// Close ends all copying and closes the host's ends, so that clients read the end of the output. It returns when log
// binaries have ended, or have been killed because they didn't. Idempotent.
func (s *IO) Close() {
	s.Cut()
	for _, k := range s.sinks {
		if k.ended != nil {
			<-k.ended
		}
	}
}

// Cut is Close without waiting for anybody.
func (s *IO) Cut() {
	if s.stdin != nil {
		s.stdin.close()
	}
	s.closeSinks()
	s.once.Do(func() { close(s.drained) })
}

func (s *IO) closeSinks() {
	for _, k := range s.sinks {
		k.close()
	}
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
