// Package memory handles guest memory as files: sparse ones, their digests, sealed copies that not even a QEMU which a
// guest has taken over can change, and the sharing of such copies between processes. It knows nothing of machines.
package memory

import (
	"bytes"
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
	// ChunkSize is the unit of digests and of work, in bytes.
	ChunkSize = 1 << 20
)

// segment is a range of a file.
type segment struct{ start, end int64 }

// segments lists where a file of that size isn't a hole, in whole units.
func segments(f *os.File, size, unit int64) ([]segment, error) {
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
		all = join(all, segment{start / unit * unit, min((end+unit-1)/unit*unit, size)})
	}
	return all, nil
}

// join adds a segment that doesn't begin before the last one.
func join(all []segment, s segment) []segment {
	if n := len(all); n > 0 && all[n-1].end >= s.start {
		all[n-1].end = max(all[n-1].end, s.end)
		return all
	}
	return append(all, s)
}

// chunks are the numbers of the chunks that may hold data.
func chunks(f *os.File, size int64) ([]int64, error) {
	all, err := segments(f, size, ChunkSize)
	if err != nil {
		return nil, err
	}
	var list []int64
	for _, s := range all {
		for off := s.start; off < s.end; off += ChunkSize {
			list = append(list, off/ChunkSize)
		}
	}
	return list, nil
}

// forEachChunk calls do with every chunk that is listed, from several goroutines, with a buffer that is do's during the
// call.
func forEachChunk(f *os.File, size int64, list []int64, do func(off int64, chunk []byte) error) error {
	return parallel(len(list), func(next func() (int, bool)) error {
		buf := make([]byte, ChunkSize)
		for i, ok := next(); ok; i, ok = next() {
			off := list[i] * ChunkSize
			chunk := buf[:min(ChunkSize, size-off)]
			if _, err := f.ReadAt(chunk, off); errors.Is(err, io.EOF) {
				return fmt.Errorf("read %s: it is shorter than %d bytes", f.Name(), size)
			} else if err != nil {
				return fmt.Errorf("read %s: %w", f.Name(), err)
			}
			if err := do(off, chunk); err != nil {
				return err
			}
		}
		return nil
	})
}

// parallel has as many workers as there are processors share n pieces of work. The first error ends it.
func parallel(n int, worker func(next func() (int, bool)) error) error {
	var g errgroup.Group
	var taken atomic.Int64
	var failed atomic.Bool
	next := func() (int, bool) {
		i := int(taken.Add(1)) - 1
		return i, i < n && !failed.Load()
	}
	for range min(runtime.GOMAXPROCS(0), n) {
		g.Go(func() error {
			err := worker(next)
			if err != nil {
				failed.Store(true)
			}
			return err
		})
	}
	return g.Wait()
}

var zeros [ChunkSize]byte

func isZero(b []byte) bool { return bytes.Equal(b, zeros[:len(b)]) }

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

// Copy copies a memory of that size to dst, which is empty, and returns its digests. Zero pages become holes.
func Copy(dst, src *os.File, size int64) (Digests, error) {
	var d digester
	if err := copyData(dst, src, size, d.add); err != nil {
		return nil, err
	}
	return d.all(), nil
}

// copyData is Copy that shows see each chunk.
func copyData(dst, src *os.File, size int64, see func(off int64, chunk []byte)) error {
	err := dst.Truncate(size)
	var list []int64
	if err == nil {
		list, err = chunks(src, size)
	}
	if err == nil {
		err = forEachChunk(src, size, list, func(off int64, chunk []byte) error {
			see(off, chunk)
			return dataRuns(off, chunk, func(off int64, run []byte) error {
				_, err := dst.WriteAt(run, off)
				return err
			})
		})
	}
	if err != nil {
		return fmt.Errorf("copy the memory: %w", err)
	}
	return nil
}
