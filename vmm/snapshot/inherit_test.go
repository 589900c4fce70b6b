package snapshot

import (
	"crypto/sha256"
	"os"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/internal/reflink"
	"github.com/cubesandbox/cube/internal/testfs"
	"github.com/cubesandbox/cube/vmm/memory"
)

// What a disk shares with its parent's isn't read again.
func TestInherit(t *testing.T) {
	const size = 4 * memory.ChunkSize
	for name, dir := range map[string]string{"xfs": testfs.XFS(t, 320<<20), "elsewhere": t.TempDir()} {
		t.Run(name, func(t *testing.T) {
			create := func(name string) *os.File {
				f, err := os.Create(filepath.Join(dir, name))
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { f.Close() })
				return f
			}
			parent, child := create("parent"), create("child")
			testfs.Random(t, parent.Name(), size)
			if _, err := reflink.Clone(t.Context(), child, parent); err != nil {
				t.Fatal(err)
			}
			if _, err := child.WriteAt([]byte("changed"), 2*memory.ChunkSize); err != nil {
				t.Fatal(err)
			}
			want, err := memory.Digest(child, size)
			if err != nil {
				t.Fatal(err)
			}
			known, err := memory.Digest(parent, size)
			if err != nil {
				t.Fatal(err)
			}
			mark := sha256.Sum256([]byte("not read"))
			known[1] = mark
			p := &parentDisk{parent, File{Size: size, Digests: known}}
			got, err := p.inherit(child, size)
			if err != nil {
				t.Fatal(err)
			}
			if read := got[1] != mark; read != (name != "xfs") {
				t.Errorf("chunk 1 was read: %v", read)
			}
			got[1] = want[1]
			if err := want.Compare(got); err != nil {
				t.Error(err)
			}
			if got, err := (*parentDisk)(nil).inherit(child, size); err != nil || want.Compare(got) != nil {
				t.Errorf("without a parent: %v", err)
			}
		})
	}
}
