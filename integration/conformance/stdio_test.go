package conformance

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// streams are the fifos of one process, the way a client of containerd has them.
type streams struct {
	stdin, stdout, stderr string
	in                    *os.File // the writing end, once the process has been created
	out, err              *sink
	hold                  []*os.File
	within                time.Duration // for a write
}

var fifos atomic.Int64

// newStreams makes fifos whose other ends nobody has opened yet.
func newStreams(t *testing.T, dir string, terminal bool, within time.Duration) *streams {
	t.Helper()
	s := &streams{within: within}
	fifo := func(name string) string {
		path := filepath.Join(dir, name+strconv.FormatInt(fifos.Add(1), 10))
		if err := unix.Mkfifo(path, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	s.stdin = fifo("in")
	s.keep(t, s.stdin, os.O_RDWR)
	s.stdout = fifo("out")
	s.out = s.sink(t, s.stdout)
	if !terminal {
		s.stderr = fifo("err")
		s.err = s.sink(t, s.stderr)
	}
	t.Cleanup(s.close)
	return s
}

// keep holds an end open until the shim has its own.
func (s *streams) keep(t *testing.T, path string, mode int) {
	t.Helper()
	f, err := os.OpenFile(path, mode|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	s.hold = append(s.hold, f)
}

// sink opens a reading end, and holds a writing one so that there is no end yet.
func (s *streams) sink(t *testing.T, path string) *sink {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	s.keep(t, path, os.O_WRONLY)
	k := &sink{f: f, changed: make(chan struct{}, 1), done: make(chan struct{})}
	go k.read()
	return k
}

// opened is called when the shim has opened its ends, or has failed to.
func (s *streams) opened() {
	if f, err := os.OpenFile(s.stdin, os.O_WRONLY|unix.O_NONBLOCK, 0); err == nil {
		f.SetWriteDeadline(time.Now().Add(s.within)) // a fifo has deadlines
		s.in = f
	}
	for _, f := range s.hold {
		f.Close()
	}
	s.hold = nil
}

// detach closes the client's end of the input; reattach opens it again.
func (s *streams) detach() { s.in.Close() }

func (s *streams) reattach(t *testing.T) {
	t.Helper()
	f, err := os.OpenFile(s.stdin, os.O_WRONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.SetWriteDeadline(time.Now().Add(s.within)) // a fifo has deadlines
	s.in = f
}

func (s *streams) close() {
	for _, f := range append(s.hold, s.in) {
		if f != nil {
			f.Close()
		}
	}
	for _, k := range []*sink{s.out, s.err} {
		if k != nil {
			k.f.Close()
			<-k.done
		}
	}
}

// sink keeps all that a process writes.
type sink struct {
	f       *os.File
	changed chan struct{}
	done    chan struct{} // the other end is closed

	mu sync.Mutex
	b  bytes.Buffer
}

func (k *sink) read() {
	defer close(k.done)
	buf := make([]byte, 64<<10)
	for {
		n, err := k.f.Read(buf)
		k.mu.Lock()
		k.b.Write(buf[:n])
		k.mu.Unlock()
		if err != nil {
			return
		}
		select {
		case k.changed <- struct{}{}:
		default:
		}
	}
}

func (k *sink) bytes() []byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	return bytes.Clone(k.b.Bytes())
}

// all is everything up to the end, which must come.
func (k *sink) all(within time.Duration) ([]byte, error) {
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-k.done:
		return k.bytes(), nil
	case <-timer.C:
		return k.bytes(), errors.New("the output has no end")
	}
}

// until waits until the process has written this.
func (k *sink) until(text string, within time.Duration) error {
	timer := time.NewTimer(within)
	defer timer.Stop()
	for ended := false; ; {
		switch {
		case bytes.Contains(k.bytes(), []byte(text)):
			return nil
		case ended:
			return io.ErrUnexpectedEOF
		}
		select {
		case <-k.changed:
		case <-k.done:
			ended = true
		case <-timer.C:
			return os.ErrDeadlineExceeded
		}
	}
}
