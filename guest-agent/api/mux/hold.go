package mux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// holdVersion is the first version of the protocol that has typeHold, typeHeld and typeRelease.
const holdVersion = 2

// hold is what a session knows of its standing still. Session.mu guards it.
type hold struct {
	sent, received uint64 // bytes of whole frames, HELLO and HELLO_ACK aside
	marks          []mark // to be sent before all else
	still          bool   // this side sends nothing but marks
	peerStill      bool   // nothing but marks may come
	number         uint32 // of the latest HOLD

	// Only on the host:
	held     chan struct{} // closed when the latest HOLD has been answered; nil after its Release
	asked    uint32        // the latest HOLD that has been sent
	until    uint64        // what had been sent with it
	answered uint32        // the latest HELD
}

// mark is a frame that begins or ends a hold.
type mark struct {
	kind   frameType
	number uint32
}

// Hold has both sides stand still: it returns when every byte that either has sent has been received by the other, and
// neither sends any until Release. What is written meanwhile waits. Only for the host, and one at a time. When it fails,
// because ctx ends first or the session does, the channel goes on.
//
// A machine that is saved in between has nothing under way in its channel. This side goes on with it after Release; a
// machine that is restored waits for a HELLO.
func (s *Session) Hold(ctx context.Context) error {
	held, err := s.askHold()
	if err != nil {
		return err
	}
	select {
	case <-held:
		return nil
	case <-s.done:
		return s.err
	case <-ctx.Done():
		s.Release()
		return fmt.Errorf("agent channel: wait for the guest to hold it: %w", context.Cause(ctx))
	}
}

func (s *Session) askHold() (held <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := &s.hold
	switch {
	case !s.host:
		return nil, errors.New("agent channel: only the host holds it")
	case s.err != nil:
		return nil, s.err
	case !s.CanHold():
		return nil, errors.New("agent channel: the guest's agent is too old to hold it")
	case h.held != nil:
		return nil, errors.New("agent channel: it is held already")
	}
	h.number++
	h.held = make(chan struct{})
	h.marks = append(h.marks, mark{typeHold, h.number})
	s.writable.Signal()
	return h.held, nil
}

// CanHold tells whether the guest's agent is of a version that can be asked to hold the channel.
func (s *Session) CanHold() bool { return s.version >= holdVersion }

// Release lets both sides go on after a Hold. Idempotent.
func (s *Session) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := &s.hold
	if h.held == nil {
		return
	}
	h.held, h.peerStill = nil, false
	if !h.withdraw(mark{typeHold, h.number}) {
		h.marks = append(h.marks, mark{typeRelease, h.number})
	}
	s.writable.Signal()
}

// withdraw takes back a mark that hasn't been sent.
func (h *hold) withdraw(m mark) bool {
	i := slices.Index(h.marks, m)
	if i >= 0 {
		h.marks = slices.Delete(h.marks, i, i+1)
	}
	return i >= 0
}

// appendMarks appends what comes before all else. s.mu is held, and sent doesn't count b yet.
func (h *hold) appendMarks(b []byte) []byte {
	for _, m := range h.marks {
		before := h.sent + uint64(len(b))
		switch m.kind {
		case typeHold:
			h.still, h.asked, h.until = true, m.number, before+headerSize+holdSize
			b = appendHeader(b, typeHold, holdSize, 0)
			b = binary.BigEndian.AppendUint32(b, m.number)
			b = binary.BigEndian.AppendUint64(b, before)
		case typeHeld:
			h.still = true
			b = appendHeader(b, typeHeld, heldSize, 0)
			b = binary.BigEndian.AppendUint32(b, m.number)
			b = binary.BigEndian.AppendUint64(b, h.received)
			b = binary.BigEndian.AppendUint64(b, before)
		case typeRelease:
			h.still = false
			b = appendHeader(b, typeRelease, releaseSize, 0)
			b = binary.BigEndian.AppendUint32(b, m.number)
		}
	}
	h.marks = h.marks[:0]
	return b
}

// receiveMark handles a frame of a hold. s.mu is held.
func (s *Session) receiveMark(hd header, payload []byte) error {
	if hd.stream != 0 || s.host != (hd.kind == typeHeld) {
		return protocolErrorf("%v for stream %d", hd.kind, hd.stream)
	}
	number, counts := binary.BigEndian.Uint32(payload), payload[4:]
	var err error
	switch hd.kind {
	case typeHold:
		err = s.hold.receiveHold(number, binary.BigEndian.Uint64(counts))
	case typeHeld:
		err = s.hold.receiveHeld(number, binary.BigEndian.Uint64(counts), binary.BigEndian.Uint64(counts[8:]))
	case typeRelease:
		err = s.hold.receiveRelease(number)
	}
	s.writable.Signal()
	return err
}

// receiveHold is the guest's: it answers as soon as it has sent what it has begun to.
func (h *hold) receiveHold(number uint32, sent uint64) error {
	switch {
	case h.peerStill || number <= h.number:
		return protocolErrorf("HOLD %d after HOLD %d", number, h.number)
	case sent != h.received:
		return protocolErrorf("HOLD after %d bytes, of which %d have come", sent, h.received)
	}
	h.number, h.peerStill = number, true
	h.marks = append(h.marks, mark{typeHeld, number})
	return nil
}

// receiveRelease is the guest's. The host may have given up before it had the answer.
func (h *hold) receiveRelease(number uint32) error {
	if !h.peerStill || number != h.number {
		return protocolErrorf("RELEASE %d of no HOLD", number)
	}
	h.peerStill = false
	if !h.withdraw(mark{typeHeld, number}) {
		h.still = false
	}
	return nil
}

// receiveHeld is the host's. It may be the answer to a HOLD that has been given up.
func (h *hold) receiveHeld(number uint32, received, sent uint64) error {
	switch {
	case number <= h.answered || number > h.asked:
		return protocolErrorf("HELD %d where %d to %d are waiting", number, h.answered+1, h.asked)
	case sent != h.received:
		return protocolErrorf("HELD after %d bytes, of which %d have come", sent, h.received)
	case number == h.asked && received != h.until:
		return protocolErrorf("HELD with %d bytes of %d", received, h.until)
	}
	h.answered = number
	if h.held != nil && number == h.number {
		h.peerStill = true
		close(h.held)
	}
	return nil
}
