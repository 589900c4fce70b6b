package qemu

import (
	"io"
	"strings"
	"sync"
	"unicode"
)

const (
	// consoleSize is how much of the console is kept.
	consoleSize = 64 << 10
	// outputSize is how much of what QEMU itself prints is kept.
	outputSize = 4 << 10
	// tailLines and tailSize bound what of them goes into an error.
	tailLines = 8
	tailSize  = 1 << 10
)

// ring keeps the last bytes of an endless stream.
type ring struct {
	mu   sync.Mutex
	buf  []byte
	next int // where the next byte goes
	full bool
}

func newRing(size int) *ring { return &ring{buf: make([]byte, size)} }

// Write never fails.
func (r *ring) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(b)
	if len(b) >= len(r.buf) {
		copy(r.buf, b[len(b)-len(r.buf):])
		r.next, r.full = 0, true
		return n, nil
	}
	k := copy(r.buf[r.next:], b)
	if k < len(b) || r.next+k == len(r.buf) {
		copy(r.buf, b[k:])
		r.full = true
	}
	r.next = (r.next + len(b)) % len(r.buf)
	return n, nil
}

// Bytes is a copy of what is kept.
func (r *ring) Bytes() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.full {
		return append([]byte(nil), r.buf[:r.next]...)
	}
	return append(append([]byte(nil), r.buf[r.next:]...), r.buf[:r.next]...)
}

// follow keeps the tail of r until it ends; the channel is closed then.
func (r *ring) follow(from io.ReadCloser) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(r, from)
		_ = from.Close()
	}()
	return done
}

// tail makes one printable line of the last lines of a text that nobody vouches for.
func tail(b []byte) string {
	clean := strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || unicode.IsPrint(r) && r != unicode.ReplacementChar:
			return r
		case r == '\t':
			return ' '
		}
		return -1
	}, string(b))
	var lines []string
	for _, l := range strings.Split(clean, "\n") {
		if l = strings.TrimSpace(l); l != "" {
			lines = append(lines, l)
		}
	}
	s := strings.Join(lines[max(len(lines)-tailLines, 0):], " | ")
	if len(s) > tailSize {
		s = "…" + strings.ToValidUTF8(s[len(s)-tailSize:], "")
	}
	return s
}
