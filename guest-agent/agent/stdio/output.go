package stdio

import (
	"errors"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// output copies from a process to the host.
type output struct {
	number int // the process's descriptor
	from   *os.File
	rest   Rest
	done   chan struct{} // closed when nothing is copied any more

	mu      sync.Mutex
	to      Stream
	next    *successor
	changed chan struct{} // closed, and replaced, when there is a next one
	ended   bool
}

// successor is a stream that takes another one's place.
type successor struct {
	to     Stream
	goesOn bool          // with what hasn't got through
	taken  chan struct{} // closed when it has
}

func newOutput(number int, from *os.File, to Stream, rest Rest) *output {
	return &output{number: number, from: from, to: to, rest: rest, done: make(chan struct{}), changed: make(chan struct{})}
}

// interrupt has whoever reads from the process look at what there is to do. o.mu is held.
func (o *output) interrupt() { _ = o.from.SetReadDeadline(time.Unix(1, 0)) }

// end says that the process has ended.
func (o *output) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	o.interrupt()
}

// replace has the copying go on to another stream, soon. One that a host may still have is closed.
func (o *output) replace(next *successor) {
	o.mu.Lock()
	before := o.to
	if late := o.next; late != nil {
		_ = late.to.Close()
		close(late.taken)
	}
	o.next = next
	close(o.changed)
	o.changed = make(chan struct{})
	o.interrupt()
	o.mu.Unlock()
	if !next.goesOn {
		_ = before.Close() // also ends a write
	}
}

func (o *output) run() {
	defer close(o.done)
	defer o.from.Close()
	defer func() { _ = o.stream().Close() }()
	b := make([]byte, copySize)
	for {
		n, err := o.from.Read(b)
		if !o.send(b[:n]) {
			return
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if !o.turn() {
				return
			}
			continue
		}
		if err != nil { // EOF, or EIO of a terminal that nobody has open
			return
		}
	}
}

func (o *output) stream() Stream {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.to
}

// turn does what the copying was interrupted for. It answers false when that is all.
func (o *output) turn() bool {
	o.mu.Lock()
	next, ended := o.next, o.ended
	if !ended {
		_ = o.from.SetReadDeadline(time.Time{})
	}
	o.mu.Unlock()
	if next != nil && !o.send(o.succeed(nil)) {
		return false
	}
	if ended {
		o.empty(o.send)
	}
	return !ended
}

// send writes to the host. It answers false when the host doesn't want any more, which the process finds out by its
// next write (SIGPIPE, SIGHUP).
func (o *output) send(b []byte) bool {
	for len(b) > 0 {
		n, err := o.stream().Write(b)
		if err == nil {
			return true
		}
		o.mu.Lock()
		replaced := o.next != nil
		o.mu.Unlock()
		if errors.Is(err, mux.ErrReset) && !replaced {
			return false
		}
		b = o.lost(b[n:])
	}
	return true
}

// lost is called when the host is gone, with what it didn't take, and returns what is to be sent instead. While the work
// is at rest another host may come. Without any, output vanishes and the process goes on.
func (o *output) lost(b []byte) []byte {
	o.mu.Lock()
	replaced, changed := o.next != nil, o.changed
	o.mu.Unlock()
	if !replaced && o.rest != nil {
		if goesOn := o.rest(); goesOn != nil {
			select {
			case <-changed:
				replaced = true
			case <-goesOn:
			}
		}
	}
	if replaced {
		return o.succeed(b)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.to = nowhere{}
	return nil
}

// succeed puts the next stream in the place of the one before, of which b hasn't been taken. It returns what the new one
// is to have first.
func (o *output) succeed(b []byte) []byte {
	o.mu.Lock()
	before, next := o.to, o.next
	o.to, o.next = next.to, nil
	o.mu.Unlock()
	defer close(next.taken)
	if next.goesOn {
		b = slices.Concat(before.Unsent(), b)
	} else {
		o.empty(func([]byte) bool { return true })
		b = nil
	}
	return b
}

// empty takes what is in the pipe, without waiting for more, and no more than one may hold: another process may have it open and go on writing.
func (o *output) empty(take func([]byte) bool) {
	raw, err := o.from.SyscallConn()
	if err != nil {
		return
	}
	b := make([]byte, copySize)
	for left := pipeSize; left > 0; {
		var n int
		var failed error
		err := raw.Control(func(fd uintptr) { n, failed = unix.Read(int(fd), b[:min(len(b), left)]) })
		if err != nil || failed != nil || n <= 0 || !take(b[:n]) {
			return
		}
		left -= n
	}
}

// nowhere is the stream that swallows everything.
type nowhere struct{}

func (nowhere) Read([]byte) (int, error)    { return 0, io.EOF }
func (nowhere) Write(p []byte) (int, error) { return len(p), nil }
func (nowhere) Close() error                { return nil }
func (nowhere) CloseWrite() error           { return nil }
func (nowhere) Unsent() []byte              { return nil }
