// Package mux carries many byte streams over the one channel between a host and its guest (a virtio-serial port, which
// knows neither connections nor half-close).
//
// A session begins with the host's HELLO, which carries a fresh random epoch, and the guest's HELLO_ACK with the same
// epoch. A HELLO is good at any time, also after a restore has cut the channel in the middle of a frame: it ends
// whatever session there was. Stream 1 exists from the start (control); the host opens the others.
//
// Each direction of a stream has a credit window, so a reader that stands still never stalls other streams. Neither
// side trusts the other: sizes and counts are bounded, and whatever a correct peer cannot send ends the session.
//
// The host can have the channel stand still for a moment (Hold): both sides stop between two frames and compare how many
// bytes the one has sent and the other received. A machine that is saved then has nothing under way; the one that was
// saved goes on in the same session, and one that is restored begins another.
//
// The package knows nothing of what travels in the streams.
package mux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

const (
	// Window is how many bytes a direction of a stream may hold that its reader has not taken.
	Window = 256 << 10
	// MaxStreams is how many streams a session may have open, the control stream included.
	MaxStreams = 1024
	// ControlID is the stream that exists from the start.
	ControlID = 1

	// maxFrame is the largest frame with its header: what one write to a virtio-serial port takes (the guest's
	// driver cuts longer ones, drivers/char/virtio_console.c).
	maxFrame   = 32 << 10
	maxPayload = maxFrame - headerSize
	headerSize = 8 // type u8, reserved u8, payload length u16, stream u32; big endian

	// version is what this side speaks, oldest the least that its peer has to. The guest answers with the lower one of
	// the host's and its own.
	version = 2
	oldest  = 1

	// Payloads: the hold's number u32, then counts of bytes u64.
	holdSize    = 4 + 8
	heldSize    = 4 + 8 + 8
	releaseSize = 4
)

type frameType uint8

const (
	// typeSync is no frame: zeros are what comes before a HELLO, see preamble.
	typeSync frameType = iota
	// typeHello (host) and typeHelloAck (guest) start a session; payload: hello. Stream 0.
	typeHello
	typeHelloAck
	// typeOpen (host) makes a stream. No payload.
	typeOpen
	// typeData carries 1 to maxPayload bytes and uses up as much credit.
	typeData
	// typeEOF ends the sender's direction; it is the last but for typeWindow and typeReset. No payload.
	typeEOF
	// typeReset says that its sender reads no more: the receiver drops what it has to send and answers EOF. No payload.
	typeReset
	// typeWindow gives credit back; payload: u32 bytes.
	typeWindow
	// typeHold (host) says that nothing but typeRelease follows; payload: a number that rises, and how many bytes of
	// frames the host has sent before. Stream 0, as the next two.
	typeHold
	// typeHeld (guest) answers it, and says the same of the guest; payload: that number, the bytes received up to
	// the end of the HOLD, the bytes sent before this.
	typeHeld
	// typeRelease (host) ends it; payload: that number.
	typeRelease
)

func (t frameType) String() string {
	names := [...]string{"sync", "HELLO", "HELLO_ACK", "OPEN", "DATA", "EOF", "RESET", "WINDOW", "HOLD", "HELD", "RELEASE"}
	if int(t) < len(names) {
		return names[t]
	}
	return fmt.Sprintf("type %d", uint8(t))
}

// Errors of sessions and streams, wrapped in what Err, Read and Write return.
var (
	// ErrClosed says that this side closed the session.
	ErrClosed = errors.New("agent channel closed")
	// ErrReplaced says, in the guest, that the host has begun a session anew.
	ErrReplaced = errors.New("agent channel: the host began a new session")
	// ErrReset says that the peer reads the stream no more.
	ErrReset = errors.New("agent channel: stream reset by peer")
	// ErrNoStream says that no stream of that id waits to be taken.
	ErrNoStream = errors.New("agent channel: no such stream")

	// errEnded is what a session ends with when the channel does.
	errEnded = fmt.Errorf("agent channel: %w", io.ErrUnexpectedEOF)
	// errSync is what a header of zeros gives.
	errSync = errors.New("agent channel: a HELLO follows")
)

// ProtocolError says that the peer sent what a correct peer cannot send. It ends the session.
type ProtocolError struct{ Reason string }

func (e *ProtocolError) Error() string { return "agent channel: protocol error: " + e.Reason }

func protocolErrorf(format string, args ...any) error {
	return &ProtocolError{Reason: fmt.Sprintf(format, args...)}
}

type header struct {
	kind   frameType
	length int
	stream uint32
}

func parseHeader(b []byte) (header, error) {
	h := header{
		kind:   frameType(b[0]),
		length: int(binary.BigEndian.Uint16(b[2:])),
		stream: binary.BigEndian.Uint32(b[4:]),
	}
	if h.kind == typeSync {
		return h, errSync
	}
	if b[1] != 0 {
		return h, protocolErrorf("reserved byte is %#x", b[1])
	}
	want := 0
	switch h.kind {
	case typeWindow:
		want = 4
	case typeHold:
		want = holdSize
	case typeHeld:
		want = heldSize
	case typeRelease:
		want = releaseSize
	case typeOpen, typeEOF, typeReset:
	case typeData:
		if h.length < 1 || h.length > maxPayload {
			return h, protocolErrorf("DATA of %d bytes", h.length)
		}
		want = h.length
	default: // a HELLO never comes without its preamble, an answer to none never
		return h, protocolErrorf("unexpected %v", h.kind)
	}
	if h.length != want {
		return h, protocolErrorf("%v of %d bytes", h.kind, h.length)
	}
	return h, nil
}

func appendHeader(b []byte, kind frameType, length int, stream uint32) []byte {
	b = append(b, byte(kind), 0)
	b = binary.BigEndian.AppendUint16(b, uint16(length))
	return binary.BigEndian.AppendUint32(b, stream)
}
