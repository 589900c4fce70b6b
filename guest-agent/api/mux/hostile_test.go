package mux

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

func frame(kind frameType, stream uint32, payload ...byte) []byte {
	return append(appendHeader(nil, kind, len(payload), stream), payload...)
}

func window(stream, n uint32) []byte {
	return frame(typeWindow, stream, binary.BigEndian.AppendUint32(nil, n)...)
}

func join(frames ...[]byte) (b []byte) {
	for _, f := range frames {
		b = append(b, f...)
	}
	return b
}

// rawGuest gives the host's session a guest that the test speaks for.
func rawGuest(t testing.TB) (*Session, net.Conn, *bufio.Reader) {
	t.Helper()
	h, g := socketpair(t)
	r := bufio.NewReader(g)
	go func() {
		_, e, err := awaitHello(r, typeHello, 1<<20)
		if err == nil {
			_, _ = g.Write(appendHello(nil, typeHelloAck, version, e))
		}
	}()
	s, err := Connect(testContext(t), h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, g, r
}

// What a hostile guest can send ends its session and nothing else.
func TestHostRefuses(t *testing.T) {
	full := frame(typeData, 2, make([]byte, maxPayload)...)
	for _, tc := range []struct {
		name, want string
		bytes      []byte
	}{
		{"zeros", "zeros", make([]byte, headerSize)},
		{"unknown type", "type 99", frame(99, 2)},
		{"reserved byte", "reserved", []byte{4, 1, 0, 1, 0, 0, 0, 2, 0}},
		{"empty data", "DATA of 0 bytes", frame(typeData, 2)},
		{"oversize data", "DATA of 65535", []byte{byte(typeData), 0, 0xff, 0xff, 0, 0, 0, 2}},
		{"payload where none belongs", "EOF of 1 bytes", frame(typeEOF, 2, 0)},
		{"short window", "WINDOW of 3 bytes", frame(typeWindow, 2, 0, 0, 1)},
		{"open", "OPEN for stream 7", frame(typeOpen, 7)},
		{"open of an open stream", "OPEN on stream 2", frame(typeOpen, 2)},
		{"hello", "unexpected HELLO", appendHello(nil, typeHello, version, epoch{})},
		{"second answer", "unexpected HELLO_ACK", appendHello(nil, typeHelloAck, version, epoch{})},
		{"data for nobody", "DATA for stream 9", frame(typeData, 9, 1)},
		{"eof for nobody", "EOF for stream 9", frame(typeEOF, 9)},
		{"window for nobody", "WINDOW for stream 9", window(9, 1)},
		{"reset for nobody", "RESET for stream 9", frame(typeReset, 9)},
		{"stream 0", "DATA for stream 0", frame(typeData, 0, 1)},
		{"data after eof", "DATA after EOF", join(frame(typeEOF, 2), frame(typeData, 2, 1))},
		{"two eofs", "second EOF", join(frame(typeEOF, 2), frame(typeEOF, 2))},
		{"two resets", "RESET", join(frame(typeReset, 2), frame(typeReset, 2))},
		{"empty window", "WINDOW of 0", window(2, 0)},
		{"window beyond", "WINDOW of 1", window(2, 1)},
		{"window overflow", "WINDOW of 4294967295", window(2, 0xffffffff)},
		{"more than the window", "beyond the window", join(full, full, full, full, full, full, full, full, full)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, g, _ := rawGuest(t)
			st, err := s.Open(2)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := g.Write(tc.bytes); err != nil {
				t.Fatal(err)
			}
			next(t, s.Done())
			var broken *ProtocolError
			if !errors.As(s.Err(), &broken) || !strings.Contains(broken.Reason, tc.want) {
				t.Fatalf("the session ended with %v, want %q", s.Err(), tc.want)
			}
			if _, err := io.Copy(io.Discard, st); !errors.Is(err, s.Err()) && err != nil {
				t.Errorf("the stream ended with %v", err)
			}
			if _, err := io.Copy(io.Discard, g); err != nil && !errors.Is(err, net.ErrClosed) {
				t.Errorf("the channel wasn't closed: %v", err)
			}
		})
	}
}

// A host that breaks the protocol loses its session; the guest waits for the next one.
func TestGuestRecovers(t *testing.T) {
	for name, b := range map[string][]byte{
		"rubbish":         []byte("\xff\xff\xff\xff\xff\xff\xff\xff"),
		"open twice":      join(frame(typeOpen, 2), frame(typeOpen, 2)),
		"data for nobody": frame(typeData, 5, 1),
		"too many": func() (b []byte) {
			for id := uint32(2); id < MaxStreams+2; id++ {
				b = append(b, frame(typeOpen, id)...)
			}
			return b
		}(),
	} {
		t.Run(name, func(t *testing.T) {
			h, g := socketpair(t)
			sessions := serve(t, g)
			if _, _, err := handshake(testContext(t), h); err != nil {
				t.Fatal(err)
			}
			old := next(t, sessions)
			if _, err := h.Write(b); err != nil {
				t.Fatal(err)
			}
			next(t, old.Done())
			var broken *ProtocolError
			if !errors.As(old.Err(), &broken) {
				t.Errorf("the session ended with %v", old.Err())
			}
			s, err := Connect(testContext(t), h)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			open(t, s, next(t, sessions), 2)
		})
	}
}

// What may be under way when a stream ends is let pass, but not without end.
func TestLateFrames(t *testing.T) {
	s, g, r := rawGuest(t)
	st, err := s.Open(2)
	if err != nil {
		t.Fatal(err)
	}
	_ = st.Close()
	for h := (header{}); h.kind != typeEOF; {
		if h, err = readHeader(r); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := g.Write(frame(typeEOF, 2)); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Write(join(window(2, 1), window(2, 1), frame(typeReset, 2), frame(typeData, 1, 'x'))); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Control().Read(make([]byte, 1)); err != nil {
		t.Fatalf("the session ended: %v", err)
	}
	for range 2 * lateFrames {
		if _, err := g.Write(window(2, 1)); err != nil {
			break
		}
	}
	next(t, s.Done())
	var broken *ProtocolError
	if !errors.As(s.Err(), &broken) {
		t.Fatalf("the session ended with %v", s.Err())
	}
}

// A guest that reads nothing holds up neither Close nor a write with a deadline.
func TestPeerThatDoesNotRead(t *testing.T) {
	h, g := net.Pipe()
	defer func() { _ = g.Close() }()
	go func() {
		_, e, _ := awaitHello(bufio.NewReader(g), typeHello, 1<<20)
		_, _ = g.Write(appendHello(nil, typeHelloAck, version, e))
	}()
	s, err := Connect(testContext(t), h)
	if err != nil {
		t.Fatal(err)
	}
	st, err := s.Open(2)
	if err != nil {
		t.Fatal(err)
	}
	_ = st.SetDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := st.Write(make([]byte, 10*Window)); err == nil || n > Window+maxOut {
		t.Errorf("wrote %d bytes to a peer that doesn't read: %v", n, err)
	}
	start := time.Now()
	_ = s.Close()
	if d := time.Since(start); d > lingerTimeout+5*time.Second {
		t.Errorf("Close took %v", d)
	}
}

func FuzzHost(f *testing.F) {
	f.Add(join(frame(typeData, 2, 1, 2, 3), frame(typeEOF, 2), frame(typeReset, 2)))
	f.Add(join(window(2, 100), frame(typeReset, 1), frame(typeData, 1, 5)))
	f.Add(join(frame(typeEOF, 2), frame(typeReset, 2), window(2, 7), frame(typeReset, 2)))
	f.Add(join(held(1, 0, 0), frame(typeData, 1, 5)))
	f.Fuzz(func(t *testing.T, b []byte) { fuzzSession(t, b, true) })
}

func FuzzGuest(f *testing.F) {
	f.Add(join(frame(typeOpen, 3), frame(typeData, 3, 1, 2, 3), frame(typeEOF, 3), frame(typeReset, 3)))
	f.Add(join(frame(typeOpen, 3), frame(typeOpen, 4), window(3, 100), frame(typeReset, 4), preamble))
	f.Add(join(asked(1, 0), released(1), frame(typeOpen, 3), asked(2, 44)))
	f.Fuzz(func(t *testing.T, b []byte) { fuzzSession(t, b, false) })
}

// fuzzSession lets a session with work of its own read b, and checks what must hold whatever comes.
func fuzzSession(t *testing.T, b []byte, host bool) {
	s := newSession(io.Discard, host, version)
	go s.writeFrames(nil)
	st := s.add(2)
	st.taken = true
	if _, err := st.Write(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(strings.NewReader(string(b)))
	s.end(s.readFrames(r))
	<-s.written
	checkBounds(t, s)
}

// checkBounds checks what must hold of a session that has ended, whatever came.
func checkBounds(t *testing.T, s *Session) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.streams) > MaxStreams {
		t.Fatalf("%d streams", len(s.streams))
	}
	for _, st := range s.streams {
		if st.in.len() > Window || st.credit < 0 || st.credit > Window || st.allowed < 0 || st.allowed > Window {
			t.Fatalf("stream %d holds %d bytes, credit %d, allowed %d", st.id, st.in.len(), st.credit, st.allowed)
		}
	}
}

// FuzzServe lets the guest read whatever comes over the channel: HELLOs too, one session after another.
func FuzzServe(f *testing.F) {
	hello := join(make([]byte, headerSize), appendHello(nil, typeHello, version, epoch{1}))
	f.Add(join(hello, frame(typeOpen, 3), frame(typeData, 3, 1, 2), hello, frame(typeOpen, 3), frame(typeEOF, 3)))
	f.Add(join(hello, frame(99, 2), appendHello(nil, typeHello, version, epoch{2}), window(1, 1), hello))
	f.Add(join([]byte("rubbish"), hello[:len(hello)-3], hello, frame(typeData, 1, 7)))
	f.Fuzz(func(t *testing.T, b []byte) {
		sessions := make(chan *Session, len(b)/helloSize+1)
		channel := struct {
			io.Reader
			io.Writer
		}{bytes.NewReader(b), io.Discard}
		err := Serve(channel, func(s *Session) { sessions <- s })
		if err != io.EOF && err != io.ErrUnexpectedEOF {
			t.Fatalf("ended with %v", err)
		}
		for {
			select {
			case s := <-sessions:
				<-s.Done()
				checkBounds(t, s)
			default:
				return
			}
		}
	})
}
