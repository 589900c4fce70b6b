package mux

// buffer is a first-in first-out byte buffer. Its users bound it.
type buffer struct {
	b   []byte
	off int // b[off:] is what it holds
}

// keepCapacity is what an empty buffer may hold on to.
const keepCapacity = 4 << 10

func (b *buffer) len() int { return len(b.b) - b.off }

func (b *buffer) write(p []byte) {
	if b.off > 0 && len(b.b)+len(p) > cap(b.b) {
		b.b = b.b[:copy(b.b, b.b[b.off:])]
		b.off = 0
	}
	b.b = append(b.b, p...)
}

// read moves up to len(p) bytes into p.
func (b *buffer) read(p []byte) int {
	n := copy(p, b.b[b.off:])
	b.skip(n)
	return n
}

// appendTo moves n bytes, which it must hold, to the end of dst.
func (b *buffer) appendTo(dst []byte, n int) []byte {
	dst = append(dst, b.b[b.off:b.off+n]...)
	b.skip(n)
	return dst
}

func (b *buffer) skip(n int) {
	b.off += n
	if b.off == len(b.b) {
		b.reset()
	}
}

// reset empties it.
func (b *buffer) reset() {
	b.b, b.off = b.b[:0], 0
	if cap(b.b) > keepCapacity {
		b.b = nil
	}
}
