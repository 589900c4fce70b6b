package mux

import "encoding/binary"

// batchSize is what the writer gathers before it writes: large enough for few system calls, small enough that an urgent
// frame waits for little. A batch may exceed it by one frame.
const batchSize = maxFrame

// schedule puts a stream in the queues that it belongs in and wakes the writer. s.mu is held.
func (s *Session) schedule(st *Stream) {
	if !st.inUrgent && (st.sendOpen || st.sendReset || st.grant > 0) {
		st.inUrgent = true
		s.urgent = append(s.urgent, st)
	}
	if !st.inBulk && st.sendable() {
		st.inBulk = true
		if st == s.control {
			s.bulk = append([]*Stream{st}, s.bulk...)
		} else {
			s.bulk = append(s.bulk, st)
		}
	}
	s.writable.Signal()
}

// writeFrames writes first, then what the streams have to send, until the session ends.
func (s *Session) writeFrames(first []byte) {
	defer close(s.written)
	batch := first
	for {
		if len(batch) > 0 {
			if _, err := s.conn.Write(batch); err != nil {
				s.end(err)
				return
			}
		}
		var more bool
		if batch, more = s.nextBatch(batch[:0]); !more {
			return
		}
	}
}

// nextBatch waits for something to send. It answers false when there will be nothing any more.
func (s *Session) nextBatch(batch []byte) (more []byte, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.err == nil && !s.closing && !s.busy() {
		s.writable.Wait()
	}
	if s.err != nil || !s.busy() {
		return nil, false
	}
	defer func() { s.hold.sent += uint64(len(more)) }()
	batch = s.hold.appendMarks(batch)
	if s.hold.still {
		return batch, true
	}
	for _, st := range s.urgent {
		batch = st.appendUrgent(batch)
	}
	s.urgent = s.urgent[:0]
	for len(s.bulk) > 0 && len(batch) < batchSize {
		st := s.bulk[0]
		s.bulk = s.bulk[1:]
		st.inBulk = false
		batch = st.appendBulk(batch)
		s.schedule(st)
	}
	return batch, true
}

// busy tells whether there is something that may be sent. s.mu is held.
func (s *Session) busy() bool {
	return len(s.hold.marks) > 0 || !s.hold.still && (len(s.urgent) > 0 || len(s.bulk) > 0)
}

// sendable tells whether the stream has data that the peer has room for, or only its EOF left to send.
func (st *Stream) sendable() bool {
	if st.eofSent {
		return false
	}
	return st.out.len() > 0 && st.credit > 0 || st.out.len() == 0 && st.writeClosed
}

func (st *Stream) appendUrgent(b []byte) []byte {
	st.inUrgent = false
	if st.sendOpen {
		st.sendOpen = false
		b = appendHeader(b, typeOpen, 0, st.id)
	}
	if st.sendReset {
		st.sendReset = false
		b = appendHeader(b, typeReset, 0, st.id)
	}
	if st.grant > 0 {
		b = appendHeader(b, typeWindow, 4, st.id)
		b = binary.BigEndian.AppendUint32(b, uint32(st.grant))
		st.grant = 0
	}
	return b
}

// appendBulk appends one frame of data, and the EOF when that was all.
func (st *Stream) appendBulk(b []byte) []byte {
	if n := min(st.out.len(), st.credit, maxPayload); n > 0 {
		b = appendHeader(b, typeData, n, st.id)
		b = st.out.appendTo(b, n)
		st.credit -= n
		st.changed.Broadcast()
	}
	if st.out.len() == 0 && st.writeClosed && !st.eofSent {
		b = appendHeader(b, typeEOF, 0, st.id)
		st.eofSent = true
		st.session.forget(st)
	}
	return b
}
