package mux

import (
	"errors"
	"strings"
	"testing"
)

// What no correct guest does about a hold ends its session.
func TestHostRefusesHeld(t *testing.T) {
	size := uint64(headerSize + heldSize)
	for _, tc := range []struct {
		name, want string
		bytes      func(number uint32, sent uint64) []byte
	}{
		{"a byte not received", "HELD with", func(n uint32, sent uint64) []byte { return held(n, sent-1, 0) }},
		{"a byte that was never sent", "HELD with", func(n uint32, sent uint64) []byte { return held(n, sent+1, 0) }},
		{"a byte lost", "HELD after 1 bytes, of which 0", func(n uint32, sent uint64) []byte { return held(n, sent, 1) }},
		{"a count that overflows", "HELD after 18446744073709551615", func(n uint32, sent uint64) []byte { return held(n, sent, 1<<64-1) }},
		{"another number", "HELD 2", func(n uint32, sent uint64) []byte { return held(n+1, sent, 0) }},
		{"no number", "HELD 0", func(_ uint32, sent uint64) []byte { return held(0, sent, 0) }},
		{"twice", "HELD 1 where 2", func(n uint32, sent uint64) []byte { return join(held(n, sent, 0), held(n, sent, size)) }},
		{"and goes on", "DATA while the channel is held", func(n uint32, sent uint64) []byte {
			return join(held(n, sent, 0), frame(typeData, ControlID, 1))
		}},
		{"on a stream", "HELD for stream 1", func(n uint32, sent uint64) []byte {
			return append(appendHeader(nil, typeHeld, heldSize, 1), held(n, sent, 0)[headerSize:]...)
		}},
		{"short", "HELD of 4 bytes", func(uint32, uint64) []byte { return frame(typeHeld, 0, 0, 0, 0, 1) }},
		{"a hold of its own", "HOLD for stream 0", func(uint32, uint64) []byte { return asked(1, 0) }},
		{"a release", "RELEASE for stream 0", func(n uint32, _ uint64) []byte { return released(n) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, g, r := rawGuest(t)
			if _, err := s.Control().Write([]byte("before")); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() { done <- s.Hold(testContext(t)) }()
			if _, err := g.Write(tc.bytes(awaitHold(t, r))); err != nil {
				t.Fatal(err)
			}
			next(t, s.Done())
			next(t, done)
			var broken *ProtocolError
			if !errors.As(s.Err(), &broken) || !strings.Contains(broken.Reason, tc.want) {
				t.Fatalf("the session ended with %v, want %q", s.Err(), tc.want)
			}
		})
	}
	s, g, _ := rawGuest(t)
	if _, err := g.Write(held(1, 0, 0)); err != nil {
		t.Fatal(err)
	}
	next(t, s.Done())
}

// What no correct host does about a hold ends its session, and the guest waits for another.
func TestGuestRefusesHold(t *testing.T) {
	size := uint64(headerSize + holdSize)
	for name, b := range map[string][]byte{
		"a byte that never came":  asked(1, 1),
		"no number":               asked(0, 0),
		"twice":                   join(asked(1, 0), asked(2, size)),
		"and goes on":             join(asked(1, 0), frame(typeData, ControlID, 1)),
		"release of none":         released(0),
		"release of another":      join(asked(1, 0), released(2)),
		"release twice":           join(asked(1, 0), released(1), released(1)),
		"held":                    held(1, 0, 0),
		"the same number again":   join(asked(1, 0), released(1), asked(1, size+headerSize+releaseSize)),
		"on a stream":             append(appendHeader(nil, typeHold, holdSize, 1), asked(1, 0)[headerSize:]...),
		"a release of two bytes":  frame(typeRelease, 0, 0, 0),
		"a hold without a count":  frame(typeHold, 0, 0, 0, 0, 1),
		"a hold after many bytes": asked(1, 1<<64-1),
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
			if err := s.Hold(testContext(t)); err != nil {
				t.Error(err)
			}
		})
	}
}
