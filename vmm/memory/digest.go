// Package memory handles guest memory as files: sparse ones, their digests, sealed copies that not even a QEMU which a
// guest has taken over can change, and the sharing of such copies between processes. It knows nothing of machines.
package memory

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	pageSize = 4 << 10
	// chunkSize is the unit of digests and of work.
	chunkSize = 1 << 20
)

// segment is a range of a file that may hold data.
type segment struct{ start, end int64 }

// segments lists where a file of that size isn't a hole, in whole chunks.
func segments(f *os.File, size int64) ([]segment, error) {
	var all []segment
	for at := int64(0); at < size; {
		start, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("look for data in %s: %w", f.Name(), err)
		}
		end, err := unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return nil, fmt.Errorf("look for holes in %s: %w", f.Name(), err)
		}
		at = end
		s := segment{start / chunkSize * chunkSize, min((end+chunkSize-1)/chunkSize*chunkSize, size)}
		if n := len(all); n > 0 && all[n-1].end >= s.start {
			all[n-1].end = max(all[n-1].end, s.end)
		} else {
			all = append(all, s)
		}
	}
	return all, nil
}

// forEachChunk calls do with every chunk that may hold data, from several goroutines, with a buffer that is do's during
// the call.
func forEachChunk(f *os.File, size int64, do func(off int64, chunk []byte) error) error {
	all, err := segments(f, size)
	if err != nil {
		return err
	}
	var offs []int64
	for _, s := range all {
		for off := s.start; off < s.end; off += chunkSize {
			offs = append(offs, off)
		}
	}
	var g errgroup.Group
	var next atomic.Int64
	for range min(runtime.GOMAXPROCS(0), len(offs)) {
		g.Go(func() error {
			buf := make([]byte, chunkSize)
			for {
				i := int(next.Add(1)) - 1
				if i >= len(offs) {
					return nil
				}
				chunk := buf[:min(chunkSize, size-offs[i])]
				if _, err := f.ReadAt(chunk, offs[i]); err != nil && !errors.Is(err, io.EOF) {
					return fmt.Errorf("read %s: %w", f.Name(), err)
				} else if err != nil {
					return fmt.Errorf("read %s: it is shorter than %d bytes", f.Name(), size)
				}
				if err := do(offs[i], chunk); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// digester combines the digests of chunks, whatever order they come in.
type digester struct{ sums [][sha256.Size]byte }

func newDigester(size int64) *digester {
	return &digester{sums: make([][sha256.Size]byte, (size+chunkSize-1)/chunkSize)}
}

// add may be called from many goroutines, each with chunks of its own.
func (d *digester) add(off int64, chunk []byte) {
	if !isZero(chunk) { // a hole and zeros are the same memory
		d.sums[off/chunkSize] = sha256.Sum256(chunk)
	}
}

func (d *digester) String() string {
	h := sha256.New()
	for i, sum := range d.sums {
		if sum != ([sha256.Size]byte{}) {
			_ = binary.Write(h, binary.BigEndian, uint64(i))
			h.Write(sum[:])
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

var zeros [chunkSize]byte

func isZero(b []byte) bool { return bytes.Equal(b, zeros[:len(b)]) }

// Digest is the digest of a memory of that size: over the SHA-256 of each chunk of 1 MiB that isn't zero, and its place.
func Digest(f *os.File, size int64) (string, error) {
	d := newDigester(size)
	err := forEachChunk(f, size, func(off int64, chunk []byte) error {
		d.add(off, chunk)
		return nil
	})
	return d.String(), err
}

// dataRuns calls do with each run of pages that aren't zero.
func dataRuns(off int64, chunk []byte, do func(off int64, run []byte) error) error {
	for at := 0; at < len(chunk); {
		start := at
		for at < len(chunk) && !isZero(chunk[at:min(at+pageSize, len(chunk))]) {
			at = min(at+pageSize, len(chunk))
		}
		if at == start {
			at += pageSize
			continue
		}
		if err := do(off+int64(start), chunk[start:at]); err != nil {
			return err
		}
	}
	return nil
}

// Copy copies a memory of that size to dst, which is empty, and returns its digest. Zero pages become holes.
func Copy(dst, src *os.File, size int64) (digest string, err error) {
	if err := dst.Truncate(size); err != nil {
		return "", fmt.Errorf("copy the memory: %w", err)
	}
	d := newDigester(size)
	err = forEachChunk(src, size, func(off int64, chunk []byte) error {
		d.add(off, chunk)
		return dataRuns(off, chunk, func(off int64, run []byte) error {
			_, err := dst.WriteAt(run, off)
			return err
		})
	})
	if err != nil {
		return "", fmt.Errorf("copy the memory: %w", err)
	}
	return d.String(), nil
}
