package qemu

import (
	"fmt"
	"os"

	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
)

// images are the memory's and the disks' as QEMU gets them.
type images struct {
	memory  *os.File
	root    *os.File
	plugged []*os.File
}

func (i *images) close() error {
	for _, f := range append(i.plugged, i.root, i.memory) {
		_ = f.Close() // nil included
	}
	return nil
}

func (s *Spec) openImages() (_ *images, err error) {
	var u undo.Stack
	defer u.Run(&err)
	i := &images{}
	u.Push(i.close)
	if s.Share {
		i.memory, err = memory.Own(s.Memory)
	} else {
		i.memory, err = memory.Common(s.Memory, int64(s.Shape.MemoryMiB)<<20)
	}
	if err != nil {
		return nil, err
	}
	if s.Root != nil {
		if i.root, err = openRoot(s.Root); err != nil {
			return nil, fmt.Errorf("root disk: %w", err)
		}
	}
	for _, p := range s.Plugged {
		f, err := reopen(p.File, p.ReadOnly)
		if err != nil {
			return nil, fmt.Errorf("disk %s: %w", p.Serial, err)
		}
		i.plugged = append(i.plugged, f)
	}
	return i, nil
}

// openRoot opens the image for QEMU. One larger than the guest takes it to be would lose its end.
func openRoot(image *os.File) (*os.File, error) {
	info, err := image.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > vmm.RootBytes {
		return nil, fmt.Errorf("%s has more than %d bytes", image.Name(), int64(vmm.RootBytes))
	}
	return reopen(image, false)
}

// kept are the files of a Spec that a machine keeps, for its Save: each for reading only.
type kept struct {
	images // memory: only with a base
	base   *Base
}

func (k *kept) close() error {
	_ = k.images.close()
	if k.base != nil {
		_ = k.base.File.Close()
	}
	return nil
}

func (s *Spec) keep() (_ *kept, err error) {
	var u undo.Stack
	defer u.Run(&err)
	k := &kept{}
	u.Push(k.close)
	if s.Root != nil {
		if k.root, err = reopen(s.Root, true); err != nil {
			return nil, err
		}
	}
	for _, p := range s.Plugged {
		f, err := reopen(p.File, true)
		if err != nil {
			return nil, err
		}
		k.plugged = append(k.plugged, f)
	}
	if s.Base == nil {
		return k, nil
	}
	if k.memory, err = reopen(s.Memory, true); err != nil {
		return nil, err
	}
	f, err := reopen(s.Base.File, true)
	if err != nil {
		return nil, err
	}
	k.base = &Base{File: f, Digests: s.Base.Digests, Snapshot: s.Base.Snapshot}
	return k, nil
}

// closeImages lets go of the files that are kept.
func (m *Machine) closeImages() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.disks {
		_ = d.image.Close() // nil included
	}
	_ = m.memory.Close()
	if m.base != nil {
		_ = m.base.File.Close()
	}
	return nil
}
