package guest

import (
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

const (
	// maxMessage is the largest message that an agent may send; real ones have a few kilobytes.
	maxMessage = 1 << 20
	// maxUnanswered is how many calls an agent may leave unanswered before no more are made. So many fit into what a
	// stream holds of a peer that takes nothing.
	maxUnanswered = 256
	// takeLimit is how long an agent may take no part of a message that is being written to it.
	takeLimit = 10 * time.Second
)

// Messages of ttrpc begin with a header: the payload's length u32, the stream u32, the type and flags u8; big endian. A
// call is a stream of its own.
const (
	headerSize   = 10
	typeResponse = 2
	typeData     = 3
	// flagRemoteClosed in a request says that the answer is a stream of data, in data that it is the last.
	flagRemoteClosed = 1
)

// control is the stream that calls go over. It reads along and ends the session when the agent sends what answers no
// call, or more than it may: the ttrpc client would log each such message, and allocate what it says it will send. It
// does the same when the agent doesn't take a message: whoever writes holds up all others.
type control struct {
	net.Conn
	take  time.Duration
	abort func(error)
	ended <-chan struct{} // closed with the session
	pause pause

	sent, received scanner // each of one goroutine at a time, as ttrpc has it

	mu      sync.Mutex
	awaited map[uint32]answer
}

// answer is what a call may bring.
type answer struct{ isStream bool }

func newControl(s *mux.Session, scale func(time.Duration) time.Duration) *control {
	return &control{Conn: s.Control(), take: scale(takeLimit), abort: s.Abort, ended: s.Done(), awaited: map[uint32]answer{}}
}

// unanswered is how many calls are.
func (c *control) unanswered() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.awaited)
}

// Write sends parts of calls.
func (c *control) Write(b []byte) (int, error) {
	_ = c.sent.scan(b, c.called) // called accepts all
	_ = c.SetWriteDeadline(time.Now().Add(c.take))
	n, err := c.Conn.Write(b)
	if err != nil {
		c.abort(fmt.Errorf("send a call to the agent: %w", err)) // it can't make sense of half a message
	}
	return n, err
}

// Read receives parts of answers. What no correct agent sends isn't passed on.
func (c *control) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if broken := c.received.scan(b[:n], c.answered); broken != nil {
		c.abort(broken)
		return 0, broken
	}
	return n, err
}

// called notes a call.
func (c *control) called(h header) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.awaited[h.stream] = answer{isStream: h.flags&flagRemoteClosed != 0}
	return nil
}

// answered checks an answer.
func (c *control) answered(h header) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, ok := c.awaited[h.stream]
	switch {
	case !ok:
		return protocolErrorf("an answer to call %d, which isn't waiting for any", h.stream)
	case h.length > maxMessage:
		return protocolErrorf("a message of %d bytes", h.length)
	case h.kind == typeData && a.isStream:
		if h.flags&flagRemoteClosed != 0 {
			delete(c.awaited, h.stream)
		}
	case h.kind == typeResponse:
		delete(c.awaited, h.stream)
	default:
		return protocolErrorf("a message of type %d where an answer belongs", h.kind)
	}
	return nil
}

func protocolErrorf(format string, args ...any) error {
	return &mux.ProtocolError{Reason: fmt.Sprintf(format, args...)}
}

type header struct {
	length, stream uint32
	kind, flags    uint8
}

// scanner finds the headers in a stream that comes in pieces.
type scanner struct {
	header [headerSize]byte
	have   int    // of the header
	left   uint32 // of the payload
}

// scan calls found for each header that is whole with b.
func (s *scanner) scan(b []byte, found func(header) error) error {
	for len(b) > 0 {
		if s.left > 0 {
			n := min(uint64(len(b)), uint64(s.left))
			s.left -= uint32(n)
			b = b[n:]
			continue
		}
		n := copy(s.header[s.have:], b)
		s.have += n
		b = b[n:]
		if s.have < headerSize {
			return nil
		}
		s.have = 0
		h := header{
			length: binary.BigEndian.Uint32(s.header[:]),
			stream: binary.BigEndian.Uint32(s.header[4:]),
			kind:   s.header[8],
			flags:  s.header[9],
		}
		s.left = h.length
		if err := found(h); err != nil {
			return err
		}
	}
	return nil
}
