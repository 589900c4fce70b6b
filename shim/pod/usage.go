package pod

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	hostprocess "github.com/cubesandbox/cube/internal/process"
)

// Usage is what a pod's machine is of, and what it takes of the host.
type Usage struct {
	PID      int
	Snapshot string // that it was made from; "" for none
	Cold     string // why only its disk is of that; "" if all of it is
	// Private is the memory that no other process has, PSS all of it with what is shared divided among those who share it, and
	// Disk what the disks of its own occupy, what they share with others included. In bytes.
	Private, PSS, Disk uint64
}

// Usage tells it.
func (p *Pod) Usage() (Usage, error) {
	v, err := p.live()
	if err != nil {
		return Usage{}, err
	}
	u := Usage{PID: v.PID(), Snapshot: v.made.snapshot, Cold: v.made.cold}
	memory, err := hostprocess.MemoryOf(u.PID)
	if err != nil {
		return u, v.explain(fmt.Errorf("measure the virtual machine's memory: %w", err))
	}
	u.Private, u.PSS = memory.Private, memory.PSS
	if u.Disk, err = occupied(v.made.state.DiskDir); err != nil {
		return u, fmt.Errorf("measure the virtual machine's disks: %w", err)
	}
	return u, nil
}

// occupied is what the files in a directory occupy; "" has none.
func occupied(dir string) (bytes uint64, err error) {
	if dir == "" {
		return 0, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		var st unix.Stat_t
		err := unix.Lstat(filepath.Join(dir, e.Name()), &st)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since
		}
		if err != nil {
			return 0, err
		}
		bytes += uint64(st.Blocks) * 512
	}
	return bytes, nil
}
