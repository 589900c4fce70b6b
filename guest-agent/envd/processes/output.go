package processes

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Stream is where output comes from.
type Stream int

const (
	Stdout Stream = iota
	Stderr
	Terminal
)

// Output is a piece of what a process has written. The bytes aren't changed.
type Output struct {
	Stream Stream
	Bytes  []byte
}

// Sizes of pieces, in bytes.
const (
	pipePiece     = 32 << 10
	terminalPiece = 16 << 10
)

// queued is how many pieces wait for a subscriber. When it has that many, it holds up the process.
const queued = 8

// Subscription gets a process's output from when it was made.
type Subscription struct {
	// Output gets the pieces. It is never closed: when the process is done, what is in it is the last.
	Output chan Output

	left chan struct{}
	once sync.Once
}

// Leave ends the subscription, so that it holds up nobody.
func (s *Subscription) Leave() { s.once.Do(func() { close(s.left) }) }

// hub hands output to those who are subscribed. What nobody is subscribed to is dropped.
type hub struct {
	over chan struct{} // closed: nobody is waited for any more

	mu   sync.Mutex
	subs []*Subscription
}

func (h *hub) subscribe() *Subscription {
	s := &Subscription{Output: make(chan Output, queued), left: make(chan struct{})}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.subs = append(h.subs, s)
	return s
}

// publish waits until each subscriber has taken the piece, or left, or the wait is over.
func (h *hub) publish(o Output) {
	h.mu.Lock()
	kept := h.subs[:0:0]
	for _, s := range h.subs {
		select {
		case <-s.left:
		default:
			kept = append(kept, s)
		}
	}
	h.subs = kept
	h.mu.Unlock()
	for _, s := range kept {
		select {
		case s.Output <- o:
		case <-s.left:
		case <-h.over:
			select {
			case s.Output <- o:
			default:
			}
		}
	}
}

// copyOutput publishes what is read from f until its end. When cut is closed, what f has at that moment is the last.
func (h *hub) copyOutput(f *os.File, stream Stream, cut <-chan struct{}) {
	size := pipePiece
	if stream == Terminal {
		size = terminalPiece
	}
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		select {
		case <-cut:
			_ = f.SetReadDeadline(past)
		case <-ended:
		}
	}()
	buf := make([]byte, size)
	for {
		n, err := f.Read(buf)
		if n > 0 {
			h.publish(Output{stream, append([]byte(nil), buf[:n]...)})
		}
		if os.IsTimeout(err) {
			h.drain(f, stream, buf)
			return
		}
		if err != nil { // the end: io.EOF, or EIO where no process has the terminal
			return
		}
	}
}

// drain publishes what f has, without waiting for more. A pipe holds little enough for others to fill it no faster than it
// is emptied: no more than its own size is taken.
func (h *hub) drain(f *os.File, stream Stream, buf []byte) {
	c, err := f.SyscallConn()
	if err != nil {
		return
	}
	for left := pipeSize; left > 0; {
		n := 0
		if c.Control(func(fd uintptr) { n, err = unix.Read(int(fd), buf) }) != nil || err != nil || n <= 0 {
			return
		}
		h.publish(Output{stream, append([]byte(nil), buf[:n]...)})
		left -= n
	}
}

// pipeSize is what the kernel keeps of a pipe that nobody reads, in bytes.
const pipeSize = 64 << 10
