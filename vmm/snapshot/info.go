package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
)

const (
	// formatVersion changes with what a snapshot's directory holds; formatDisks is that of one without memory.
	formatVersion = 1
	formatDisks   = 2
	// infoFile describes the snapshot.
	infoFile = "snapshot.json"
	// maxInfo bounds what is read of it. It has 54 bytes for each MiB of a file that isn't zero.
	maxInfo = 256 << 20
	// maxNote bounds what an owner may keep with it.
	maxNote = 1 << 20
	// maxState bounds what is read of a state file; it has about 16 KiB.
	maxState = 16 << 20
	// maxDisk is the size that the driver takes no disk beyond.
	maxDisk = vmm.RootBytes
)

// serialForm is what a disk may be called, and so its file.
var serialForm = regexp.MustCompile(`^[a-z0-9-]{1,20}$`)

// Info is what a snapshot says about itself.
type Info struct {
	Format  int       `json:"format"`
	ID      string    `json:"id"`
	Created time.Time `json:"created"`
	// Parent is the snapshot that the machine was restored from, "" for a base snapshot. It need not exist any more.
	Parent   string       `json:"parent,omitempty"`
	Platform vmm.Platform `json:"platform"`
	Shape    vmm.Shape    `json:"shape"`
	// Frozen says that the work in the guest is at rest.
	Frozen bool `json:"frozen"`
	// State and Memory have no file in a snapshot of disks alone: see DisksOnly.
	State  File   `json:"state"`
	Memory File   `json:"memory"`
	Disks  []Disk `json:"disks"`
	// Note is the owner's, JSON: what has to be known of what runs in the machine. Nothing here reads it.
	Note json.RawMessage `json:"note,omitempty"`
	// Damage says why the snapshot can't be read. Only List sets it.
	Damage string `json:"-"`
}

// DisksOnly tells that nothing but the disks was saved: no machine goes on from it.
func (i *Info) DisksOnly() bool { return i.Format == formatDisks }

// File is a file of the snapshot.
type File struct {
	Size    int64          `json:"size"` // in bytes, holes included
	Digests memory.Digests `json:"digests"`
}

// Disk is one of the machine's. A placeholder has no file.
type Disk struct {
	vmm.SavedDisk
	File File `json:"file"`
}

// signed is what is in the file: a description and its digest.
type signed struct {
	SHA256   string          `json:"sha256"`
	Snapshot json.RawMessage `json:"snapshot"`
}

// describe completes the description of what is saved in dir, syncs all files and writes the description beside them. It
// returns the files whose digests are known to be right.
func (i *Info) describe(dir string, saved *vmm.Saved, parent disks) (map[string]identity, error) {
	i.Disks = make([]Disk, len(saved.Disks))
	var g errgroup.Group
	var mu sync.Mutex
	known := map[string]identity{}
	complete := func(name string, to *File, digests func(f *os.File, size int64) (memory.Digests, error)) {
		g.Go(func() error {
			f, err := os.Open(filepath.Join(dir, name))
			if err != nil {
				return err
			}
			defer f.Close()
			st, err := f.Stat()
			if err != nil {
				return err
			}
			to.Size = st.Size()
			if to.Digests, err = digests(f, st.Size()); err != nil {
				return err
			}
			mu.Lock()
			known[name], err = identify(f)
			mu.Unlock()
			return errors.Join(err, f.Sync())
		})
	}
	if !i.DisksOnly() {
		complete(vmm.StateFile, &i.State, memory.Digest)
		complete(vmm.MemoryFile, &i.Memory, func(f *os.File, size int64) (memory.Digests, error) {
			return saved.Inherited.Update(f, size, saved.Memory.Chunks)
		})
	}
	for n, d := range saved.Disks {
		i.Disks[n].SavedDisk = d
		if !d.Placeholder {
			complete(vmm.DiskFile(d.Serial), &i.Disks[n].File, func(f *os.File, size int64) (memory.Digests, error) {
				return parent[d.Serial].inherit(f, size)
			})
		}
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	if err := i.valid(i.ID); err != nil {
		return nil, err
	}
	return known, i.write(dir)
}

func (i *Info) write(dir string) (err error) {
	b, err := json.Marshal(i)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, infoFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := json.NewEncoder(f).Encode(signed{SHA256: sum(b), Snapshot: b}); err != nil {
		return err
	}
	return f.Sync()
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// readInfo reads the description of the snapshot of that name. Nothing in it is believed that could do harm.
func readInfo(dir *os.Root, id string) (*Info, error) {
	f, err := openFile(dir, infoFile)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxInfo+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxInfo {
		return nil, damaged("%s has more than %d bytes", infoFile, maxInfo)
	}
	var s signed
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, damaged("%s: %v", infoFile, err)
	}
	if sum(s.Snapshot) != s.SHA256 {
		return nil, damaged("%s isn't what its digest says", infoFile)
	}
	var format struct{ Format int }
	if err := json.Unmarshal(s.Snapshot, &format); err != nil {
		return nil, damaged("%s: %v", infoFile, err)
	}
	if format.Format != formatVersion && format.Format != formatDisks {
		return nil, incompatible("it has format %d, this cube reads %d and %d", format.Format, formatVersion, formatDisks)
	}
	i := &Info{}
	d := json.NewDecoder(bytes.NewReader(s.Snapshot))
	d.DisallowUnknownFields()
	if err := d.Decode(i); err != nil {
		return nil, damaged("%s: %v", infoFile, err)
	}
	return i, i.valid(id)
}

// valid checks all that can be checked without the files.
func (i *Info) valid(id string) error {
	switch {
	case i.ID != id:
		return damaged("it is snapshot %q", i.ID)
	case i.Shape.VCPUs < 1 || i.Shape.MemoryMiB < 1:
		return damaged("it has %s", i.Shape)
	case i.DisksOnly() && (i.Memory.Size != 0 || i.State.Size != 0):
		return damaged("it has memory, but is of disks alone")
	case i.DisksOnly():
	case i.Memory.Size != int64(i.Shape.MemoryMiB)<<20:
		return damaged("its memory has %d bytes for %s", i.Memory.Size, i.Shape)
	case i.State.Size < 1 || i.State.Size > maxState:
		return damaged("its state has %d bytes", i.State.Size)
	}
	switch {
	case len(i.Note) > maxNote:
		return damaged("its owner's note has %d bytes", len(i.Note))
	case !plainName(i.Platform.QEMU) || !plainName(i.Platform.Guest):
		return damaged("it names the artefacts %q and %q", i.Platform.QEMU, i.Platform.Guest)
	}
	var files []File
	if !i.DisksOnly() {
		files = append(files, i.State, i.Memory)
	}
	serials, luns := map[string]bool{}, map[int]bool{}
	for _, d := range i.Disks {
		switch {
		case !serialForm.MatchString(d.Serial) || serials[d.Serial] || luns[d.LUN] || d.LUN < 0:
			return damaged("its disk %q has the LUN %d", d.Serial, d.LUN)
		case d.Placeholder != (d.File.Size == 0) || d.File.Size < 0 || d.File.Size > maxDisk:
			return damaged("its disk %s has %d bytes", d.Serial, d.File.Size)
		case d.Placeholder && d.Serial != vmm.RootSerial:
			return damaged("its disk %s has no image", d.Serial)
		}
		serials[d.Serial], luns[d.LUN] = true, true
		if !d.Placeholder {
			files = append(files, d.File)
		}
	}
	for _, f := range files {
		if f.Digests == nil {
			return damaged("a file has no digests")
		}
		for n := range f.Digests {
			if n >= (f.Size+1<<20-1)>>20 {
				return damaged("it has a digest for MiB %d of %d bytes", n, f.Size)
			}
		}
	}
	return nil
}

// plainName is a name in a directory.
func plainName(s string) bool {
	return s != "" && s == filepath.Base(s) && filepath.IsLocal(s) && s != "."
}

// openFile opens a regular file of the snapshot, and nothing that a link leads to.
func openFile(dir *os.Root, name string) (*os.File, error) {
	st, err := dir.Lstat(name)
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, damaged("%s is not a file", name)
	}
	return dir.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
}

// openSized is openFile for one whose size is known.
func openSized(dir *os.Root, name string, size int64) (*os.File, error) {
	f, err := openFile(dir, name)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && st.Size() != size {
		err = damaged("%s has %d bytes, not %d", name, st.Size(), size)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, args...))
}
