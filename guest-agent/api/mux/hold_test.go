package mux

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// counted is a channel's end that counts what it carries.
type counted struct {
	net.Conn
	read, written atomic.Int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.read.Add(int64(n))
	return n, err
}

func (c *counted) Write(b []byte) (int, error) {
	c.written.Add(int64(len(b)))
	return c.Conn.Write(b)
}

// While the channel is held nothing is under way in it, and nothing that is written meanwhile, before or after is lost.
func TestHoldLosesNothing(t *testing.T) {
	const size, holds = 20 << 20, 10
	h, g := socketpair(t)
	hc, gc := &counted{Conn: h}, &counted{Conn: g}
	sessions := serve(t, gc)
	host, err := Connect(testContext(t), hc)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = host.Close() }()
	guest := next(t, sessions)
	out, from := open(t, host, guest, 2)
	in, to := open(t, host, guest, 3)
	sums := make(chan [32]byte, 4)
	send := func(w *Stream, seed byte) {
		b := make([]byte, size)
		_, _ = rand.NewChaCha8([32]byte{seed}).Read(b) // never fails
		if _, err := w.Write(b); err != nil {
			t.Error(err)
		}
		_ = w.CloseWrite()
		sums <- sha256.Sum256(b)
	}
	var got atomic.Int64
	receive := func(r *Stream) {
		sum, b := sha256.New(), make([]byte, 10_000)
		for {
			n, err := r.Read(b)
			sum.Write(b[:n])
			got.Add(int64(n))
			if err != nil {
				if err != io.EOF {
					t.Error(err)
				}
				break
			}
		}
		sums <- [32]byte(sum.Sum(nil))
	}
	go send(from, 1)
	go send(in, 2)
	go receive(out)
	go receive(to)
	for i := range int64(holds) {
		for got.Load() < i*size/holds {
			time.Sleep(time.Millisecond)
		}
		if err := host.Hold(testContext(t)); err != nil {
			t.Fatal(err)
		}
		at := [4]int64{hc.written.Load(), gc.read.Load(), gc.written.Load(), hc.read.Load()}
		if at[0] != at[1] || at[2] != at[3] {
			t.Fatalf("of %d bytes to the guest %d have come, of %d from it %d", at[0], at[1], at[2], at[3])
		}
		time.Sleep(5 * time.Millisecond) // in which anything could be sent
		if now := [4]int64{hc.written.Load(), gc.read.Load(), gc.written.Load(), hc.read.Load()}; now != at {
			t.Fatalf("while the channel was held, %d became %d", at, now)
		}
		host.Release()
	}
	seen := map[[32]byte]int{}
	for range 4 {
		seen[next(t, sums)]++
	}
	for sum, n := range seen {
		if n != 2 {
			t.Errorf("digest %x %d times", sum, n)
		}
	}
}

// A host that comes to a guest whose channel was held begins a session that isn't. Of the old one nothing is sent.
func TestHelloEndsAHold(t *testing.T) {
	h, g := socketpair(t)
	sessions := serve(t, g)
	r, _, err := handshake(testContext(t), h)
	if err != nil {
		t.Fatal(err)
	}
	old := next(t, sessions)
	if _, err := h.Write(asked(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(r, make([]byte, headerSize+heldSize)); err != nil {
		t.Fatal(err)
	}
	if _, err := old.Control().Write([]byte("never sent")); err != nil {
		t.Fatal(err)
	}
	c := &counted{Conn: h}
	s, err := Connect(testContext(t), c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	if n := c.read.Load(); n != int64(headerSize+helloSize) {
		t.Errorf("%d bytes came up to the answer", n)
	}
	next(t, old.Done())
	if err := old.Err(); !errors.Is(err, ErrReplaced) {
		t.Errorf("the old session ended with %v", err)
	}
	open(t, s, next(t, sessions), 2)
}

// awaitHold reads what the host sends up to a HOLD and returns its number, and how many bytes have been sent with it.
func awaitHold(t *testing.T, r *bufio.Reader) (number uint32, sent uint64) {
	t.Helper()
	for {
		h, err := readHeader(r)
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, h.length)
		if _, err := io.ReadFull(r, b); err != nil {
			t.Fatal(err)
		}
		if h.kind == typeHold {
			return binary.BigEndian.Uint32(b), binary.BigEndian.Uint64(b[4:]) + headerSize + holdSize
		}
	}
}

func held(number uint32, received, sent uint64) []byte {
	b := binary.BigEndian.AppendUint32(nil, number)
	b = binary.BigEndian.AppendUint64(b, received)
	return frame(typeHeld, 0, binary.BigEndian.AppendUint64(b, sent)...)
}

func asked(number uint32, sent uint64) []byte {
	return frame(typeHold, 0, binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(nil, number), sent)...)
}

func released(number uint32) []byte {
	return frame(typeRelease, 0, binary.BigEndian.AppendUint32(nil, number)...)
}

// A guest that doesn't answer in time holds nobody up. Its answer may still come, and the next Hold has one of its own.
func TestHoldIsGivenUp(t *testing.T) {
	s, g, r := rawGuest(t)
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := s.Hold(short); !errors.Is(err, context.DeadlineExceeded) || s.Err() != nil {
		t.Fatalf("Hold: %v; the session: %v", err, s.Err())
	}
	number, sent := awaitHold(t, r)
	if _, err := s.Control().Write([]byte("on")); err != nil {
		t.Fatal(err)
	}
	second := make(chan error)
	go func() { second <- s.Hold(testContext(t)) }()
	number2, sent2 := awaitHold(t, r)
	if number2 <= number || sent2 <= sent {
		t.Errorf("HOLD %d at %d after HOLD %d at %d", number2, sent2, number, sent)
	}
	if _, err := g.Write(held(number, sent, 0)); err != nil {
		t.Fatal(err)
	}
	if err := s.Hold(t.Context()); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("a Hold beside another: %v", err)
	}
	if _, err := g.Write(held(number2, sent2, uint64(headerSize+heldSize))); err != nil {
		t.Fatal(err)
	}
	if err := next(t, second); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s.Release()
	}
}

// A Hold ends with the session, and a session that is held ends at once.
func TestHoldEnds(t *testing.T) {
	s, g, r := rawGuest(t)
	ended := make(chan error)
	go func() { ended <- s.Hold(testContext(t)) }()
	awaitHold(t, r)
	_ = g.Close()
	if err := next(t, ended); !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, net.ErrClosed) && err == nil {
		t.Errorf("Hold returned %v", err)
	}
	if err := s.Hold(testContext(t)); err == nil {
		t.Error("an ended session is held")
	}
	host, guest := pair(t)
	if err := guest.Hold(t.Context()); err == nil {
		t.Error("the guest holds the channel")
	}
	if err := host.Hold(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := host.Control().Write([]byte("never sent")); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	_ = host.Close()
	if d := time.Since(began); d > lingerTimeout/2 {
		t.Errorf("Close took %v", d)
	}
}

// An agent of before is talked to, but can't be held.
func TestOldGuest(t *testing.T) {
	h, g := socketpair(t)
	go func() {
		_, e, _ := awaitHello(bufio.NewReader(g), typeHello, 1<<20)
		_, _ = g.Write(appendHello(nil, typeHelloAck, oldest, e))
	}()
	s, err := Connect(testContext(t), h)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	if err := s.Hold(t.Context()); s.CanHold() || err == nil || s.Err() != nil {
		t.Errorf("Hold: %v; the session: %v", err, s.Err())
	}
}

// A host of before gets an answer that it understands.
func TestOldHost(t *testing.T) {
	h, g := socketpair(t)
	serve(t, g)
	if _, err := h.Write(append(bytes.Clone(preamble), appendHello(nil, typeHello, oldest, epoch{3})...)); err != nil {
		t.Fatal(err)
	}
	if v, e, err := awaitHello(bufio.NewReader(h), typeHelloAck, 1<<20); v != oldest || e != (epoch{3}) || err != nil {
		t.Errorf("version %d, epoch %x, %v", v, e, err)
	}
}
