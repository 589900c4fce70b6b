package hostile

import (
	"encoding/binary"
	"math/rand/v2"
	"net"
	"strings"

	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// begin begins what doesn't wait for an answer or an event.
func (s *service) begin() {
	switch {
	case s.is(Garbage):
		random := rand.NewChaCha8([32]byte{})
		go s.flood(func(b []byte) { _, _ = random.Read(b) }) // never fails
	case s.is(HugeFrame):
		go s.flood(func(b []byte) { copy(b, []byte{4, 0, 0xff, 0xff, 0, 0, 0, mux.ControlID}) })
	case s.is(Deaf):
		s.wire.deaf.Store(true)
	case s.is(Stray):
		go func() {
			conn := s.session.Control()
			for id := uint32(1); ; id++ {
				if _, err := conn.Write(message(id, typeResponse, 0)); err != nil {
					return
				}
			}
		}()
	}
}

// flood writes to the channel without end, past the session.
func (s *service) flood(fill func([]byte)) {
	b := make([]byte, 64<<10)
	for {
		fill(b)
		if _, err := s.wire.Write(b); err != nil {
			return
		}
	}
}

func spew(to net.Conn) {
	b := []byte(strings.Repeat("y\n", 16<<10))
	for {
		if _, err := to.Write(b); err != nil {
			return
		}
	}
}

// heldHeader begins a frame that says that the channel is held, which is the last of a write; its payload has a number
// u32 and counts u64 of the bytes received and sent (package mux).
var heldHeader = []byte{9, 0, 0, heldSize, 0, 0, 0, 0}

const heldSize = 4 + 8 + 8

// spoilHeld makes of a write with that frame at its end what the mode wants.
func (w *wire) spoilHeld(b []byte, held int) []byte {
	b = append([]byte(nil), b...)
	switch {
	case w.is(Unheld):
		return b[:held]
	case w.is(Miscount):
		b[held+len(heldHeader)+4+7]++
	case w.is(Chatter):
		b = append(b, 4, 0, 0, 1, 0, 0, 0, mux.ControlID, 0)
	}
	return b
}

// Messages of ttrpc: a header of the payload's length u32, the stream u32, the type and flags u8; big endian.
const (
	headerSize   = 10
	typeResponse = 2
	typeData     = 3
)

func message(id uint32, kind byte, length uint32) []byte {
	b := binary.BigEndian.AppendUint32(nil, length)
	b = binary.BigEndian.AppendUint32(b, id)
	return append(b, kind, 0)
}

// control is the control stream; what the service answers goes through it.
type control struct {
	net.Conn
	service *service
	left    int // of a message that began in an earlier write; ttrpc writes from one goroutine
}

// Write passes a message on, or something like it.
func (c *control) Write(b []byte) (int, error) {
	if c.left > 0 {
		n, err := c.Conn.Write(b)
		c.left -= n
		return n, err
	}
	length := headerSize + int(binary.BigEndian.Uint32(b))
	if len(b) < length || !c.service.armed.Load() {
		n, err := c.Conn.Write(b)
		c.left = length - n
		return n, err
	}
	if _, err := c.Conn.Write(c.spoil(b)); err != nil {
		return 0, err
	}
	return len(b), nil
}

// spoil makes of a whole message what the mode wants.
func (c *control) spoil(m []byte) []byte {
	b := append([]byte(nil), m...)
	id := binary.BigEndian.Uint32(b[4:])
	switch s := c.service; {
	case s.is(HugeMessage):
		b = append(message(id, typeResponse, 0xfffffff0), make([]byte, 1<<20)...)
	case s.is(WrongID):
		binary.BigEndian.PutUint32(b[4:], id+1000)
	case s.is(WrongType):
		b[8] ^= typeResponse ^ typeData
	case s.is(Twice):
		b = append(b, m...)
	case s.is(Torn):
		for i := range b[headerSize:] {
			b[headerSize+i] = 0xff
		}
	}
	return b
}
