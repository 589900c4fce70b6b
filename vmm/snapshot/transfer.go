package snapshot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
)

// NamedFile is a file of a snapshot, with its name there.
type NamedFile struct {
	Name string
	File
}

// Files are those that the snapshot has, always in the same order.
func (i *Info) Files() []NamedFile {
	var all []NamedFile
	if !i.DisksOnly() {
		all = append(all, NamedFile{vmm.StateFile, i.State}, NamedFile{vmm.MemoryFile, i.Memory})
	}
	for _, d := range i.Disks {
		if !d.Placeholder {
			all = append(all, NamedFile{vmm.DiskFile(d.Serial), d.File})
		}
	}
	return all
}

// WithoutMemory describes the same machine with nothing but its disks.
func (i Info) WithoutMemory() Info {
	i.Format, i.State, i.Memory = formatDisks, File{}, File{}
	return i
}

// Foreign is what of a snapshot is true wherever it is: neither its name here, nor what it was made from, nor its owner's note.
func (i Info) Foreign() Info {
	i.ID, i.Parent, i.Note = "", "", nil
	return i
}

// Check checks a description that has come from elsewhere, as far as that can be done without the files. The error wraps ErrDamaged, or
// is errdefs.ErrFailedPrecondition if it is of a format that isn't known here.
func (i *Info) Check() error {
	if i.Format != formatVersion && i.Format != formatDisks {
		return incompatible("it has format %d, this cube reads %d and %d", i.Format, formatVersion, formatDisks)
	}
	return i.valid(i.ID)
}

// ReadChunk reads a chunk of one of its files into buf, and checks it; see memory.Digests.
func (o *Snapshot) ReadChunk(name string, n int64, buf []byte) ([]byte, error) {
	files := o.Info.Files()
	i := slices.IndexFunc(files, func(f NamedFile) bool { return f.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("snapshot %s has no file %s", o.ID, name)
	}
	var f *os.File
	switch name {
	case vmm.StateFile:
		f = o.State
	case vmm.MemoryFile:
		f = o.Memory
	default:
		for serial, image := range o.Images {
			if vmm.DiskFile(serial) == name {
				f = image
			}
		}
	}
	chunk, err := files[i].Digests.ReadChunk(f, files[i].Size, n, buf)
	return chunk, asDamage(name, err)
}

// Put gives a snapshot that is being made a chunk of a file of that name. One that isn't what the description says is an error that
// wraps ErrDamaged. It may be called from many goroutines.
type Put func(file string, n int64, chunk []byte) error

// Import makes a snapshot of what fill puts into it: all chunks that have a digest, each once. It is there, for good, when Import
// returns without an error; otherwise nothing of it is. Of info, name and time are the store's to say.
func (s *Store) Import(id string, info Info, fill func(Put) error) (err error) {
	if err := ValidID(id); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("make snapshot %s: %w", id, err)
		}
	}()
	info.ID, info.Created = id, time.Now().UTC()
	if err := info.Check(); err != nil {
		return err
	}
	tmp, release, err := s.scratch()
	if err != nil {
		return err
	}
	defer release()
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return os.RemoveAll(tmp) })
	in := incoming{}
	defer in.close()
	for _, f := range info.Files() {
		if err := in.add(tmp, f); err != nil {
			return err
		}
	}
	for _, d := range info.Disks {
		if f := in[vmm.DiskFile(d.Serial)]; f != nil && !d.ReadOnly {
			if err := guestmark.Set(f.file); err != nil {
				return err
			}
		}
	}
	if err := fill(in.put); err != nil {
		return err
	}
	known, err := in.finish()
	if err == nil {
		err = info.write(tmp)
	}
	if err == nil {
		err = s.publish(tmp, id)
	}
	if err != nil {
		return err
	}
	if err := syncDir(s.dir); err != nil {
		return errors.Join(err, s.discard(id))
	}
	s.setChecked(id, known)
	return nil
}

// incoming are the files of a snapshot that is being imported, by name.
type incoming map[string]*incomingFile

type incomingFile struct {
	NamedFile
	file *os.File

	mu  sync.Mutex
	got map[int64]bool
}

// add makes a file of zeros.
func (in incoming) add(dir string, of NamedFile) error {
	f, err := os.OpenFile(filepath.Join(dir, of.Name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	in[of.Name] = &incomingFile{NamedFile: of, file: f, got: map[int64]bool{}}
	return f.Truncate(of.Size)
}

func (in incoming) put(name string, n int64, chunk []byte) error {
	f := in[name]
	if f == nil {
		return damaged("it has no file %s", name)
	}
	f.mu.Lock()
	again := f.got[n]
	f.got[n] = true
	f.mu.Unlock()
	if again {
		return damaged("MiB %d of %s comes twice", n, name)
	}
	return asDamage(name, f.Digests.WriteChunk(f.file, n, chunk))
}

// finish checks that all is there, and has it stay. It returns the files whose digests are known to be right.
func (in incoming) finish() (map[string]identity, error) {
	known := map[string]identity{}
	for name, f := range in {
		if missing := len(f.Digests) - len(f.got); missing != 0 {
			return nil, damaged("%d MiB of %s are missing", missing, name)
		}
		var err error
		if known[name], err = identify(f.file); err != nil {
			return nil, err
		}
		if err := f.file.Sync(); err != nil {
			return nil, err
		}
	}
	return known, nil
}

func (in incoming) close() {
	for _, f := range in {
		_ = f.file.Close()
	}
}
