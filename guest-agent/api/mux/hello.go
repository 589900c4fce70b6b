package mux

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

const (
	magic = "CUBEMUX1"
	// helloSize is the payload of HELLO and HELLO_ACK: magic, version u16, epoch.
	helloSize = len(magic) + 2 + len(epoch{})
	// maxStale is how much of an older life may come before the answer to a HELLO: the port's transmit queue
	// (128 buffers of 32 KiB) and the socket's buffers, with room to spare.
	maxStale = 16 << 20
	// readBuffer is what is read from the channel at once.
	readBuffer = 64 << 10
)

// epoch tells one session from any other that the two memories have ever seen.
type epoch [16]byte

// preamble comes before each HELLO. Wherever in a frame the guest stands, this many zeros fill the frame up and leave at
// least one whole header of zeros, which is no frame. The guest then looks for a HELLO; it never does so while it is
// inside of a frame, so nothing that a workload writes can pass for one.
var preamble = make([]byte, maxFrame+headerSize)

func appendHello(b []byte, kind frameType, v uint16, e epoch) []byte {
	b = appendHeader(b, kind, helloSize, 0)
	b = append(b, magic...)
	b = binary.BigEndian.AppendUint16(b, v)
	return append(b, e[:]...)
}

// parseHello reads what follows the magic in a HELLO.
func parseHello(b []byte) (v uint16, e epoch) {
	return binary.BigEndian.Uint16(b), epoch(b[2:])
}

// awaitHello skips to the next frame of that kind with a magic and reads it; at most limit bytes may come before it.
func awaitHello(r *bufio.Reader, kind frameType, limit int) (v uint16, e epoch, err error) {
	if err := skipPast(r, append(appendHeader(nil, kind, helloSize, 0), magic...), limit); err != nil {
		return 0, epoch{}, err
	}
	rest := make([]byte, helloSize-len(magic))
	if _, err := io.ReadFull(r, rest); err != nil {
		return 0, epoch{}, unexpected(err)
	}
	v, e = parseHello(rest)
	return v, e, nil
}

// Connect says hello with a fresh epoch over the agent channel and waits for the guest's answer until ctx ends, skipping
// whatever bytes of an older life come first. It owns conn, also when it fails.
func Connect(ctx context.Context, conn net.Conn) (*Session, error) {
	r, v, err := handshake(ctx, conn)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	s := newSession(conn, true, v)
	s.onEnd = func() { _ = conn.Close() }
	go func() {
		err := s.readFrames(r)
		if errors.Is(err, errSync) { // only a host says hello
			err = protocolErrorf("frame of zeros")
		}
		s.end(err)
	}()
	go s.writeFrames(nil)
	return s, nil
}

// handshake says hello and returns a reader of what comes after the answer, and the version that the guest speaks.
func handshake(ctx context.Context, conn net.Conn) (_ *bufio.Reader, v uint16, err error) {
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		_ = conn.SetDeadline(time.Unix(1, 0))
	})
	defer func() {
		if !stop() {
			<-interrupted
			_ = conn.SetDeadline(time.Time{})
			err = context.Cause(ctx)
		}
		if err != nil {
			err = fmt.Errorf("say hello to the guest's agent: %w", err)
		}
	}()
	var mine epoch
	_, _ = rand.Read(mine[:]) // never fails (crypto/rand)
	if _, err := conn.Write(appendHello(bytes.Clone(preamble), typeHello, version, mine)); err != nil {
		return nil, 0, err
	}
	r := bufio.NewReaderSize(conn, readBuffer)
	for {
		v, e, err := awaitHello(r, typeHelloAck, maxStale)
		switch {
		case err != nil:
			return nil, 0, unexpected(err)
		case e != mine: // an answer that an older life was still waiting for
			continue
		case v < oldest || v > version:
			return nil, 0, protocolErrorf("the guest's agent speaks version %d, this host %d to %d", v, oldest, version)
		}
		return r, v, nil
	}
}

// skipPast reads until it has read pattern, at most limit bytes before it.
func skipPast(r *bufio.Reader, pattern []byte, limit int) error {
	for skipped := 0; skipped <= limit; {
		if _, err := r.Peek(len(pattern)); err != nil {
			return err
		}
		b, _ := r.Peek(r.Buffered())
		if i := bytes.Index(b, pattern); i >= 0 {
			_, err := r.Discard(i + len(pattern))
			return err
		}
		n, _ := r.Discard(len(b) - len(pattern) + 1)
		skipped += n
	}
	return protocolErrorf("no answer in %d bytes", limit)
}
