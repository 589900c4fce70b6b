package snapshot_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// carry imports a snapshot that is made of another one's chunks, of which change may leave some out or give others.
func (s *shelf) carry(t *testing.T, from, to string, i snapshot.Info, change func(file string, n int64, chunk []byte, put snapshot.Put) error) error {
	t.Helper()
	o, err := s.Open(from, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	return s.Import(to, i, func(put snapshot.Put) error {
		buf := make([]byte, memory.ChunkSize)
		for _, f := range i.Files() {
			for n := range f.Digests {
				chunk, err := o.ReadChunk(f.Name, n, buf)
				if err != nil {
					return err
				}
				if err := change(f.Name, n, chunk, put); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func as(file string, n int64, chunk []byte, put snapshot.Put) error { return put(file, n, chunk) }

// A snapshot that is imported is as one that was saved; without memory it is one of disks.
func TestImport(t *testing.T) {
	s := newShelf(t)
	info := s.save(t, "one").Foreign()
	if err := s.carry(t, "one", "two", info, as); err != nil {
		t.Fatal(err)
	}
	if err := s.use(t, "two"); err != nil {
		t.Error(err)
	}
	if err := s.carry(t, "one", "disks", info.WithoutMemory(), as); err != nil {
		t.Fatal(err)
	}
	o, err := s.Open("disks", "test")
	if err != nil {
		t.Fatal(err)
	}
	if !o.DisksOnly() || o.Memory != nil || len(o.Images) != 1 {
		t.Errorf("%+v", o.Info)
	}
	if err := o.Close(); err != nil {
		t.Error(err)
	}
	for _, id := range []string{"two", "disks"} {
		if marked, err := guestmark.IsSet(s.path(id, vmm.DiskFile("root"))); err != nil || !marked {
			t.Errorf("the disk of %s may be mounted: %v", id, err)
		}
		for _, name := range []string{vmm.StateFile, vmm.MemoryFile, vmm.DiskFile("root")} {
			a, err := os.ReadFile(s.path("one", name))
			b, err2 := os.ReadFile(s.path(id, name))
			if id == "disks" && name != vmm.DiskFile("root") {
				if !os.IsNotExist(err2) {
					t.Errorf("disks have %s: %v", name, err2)
				}
			} else if errors.Join(err, err2) != nil || string(a) != string(b) {
				t.Errorf("%s of %s: %v, %v", name, id, err, err2)
			}
		}
	}
	if err := s.carry(t, "one", "two", info, as); !errdefs.IsAlreadyExists(err) {
		t.Errorf("twice: %v", err)
	}
}

// Of what isn't as it says nothing is left.
func TestImportDamaged(t *testing.T) {
	s := newShelf(t)
	info := s.save(t, "one").Foreign()
	for what, change := range map[string]func(file string, n int64, chunk []byte, put snapshot.Put) error{
		"a chunk is missing": func(file string, n int64, chunk []byte, put snapshot.Put) error {
			if file == vmm.MemoryFile && n == 2 {
				return nil
			}
			return put(file, n, chunk)
		},
		"a chunk comes twice": func(file string, n int64, chunk []byte, put snapshot.Put) error {
			return errors.Join(put(file, n, chunk), put(file, n, chunk))
		},
		"a chunk is another one": func(file string, n int64, chunk []byte, put snapshot.Put) error {
			chunk[5000] ^= 1
			return put(file, n, chunk)
		},
		"a chunk that isn't in the digests": func(file string, n int64, chunk []byte, put snapshot.Put) error { return put(file, n+1, chunk) },
		"another file":                      func(_ string, n int64, chunk []byte, put snapshot.Put) error { return put("../x", n, chunk) },
	} {
		if err := s.carry(t, "one", "two", info, change); !errors.Is(err, snapshot.ErrDamaged) {
			t.Errorf("%s: %v", what, err)
		}
		if left, err := os.ReadDir(s.cfg.SnapshotDir()); err != nil || len(left) != 1 {
			t.Errorf("%s: left: %v, %v", what, left, err)
		}
	}
	broken := errors.New("broken")
	err := s.carry(t, "one", "two", info, func(string, int64, []byte, snapshot.Put) error { return broken })
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "two") {
		t.Errorf("%v", err)
	}
	bad := info
	bad.Format = 7
	if err := s.carry(t, "one", "two", bad, as); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("another format: %v", err)
	}
	bad = info
	bad.Platform.QEMU = "../q"
	if err := s.carry(t, "one", "two", bad, as); !errors.Is(err, snapshot.ErrDamaged) {
		t.Errorf("a path: %v", err)
	}
}
