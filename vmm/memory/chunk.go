package memory

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
)

// ChunkLen is how many bytes the chunk of that number has in a file of that size.
func ChunkLen(size, n int64) int64 { return min(ChunkSize, size-n*ChunkSize) }

// ReadChunk reads a chunk of a file of that size into buf, which has room for one, and returns an error that wraps ErrDamaged unless it
// is what d says.
func (d Digests) ReadChunk(f *os.File, size, n int64, buf []byte) ([]byte, error) {
	chunk := buf[:ChunkLen(size, n)]
	if _, err := f.ReadAt(chunk, n*ChunkSize); errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %s: it is shorter than %d bytes", f.Name(), size)
	} else if err != nil {
		return nil, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	return chunk, d.verify(n, chunk)
}

// WriteChunk writes a chunk where there are only zeros in a file, unless it isn't what d says, which is an error that wraps ErrDamaged.
// Its pages of zeros stay holes.
func (d Digests) WriteChunk(f *os.File, n int64, chunk []byte) error {
	if err := d.verify(n, chunk); err != nil {
		return err
	}
	return dataRuns(n*ChunkSize, chunk, func(off int64, run []byte) error {
		_, err := f.WriteAt(run, off)
		return err
	})
}

// verify takes nothing for right that Digest wouldn't have made: chunks of zeros have no digest.
func (d Digests) verify(n int64, chunk []byte) error {
	if want, ok := d[n]; !ok || isZero(chunk) || sha256.Sum256(chunk) != want {
		return fmt.Errorf("%w in its MiB %d", ErrDamaged, n)
	}
	return nil
}
