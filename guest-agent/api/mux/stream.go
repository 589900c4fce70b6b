package mux

import (
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// maxOut is how much a stream holds that is still to be written to the channel.
const maxOut = 64 << 10

// Stream is one stream: a net.Conn with CloseWrite. Both directions end separately.
type Stream struct {
	session *Session
	id      uint32

	// All below is guarded by session.mu.
	changed sync.Cond // any of it has changed
	taken   bool      // someone has it, or it is not to be had

	in          buffer
	allowed     int // bytes that the peer may send yet
	unreported  int // bytes taken by Read that the peer doesn't know of
	grant       int // bytes to report
	eofReceived bool
	readClosed  bool
	readLimit   deadline

	out         buffer
	credit      int  // bytes that the peer has room for
	writeClosed bool // nothing more comes to out
	eofSent     bool
	peerReset   bool
	writeLimit  deadline

	sendOpen, sendReset bool
	inUrgent, inBulk    bool // is in that queue of the session
}

// ID is the stream's number.
func (st *Stream) ID() uint32 { return st.id }

// Read reads what has come. After the peer's EOF it returns io.EOF; what came before a session ended is still read.
func (st *Stream) Read(p []byte) (int, error) {
	s := st.session
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case st.readClosed:
			return 0, net.ErrClosed
		case st.readLimit.expired:
			return 0, os.ErrDeadlineExceeded
		case st.in.len() > 0:
			n := st.in.read(p)
			st.report(n)
			return n, nil
		case st.eofReceived:
			return 0, io.EOF
		case s.err != nil:
			return 0, s.err
		case len(p) == 0:
			return 0, nil
		}
		st.changed.Wait()
	}
}

// report tells the peer of room for n more bytes, half a window at a time.
func (st *Stream) report(n int) {
	st.unreported += n
	if st.unreported >= Window/2 && !st.eofReceived {
		st.grant += st.unreported
		st.allowed += st.unreported
		st.unreported = 0
		st.session.schedule(st)
	}
}

// Write returns when all of p is on its way; what the peer has no room for yet is held back, at most 64 KiB.
func (st *Stream) Write(p []byte) (n int, err error) {
	s := st.session
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case s.err != nil:
			return n, s.err
		case st.peerReset:
			return n, ErrReset
		case st.writeClosed || s.closing:
			return n, net.ErrClosed
		case st.writeLimit.expired:
			return n, os.ErrDeadlineExceeded
		case len(p) == 0:
			return n, nil
		}
		if room := min(maxOut-st.out.len(), len(p)); room > 0 {
			st.out.write(p[:room])
			n, p = n+room, p[room:]
			s.schedule(st)
			continue
		}
		st.changed.Wait()
	}
}

// Unsent is what was written and won't be sent any more, because the session has ended. If the channel was held then,
// that is exactly what the peer hasn't received. Before the end it is nothing.
func (st *Stream) Unsent() []byte {
	s := st.session
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		return nil
	}
	return append([]byte(nil), st.out.b[st.out.off:]...)
}

// CloseWrite ends this side's direction: the peer reads io.EOF after all that was written. Idempotent.
func (st *Stream) CloseWrite() error {
	s := st.session
	s.mu.Lock()
	defer s.mu.Unlock()
	st.closeWrite()
	return nil
}

func (st *Stream) closeWrite() {
	if st.writeClosed {
		return
	}
	st.writeClosed = true
	st.changed.Broadcast()
	st.session.schedule(st)
}

// Close gives the stream up. What was written still goes out; what comes is dropped, and the peer's writes fail.
// Idempotent.
func (st *Stream) Close() error {
	s := st.session
	s.mu.Lock()
	defer s.mu.Unlock()
	if st.readClosed {
		return nil
	}
	st.closeWrite()
	st.readClosed = true
	st.in.reset()
	st.grant, st.unreported = 0, 0
	st.readLimit.stop()
	st.writeLimit.stop()
	st.changed.Broadcast()
	if !st.eofReceived {
		st.sendReset = true
		s.schedule(st)
	}
	return nil
}

func (st *Stream) receiveData(p []byte) error {
	switch {
	case st.eofReceived:
		return protocolErrorf("DATA after EOF on stream %d", st.id)
	case len(p) > st.allowed:
		return protocolErrorf("DATA beyond the window of stream %d", st.id)
	}
	st.allowed -= len(p)
	if !st.readClosed {
		st.in.write(p)
		st.changed.Broadcast()
	}
	return nil
}

func (st *Stream) receiveEOF() error {
	if st.eofReceived {
		return protocolErrorf("second EOF on stream %d", st.id)
	}
	st.eofReceived = true
	st.changed.Broadcast()
	st.session.forget(st)
	return nil
}

func (st *Stream) receiveReset() error {
	if st.peerReset {
		return protocolErrorf("second RESET on stream %d", st.id)
	}
	st.peerReset = true
	st.out.reset()
	st.closeWrite()
	st.session.schedule(st)
	st.changed.Broadcast()
	return nil
}

func (st *Stream) receiveWindow(n uint32) error {
	if n == 0 || n > Window || st.credit+int(n) > Window {
		return protocolErrorf("WINDOW of %d on stream %d with %d of %d left", n, st.id, st.credit, Window)
	}
	st.credit += int(n)
	st.session.schedule(st)
	return nil
}

// LocalAddr names the stream.
func (st *Stream) LocalAddr() net.Addr { return addr(st.id) }

// RemoteAddr names the stream.
func (st *Stream) RemoteAddr() net.Addr { return addr(st.id) }

// SetDeadline is SetReadDeadline and SetWriteDeadline.
func (st *Stream) SetDeadline(t time.Time) error {
	_ = st.SetReadDeadline(t)
	return st.SetWriteDeadline(t)
}

// SetReadDeadline makes Read fail with os.ErrDeadlineExceeded from t on; the zero time means never.
func (st *Stream) SetReadDeadline(t time.Time) error { return st.setDeadline(&st.readLimit, t) }

// SetWriteDeadline makes Write fail with os.ErrDeadlineExceeded from t on; the zero time means never.
func (st *Stream) SetWriteDeadline(t time.Time) error { return st.setDeadline(&st.writeLimit, t) }

func (st *Stream) setDeadline(d *deadline, t time.Time) error {
	st.session.mu.Lock()
	defer st.session.mu.Unlock()
	if st.readClosed {
		return net.ErrClosed
	}
	d.set(t, &st.changed)
	return nil
}

// deadline is a time limit that wakes a condition's waiters when it comes.
type deadline struct {
	expired bool
	timer   *time.Timer
}

func (d *deadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}

// set is called with c.L held.
func (d *deadline) set(t time.Time, c *sync.Cond) {
	d.stop()
	wait := time.Until(t)
	d.expired = !t.IsZero() && wait <= 0
	c.Broadcast()
	if t.IsZero() || d.expired {
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(wait, func() {
		c.L.Lock()
		defer c.L.Unlock()
		if d.timer == timer {
			d.expired = true
			c.Broadcast()
		}
	})
	d.timer = timer
}

type addr uint32

func (addr) Network() string { return "agent" }

func (a addr) String() string { return fmt.Sprintf("stream %d", uint32(a)) }
