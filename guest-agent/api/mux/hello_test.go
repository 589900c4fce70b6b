package mux

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// A restore cuts the host's bytes anywhere. Whatever the guest was in the middle of, a new session works.
func TestHelloInTheMiddleOfAFrame(t *testing.T) {
	data := append(appendHeader(nil, typeData, 1000, ControlID), make([]byte, 1000)...)
	largest := append(appendHeader(nil, typeData, maxPayload, ControlID), make([]byte, maxPayload)...)
	hello := append(preamble, appendHello(nil, typeHello, version, epoch{9})...)
	for name, partial := range map[string][]byte{
		"nothing":        nil,
		"one byte":       data[:1],
		"half a header":  data[:5],
		"a header":       data[:headerSize],
		"half a payload": data[:500],
		"all but a byte": data[:len(data)-1],
		"largest":        largest[:headerSize],
		"largest header": largest[:headerSize-1],
		"a preamble":     hello[:len(preamble)/2],
		"a hello":        hello[:len(hello)-5],
		"rubbish":        []byte("\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
	} {
		t.Run(name, func(t *testing.T) {
			h, g := socketpair(t)
			sessions := serve(t, g)
			// The first life's host vanishes without a word; its bytes stay in the channel.
			if _, _, err := handshake(testContext(t), h); err != nil {
				t.Fatal(err)
			}
			old := next(t, sessions)
			if _, err := h.Write(partial); err != nil {
				t.Fatal(err)
			}
			s, err := Connect(testContext(t), h)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			next(t, old.Done())
			var broken *ProtocolError
			if !errors.Is(old.Err(), ErrReplaced) && !errors.As(old.Err(), &broken) {
				t.Errorf("the old session ended with %v", old.Err())
			}
			guest := next(t, sessions)
			for guest.Err() != nil { // a cut HELLO that the preamble completed
				guest = next(t, sessions)
			}
			open(t, s, guest, 2)
		})
	}
}

// The guest was sending when its memory was saved: the new host skips what is left of that.
func TestConnectSkipsAnOlderLifesBytes(t *testing.T) {
	h, g := socketpair(t)
	sessions := serve(t, g)
	if _, _, err := handshake(testContext(t), h); err != nil {
		t.Fatal(err)
	}
	old := next(t, sessions)
	blocked := make(chan error)
	go func() {
		for {
			if _, err := old.Control().Write(make([]byte, 1<<20)); err != nil {
				blocked <- err
				return
			}
		}
	}()
	s, err := Connect(testContext(t), h)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	if err := next(t, blocked); !errors.Is(err, ErrReplaced) {
		t.Errorf("the old session's writer got %v", err)
	}
	open(t, s, next(t, sessions), 2)
}

// What a workload is sent may look like a HELLO and must not be taken for one.
func TestHelloInAPayloadIsData(t *testing.T) {
	host, guest := pair(t)
	h, g := open(t, host, guest, 2)
	want := append(preamble, appendHello(nil, typeHello, version, epoch{7})...)
	for range 3 {
		if _, err := h.Write(want); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(want))
		if _, err := io.ReadFull(g, got); err != nil || string(got) != string(want) {
			t.Fatalf("payload came damaged: %v", err)
		}
	}
	if err := guest.Err(); err != nil {
		t.Fatal(err)
	}
}

func TestConnectFails(t *testing.T) {
	cancelled, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("nobody waits any more"))
	short, cancel2 := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel2()
	for _, tc := range []struct {
		name, want string
		ctx        context.Context
		guest      func(net.Conn)
	}{
		{"silence", "deadline exceeded", short, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }},
		{"cancelled", "nobody waits any more", cancelled, func(net.Conn) {}},
		{"gone", "closed pipe", testContext(t), func(c net.Conn) {
			_, _ = io.ReadFull(c, make([]byte, 1000))
			_ = c.Close()
		}},
		{"noise", "no answer in", testContext(t), func(c net.Conn) {
			go func() { _, _ = io.Copy(io.Discard, c) }()
			for {
				if _, err := c.Write(make([]byte, 64<<10)); err != nil {
					return
				}
			}
		}},
		{"another version", "speaks version 3, this host 1 to 2", testContext(t), func(c net.Conn) {
			_, e, _ := awaitHello(bufio.NewReader(c), typeHello, 1<<20)
			b := appendHello(nil, typeHelloAck, version, e)
			b[headerSize+len(magic)+1] = 3
			_, _ = c.Write(b)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h, g := net.Pipe()
			defer func() { _ = g.Close() }()
			go tc.guest(g)
			_, err := Connect(tc.ctx, h)
			if err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("got %q, want %q in one line", err, tc.want)
			}
			if _, err := h.Write([]byte{0}); !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("the channel is still open: %v", err)
			}
		})
	}
}
