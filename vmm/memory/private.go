package memory

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// clusterSize is the unit in which written pages are saved: single pages would tear the file into as many extents.
const clusterSize = 64 << 10

// Private is a memory as a process has it that maps the file privately: the file's content, and over it the pages that the
// process has written. Only while the process doesn't write is it one memory.
type Private struct {
	size         int64
	spans        []span
	pagemap, mem *os.File
}

// span is a part of the file in the process's address space.
type span struct{ addr, off, len int64 }

// OpenPrivate finds the whole of f, which has that size, in the process whose directory in /proc is given. The process may
// end afterwards: what is open is its memory and no other's.
func OpenPrivate(proc string, f *os.File, size int64) (_ *Private, err error) {
	p := &Private{size: size}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("find the memory of process %s: %w", filepath.Base(proc), err), p.Close())
		}
	}()
	if p.pagemap, err = os.Open(filepath.Join(proc, "pagemap")); err != nil {
		return nil, err
	}
	if p.mem, err = os.Open(filepath.Join(proc, "mem")); err != nil {
		return nil, err
	}
	maps, err := os.Open(filepath.Join(proc, "maps"))
	if err != nil {
		return nil, err
	}
	defer maps.Close()
	p.spans, err = spans(maps, f, size)
	return p, err
}

// Close lets go of the process's memory.
func (p *Private) Close() error {
	_ = p.pagemap.Close() // nil included
	_ = p.mem.Close()
	return nil
}

// spans reads where a process maps f (proc_pid_maps(5)). All of it has to be there once, and privately.
func spans(maps, f *os.File, size int64) ([]span, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	device := fmt.Sprintf("%02x:%02x", unix.Major(st.Dev), unix.Minor(st.Dev))
	var all []span
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		var start, end, off int64
		var perms, dev string
		var ino uint64
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x %s %x %s %d", &start, &end, &perms, &off, &dev, &ino); err != nil {
			if strings.HasPrefix(lines.Text(), "ffffffff") { // [vsyscall], beyond what is the process's own
				continue
			}
			return nil, fmt.Errorf("maps has an unknown format: %.100q", lines.Text())
		}
		if ino != st.Ino || dev != device {
			continue
		}
		if !strings.HasSuffix(perms, "p") {
			return nil, errors.New("it is not mapped privately")
		}
		all = append(all, span{addr: start, off: off, len: end - start})
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	slices.SortFunc(all, func(a, b span) int { return int(min(max(a.off-b.off, -1), 1)) })
	at := int64(0)
	for _, s := range all {
		if s.off != at || s.len%pageSize != 0 {
			break
		}
		at += s.len
	}
	if at != size {
		return nil, fmt.Errorf("%d bytes of %d are mapped once and in order", at, size)
	}
	return all, nil
}

// Written is what Overlay has found and done.
type Written struct {
	// Pages are those that the process has written.
	Pages int64
	// Bytes were written to the file, whole clusters that is.
	Bytes int64
	// Chunks are the numbers of the chunks of 1 MiB that may differ from what the file was, in order.
	Chunks []int64
}

// Underlay is a file that is to become a copy of a process's private memory: a clone of the file that the process maps.
type Underlay struct {
	file *os.File
	// filled is where it isn't a hole.
	filled []segment
}

// NewUnderlay looks where f, which has that size, has data. It may take a while for a large one.
func NewUnderlay(f *os.File, size int64) (*Underlay, error) {
	filled, err := segments(f, size, clusterSize)
	if err != nil {
		return nil, err
	}
	return &Underlay{file: f, filled: filled}, nil
}

// hasData tells whether there is any in the segment.
func (u *Underlay) hasData(s segment) bool {
	i, _ := slices.BinarySearchFunc(u.filled, s.start, func(f segment, at int64) int {
		if f.end <= at {
			return -1
		}
		return 1
	})
	return i < len(u.filled) && u.filled[i].start < s.end
}

// Overlay makes u a copy of the memory: it copies what the process has written, in clusters of 64 KiB. Clusters of zeros
// become holes.
func (p *Private) Overlay(ctx context.Context, u *Underlay) (Written, error) {
	w := Written{}
	var work []piece
	for _, s := range p.spans {
		pages, err := p.written(s)
		if err != nil {
			return w, fmt.Errorf("look for written pages: %w", err)
		}
		for _, run := range pages {
			w.Pages += (run.end - run.start) / pageSize
		}
		work = append(work, s.pieces(pages)...)
	}
	for _, k := range work {
		if n := k.start / ChunkSize; len(w.Chunks) == 0 || w.Chunks[len(w.Chunks)-1] != n {
			w.Chunks = append(w.Chunks, n)
		}
	}
	var bytes atomic.Int64
	err := parallel(len(work), func(next func() (int, bool)) error {
		buf := buffers.Get().(*[ChunkSize]byte)
		defer buffers.Put(buf)
		for i, ok := next(); ok; i, ok = next() {
			if err := ctx.Err(); err != nil {
				return err
			}
			n, err := p.save(u, work[i], buf[:])
			if err != nil {
				return err
			}
			bytes.Add(n)
		}
		return nil
	})
	w.Bytes = bytes.Load()
	return w, err
}

// buffers spare a save the page faults of fresh ones.
var buffers = sync.Pool{New: func() any { return new([ChunkSize]byte) }}

// piece is a part of the file of whole clusters, within one chunk, and where the process has it.
type piece struct {
	segment
	addr int64
}

// pieces cuts what covers the pages of the span into pieces.
func (s span) pieces(pages []segment) []piece {
	var clusters []segment
	for _, run := range pages {
		clusters = join(clusters, segment{
			max(run.start/clusterSize*clusterSize, s.off),
			min((run.end+clusterSize-1)/clusterSize*clusterSize, s.off+s.len),
		})
	}
	var all []piece
	for _, c := range clusters {
		for at := c.start; at < c.end; {
			end := min((at/ChunkSize+1)*ChunkSize, c.end)
			all = append(all, piece{segment{at, end}, s.addr + at - s.off})
			at = end
		}
	}
	return all
}

// save copies one piece, and returns how much it has written to the file.
func (p *Private) save(u *Underlay, k piece, buf []byte) (written int64, err error) {
	buf = buf[:k.end-k.start]
	if _, err := p.mem.ReadAt(buf, k.addr); err != nil {
		return 0, fmt.Errorf("read the memory: %w", err)
	}
	for at := 0; at < len(buf); {
		from, zero := at, isZero(buf[at:clusterEnd(k.start, at, len(buf))])
		for at < len(buf) && isZero(buf[at:clusterEnd(k.start, at, len(buf))]) == zero {
			at = clusterEnd(k.start, at, len(buf))
		}
		s := segment{k.start + int64(from), k.start + int64(at)}
		switch {
		case !zero:
			n, err := u.file.WriteAt(buf[from:at], s.start)
			written += int64(n)
			if err != nil {
				return written, fmt.Errorf("write the memory: %w", err)
			}
		case u.hasData(s):
			if err := unix.Fallocate(int(u.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, s.start, s.end-s.start); err != nil {
				return written, fmt.Errorf("make a hole of zero memory: %w", err)
			}
		}
	}
	return written, nil
}

// clusterEnd is where the cluster at a place in a buffer ends that begins at start in the file.
func clusterEnd(start int64, at, size int) int {
	in := (start + int64(at)) % clusterSize
	return min(at+int(clusterSize-in), size)
}
