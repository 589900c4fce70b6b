package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
)

// ErrDamaged says that a snapshot isn't what was saved: a file is missing, cut short, changed or another's.
var ErrDamaged = errdefs.ErrDataLoss.WithMessage("the snapshot is damaged and can only be deleted")

// Snapshot is an open one. Its files stay what they are whatever becomes of the directory.
type Snapshot struct {
	Info
	// State is at its start. It is nil in a snapshot of disks alone, and so is Memory.
	State *os.File
	// Memory is the guest's, for clones of it. To run a guest from it, Hold it.
	Memory *os.File
	// Images are those of the disks, by serial.
	Images map[string]*os.File

	store *Store
	files undo.Stack
}

// Close lets go of it.
func (s *Snapshot) Close() error { return s.files.Release() }

// Open opens a snapshot for a user, whose name is told to whoever asks who uses it, until it is closed or this process ends.
// It is checked: descriptions, sizes and the state each time, the disks once per boot of the host, as the memory is when it is held.
func (s *Store) Open(id, user string) (_ *Snapshot, err error) {
	if err := ValidID(id); err != nil {
		return nil, err
	}
	o := &Snapshot{store: s, Images: map[string]*os.File{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, o.Close())
		}
	}()
	release, err := s.run.use(id, User{Name: user, PID: os.Getpid()})
	if err != nil {
		return nil, fmt.Errorf("open snapshot %s: %w", id, err)
	}
	o.files.Push(func() error { release(); return nil })
	dir, err := os.OpenRoot(filepath.Join(s.dir, id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, notFound(id)
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	if err := o.open(dir, id); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = damaged("%v", err)
		}
		return nil, s.gone(dir, id, err)
	}
	return o, nil
}

func (o *Snapshot) open(dir *os.Root, id string) error {
	info, err := readInfo(dir, id)
	if err != nil {
		return err
	}
	o.Info = *info
	open := func(name string, size int64) (*os.File, error) {
		f, err := openSized(dir, name, size)
		if err == nil {
			o.files.Push(f.Close)
		}
		return f, err
	}
	if !o.DisksOnly() {
		if o.State, err = open(vmm.StateFile, o.Info.State.Size); err != nil {
			return err
		}
		if err := o.Info.State.check(vmm.StateFile, o.State); err != nil {
			return err
		}
		if _, err := o.State.Seek(0, io.SeekStart); err != nil { // QEMU reads from where it is
			return err
		}
		if o.Memory, err = open(vmm.MemoryFile, o.Info.Memory.Size); err != nil {
			return err
		}
	}
	for _, d := range o.Disks {
		if d.Placeholder {
			continue
		}
		if o.Images[d.Serial], err = open(vmm.DiskFile(d.Serial), d.File.Size); err != nil {
			return err
		}
	}
	return o.checkDisks()
}

// checkDisks reads the disks, unless that has been done since the host's start.
func (o *Snapshot) checkDisks() error {
	for _, d := range o.Disks {
		name, f := vmm.DiskFile(d.Serial), o.Images[d.Serial]
		if d.Placeholder || o.store.run.isChecked(o.ID, name, f) {
			continue
		}
		began := time.Now()
		if err := d.File.check(name, f); err != nil {
			return err
		}
		o.store.log.Debug("checked a disk of a snapshot", "id", o.ID, "disk", d.Serial, "took", time.Since(began))
		o.setChecked(name, f)
	}
	return nil
}

func (o *Snapshot) setChecked(name string, f *os.File) {
	if i, err := identify(f); err == nil {
		o.store.setChecked(o.ID, map[string]identity{name: i})
	}
}

// check reads all of a file.
func (f *File) check(name string, file *os.File) error {
	return asDamage(name, f.Digests.Check(file, f.Size))
}

// asDamage makes the damage of a file that of the snapshot.
func asDamage(name string, err error) error {
	if errors.Is(err, memory.ErrDamaged) {
		return damaged("%s is %v", name, err)
	}
	return err
}

// Hold returns the memory as a file that nobody can change, the same for all on the host who hold it. It is checked once
// per boot of the host. A snapshot of disks alone has none: errdefs.ErrFailedPrecondition.
func (o *Snapshot) Hold(ctx context.Context) (*memory.Held, error) {
	if o.DisksOnly() {
		return nil, errDisksOnly
	}
	key := fmt.Sprintf("%s@%s", o.ID, o.Info.Memory.Digests.String()[:16])
	held, err := o.store.pool.Hold(ctx, key, o.Info.Memory.Size, func() (*os.File, error) {
		began := time.Now()
		f, err := o.seal()
		if err != nil {
			return nil, err
		}
		o.store.log.Debug("copied the memory of a snapshot", "id", o.ID, "took", time.Since(began))
		return f, nil
	})
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", o.ID, err)
	}
	return held, nil
}

func (o *Snapshot) seal() (*os.File, error) {
	if o.store.run.isChecked(o.ID, vmm.MemoryFile, o.Memory) {
		return memory.SealKnown(o.Memory, o.Info.Memory.Size)
	}
	f, digests, err := memory.Seal(o.Memory, o.Info.Memory.Size)
	if err != nil {
		return nil, err
	}
	if err := asDamage(vmm.MemoryFile, o.Info.Memory.Digests.Compare(digests)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	o.setChecked(vmm.MemoryFile, o.Memory)
	return f, nil
}
