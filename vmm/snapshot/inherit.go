package snapshot

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/reflink"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
)

// disks are those of the snapshot that a machine was restored from, by serial. What a disk of its child shares with them
// need not be read for its digests. There are none where that snapshot is gone.
type disks map[string]*parentDisk

type parentDisk struct {
	file *os.File
	File
}

// disksOf opens them, as far as they are there. They aren't checked: damage that a child inherits is found in the child.
func (s *Store) disksOf(id string) disks {
	all := disks{}
	if id == "" {
		return all
	}
	dir, err := os.OpenRoot(filepath.Join(s.dir, id))
	if err != nil {
		return all
	}
	defer dir.Close()
	info, err := readInfo(dir, id)
	if err != nil {
		return all
	}
	for _, d := range info.Disks {
		if f, err := openSized(dir, vmm.DiskFile(d.Serial), d.File.Size); err == nil {
			all[d.Serial] = &parentDisk{f, d.File}
		}
	}
	return all
}

func (d disks) close() {
	for _, p := range d {
		_ = p.file.Close()
	}
}

// inherit returns the digests of a file that has that size. p may be nil.
func (p *parentDisk) inherit(f *os.File, size int64) (memory.Digests, error) {
	if p == nil || p.Size != size {
		return memory.Digest(f, size)
	}
	changed, err := reflink.Differing(f, p.file, size, memory.ChunkSize)
	if errors.Is(err, reflink.ErrUnmapped) {
		return memory.Digest(f, size)
	}
	if err != nil {
		return nil, err
	}
	return p.Digests.Update(f, size, changed)
}

// Added tells how many bytes a snapshot's disks have that are not, in the same place, on those of the snapshot before; "" or one
// that is gone has none.
func (s *Store) Added(id, before string) (int64, error) {
	own, parent := s.disksOf(id), s.disksOf(before)
	defer own.close()
	defer parent.close()
	if len(own) == 0 {
		return 0, notFound(id)
	}
	var sum int64
	for serial, d := range own {
		n, err := d.added(parent[serial])
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

func (p *parentDisk) added(to *parentDisk) (int64, error) {
	if to != nil && to.Size == p.Size {
		changed, err := reflink.Differing(p.file, to.file, p.Size, memory.ChunkSize)
		if !errors.Is(err, reflink.ErrUnmapped) {
			return int64(len(changed)) * memory.ChunkSize, err
		}
	}
	var st unix.Stat_t
	err := unix.Fstat(int(p.file.Fd()), &st)
	return st.Blocks * 512, err
}
