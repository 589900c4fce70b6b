package mux

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// lingerTimeout bounds how long Close waits for what is still to be written.
const lingerTimeout = time.Second

// lateFrames is how many WINDOW and RESET frames a correct peer may send for a stream after both directions have ended:
// one for each half window that was under way, one RESET, and room to spare.
const lateFrames = 8

// Session is one life of the channel: from a HELLO until the next one, an error or Close. All methods may be called from
// many goroutines.
type Session struct {
	conn    io.Writer
	host    bool
	version uint16 // of the protocol, that both speak
	done    chan struct{}
	onEnd   func() // called once, after done is closed
	// written is closed when no byte of this session will be written any more.
	written chan struct{}

	// mu guards all below, and the streams. It is never held across I/O.
	mu      sync.Mutex
	err     error
	closing bool
	streams map[uint32]*Stream
	control *Stream
	late    int // how many more frames for streams that ended may come

	writable sync.Cond // the writer has something to do
	urgent   []*Stream // streams with an OPEN, WINDOW or RESET to send
	bulk     []*Stream // streams with data or an EOF to send; each once, served in turn
	hold     hold
}

func newSession(conn io.Writer, host bool, version uint16) *Session {
	s := &Session{
		conn:    conn,
		host:    host,
		version: version,
		done:    make(chan struct{}),
		written: make(chan struct{}),
		streams: map[uint32]*Stream{},
	}
	s.writable.L = &s.mu
	s.control = s.add(ControlID)
	s.control.taken = true
	return s
}

// add makes a stream. s.mu is held, or s not shared yet.
func (s *Session) add(id uint32) *Stream {
	st := &Stream{session: s, id: id, credit: Window, allowed: Window}
	st.changed.L = &s.mu
	s.streams[id] = st
	return st
}

// Control is stream 1.
func (s *Session) Control() net.Conn { return s.control }

// Open makes a stream; only the host may. The caller chooses the id, ≥ 2 and never used before in this session. Whatever
// is written to the control stream afterwards arrives after the stream.
func (s *Session) Open(id uint32) (*Stream, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.host:
		return nil, fmt.Errorf("agent channel: only the host opens streams")
	case s.err != nil:
		return nil, s.err
	case id <= ControlID:
		return nil, fmt.Errorf("agent channel: %d is no id for a stream", id)
	case s.streams[id] != nil:
		return nil, fmt.Errorf("agent channel: stream %d is open already", id)
	case len(s.streams) >= MaxStreams:
		return nil, fmt.Errorf("agent channel: %d streams are open already", MaxStreams)
	}
	st := s.add(id)
	st.taken, st.sendOpen = true, true
	s.schedule(st)
	return st, nil
}

// Take hands out a stream that the host has opened, once; only for the guest. The error wraps ErrNoStream.
func (s *Session) Take(id uint32) (*Stream, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.streams[id]
	switch {
	case s.err != nil:
		return nil, s.err
	case st == nil || st.taken:
		return nil, fmt.Errorf("%w: %d", ErrNoStream, id)
	}
	st.taken = true
	return st, nil
}

// Done is closed when the session has ended.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err says why the session ended: nil before Done is closed, ErrClosed after
// Close, io.ErrUnexpectedEOF (wrapped) when the machine has gone.
func (s *Session) Err() error {
	select {
	case <-s.done:
		return s.err
	default:
		return nil
	}
}

// Close ends the session and, on the host, the channel. What was written and the peer has room for is sent before, for
// at most a second. Idempotent.
func (s *Session) Close() error {
	s.mu.Lock()
	s.closing = true
	s.writable.Signal()
	s.mu.Unlock()
	timer := time.NewTimer(lingerTimeout)
	defer timer.Stop()
	select {
	case <-s.written:
	case <-s.done:
	case <-timer.C:
	}
	s.end(ErrClosed)
	return nil
}

// Abort ends the session at once, because of what its user has found wrong with the peer.
func (s *Session) Abort(reason error) { s.end(reason) }

// end ends the session with a reason; the first one counts.
func (s *Session) end(err error) {
	if err == io.EOF { // not to be taken for a stream's
		err = errEnded
	}
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	s.err = err
	close(s.done) // first of all: whoever meets the end in a stream finds the reason
	for _, st := range s.streams {
		st.changed.Broadcast()
	}
	s.writable.Signal()
	s.mu.Unlock()
	if s.onEnd != nil {
		s.onEnd()
	}
}

// readFrames handles what the peer sends until that fails.
func (s *Session) readFrames(r *bufio.Reader) error {
	payload := make([]byte, maxPayload)
	for {
		h, err := readHeader(r)
		if err != nil {
			return err
		}
		if _, err := io.ReadFull(r, payload[:h.length]); err != nil {
			return unexpected(err)
		}
		if err := s.receive(h, payload[:h.length]); err != nil {
			return err
		}
	}
}

func readHeader(r *bufio.Reader) (header, error) {
	b, err := r.Peek(headerSize)
	if err != nil {
		if len(b) > 0 {
			err = unexpected(err)
		}
		return header{}, err
	}
	h, err := parseHeader(b)
	if err != nil {
		return h, err // a HELLO may begin in these bytes
	}
	_, err = r.Discard(headerSize)
	return h, err
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// receive handles one frame. Its error ends the session.
func (s *Session) receive(h header, payload []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	defer func() { s.hold.received += uint64(headerSize + h.length) }()
	switch {
	case h.kind == typeHold || h.kind == typeHeld || h.kind == typeRelease:
		return s.receiveMark(h, payload)
	case s.hold.peerStill:
		return protocolErrorf("%v while the channel is held", h.kind)
	}
	st := s.streams[h.stream]
	if st == nil {
		return s.receiveUnknown(h)
	}
	switch h.kind {
	case typeData:
		return st.receiveData(payload)
	case typeEOF:
		return st.receiveEOF()
	case typeReset:
		return st.receiveReset()
	case typeWindow:
		return st.receiveWindow(binary.BigEndian.Uint32(payload))
	}
	return protocolErrorf("%v on stream %d", h.kind, h.stream)
}

// receiveUnknown handles a frame for a stream that isn't there: a new one in the guest, or what was under way when a
// stream ended.
func (s *Session) receiveUnknown(h header) error {
	switch {
	case h.kind == typeOpen && !s.host:
		if len(s.streams) >= MaxStreams {
			return protocolErrorf("more than %d streams", MaxStreams)
		}
		s.add(h.stream)
		return nil
	case (h.kind == typeWindow || h.kind == typeReset) && s.late > 0:
		s.late--
		return nil
	}
	return protocolErrorf("%v for stream %d, which is not open", h.kind, h.stream)
}

// forget removes a stream when both directions have ended.
func (s *Session) forget(st *Stream) {
	if st.eofSent && st.eofReceived && s.streams[st.id] == st {
		delete(s.streams, st.id)
		s.late += lateFrames
	}
}
