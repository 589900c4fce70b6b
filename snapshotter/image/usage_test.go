package image

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/internal/testfs"
)

func TestOverlap(t *testing.T) {
	theirs := []span{{10, 20}, {20, 30}, {50, 60}}
	for _, tc := range []struct {
		x    span
		want uint64
	}{
		{span{0, 10}, 0}, {span{0, 11}, 1}, {span{10, 20}, 10}, {span{15, 25}, 10}, {span{19, 51}, 12},
		{span{30, 50}, 0}, {span{55, 100}, 5}, {span{60, 70}, 0}, {span{0, 100}, 30},
	} {
		if got := overlap(theirs, tc.x); got != tc.want {
			t.Errorf("overlap %v = %d, want %d", tc.x, got, tc.want)
		}
	}
	if got := overlap(nil, span{0, 10}); got != 0 {
		t.Errorf("overlap with nothing = %d", got)
	}
}

func used(t *testing.T, img, parent *os.File) int64 {
	t.Helper()
	n, err := Used(img, parent)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestUsed rewrites every other block of a clone, which takes more extents than one call returns.
func TestUsed(t *testing.T) {
	const block, n = 4096, 3 * 256
	dir := testfs.XFS(t, 512<<20)
	parent, child := create(t, filepath.Join(dir, "parent")), create(t, filepath.Join(dir, "child"))
	// Its final size first, as disks have, so that XFS allocates nothing in advance.
	if err := parent.Truncate(2 * n * block); err != nil {
		t.Fatal(err)
	}
	if _, err := parent.WriteAt(make([]byte, 2*n*block), 0); err != nil {
		t.Fatal(err)
	}
	if got := used(t, parent, nil); got != 2*n*block {
		t.Errorf("without a parent: %d", got)
	}
	if _, err := Clone(context.Background(), child, parent); err != nil {
		t.Fatal(err)
	}
	if got := used(t, child, parent); got != 0 {
		t.Errorf("a clone uses %d", got)
	}
	if got := used(t, child, nil); got != 2*n*block {
		t.Errorf("a clone without its parent uses %d", got)
	}
	for i := range int64(n) {
		if _, err := child.WriteAt([]byte("new"), 2*i*block); err != nil {
			t.Fatal(err)
		}
	}
	if got := used(t, child, parent); got != n*block {
		t.Errorf("half rewritten: %d, want %d", got, n*block)
	}
	// A clone of the clone shares with both; only what its own parent lacks counts.
	grandchild := create(t, filepath.Join(dir, "grandchild"))
	if _, err := Clone(context.Background(), grandchild, child); err != nil {
		t.Fatal(err)
	}
	if got := used(t, grandchild, child); got != 0 {
		t.Errorf("a clone of the clone uses %d", got)
	}
	if got := used(t, child, parent); got != n*block {
		t.Errorf("half rewritten and cloned: %d, want %d", got, n*block)
	}
	if got := used(t, create(t, filepath.Join(dir, "empty")), parent); got != 0 {
		t.Errorf("an empty file uses %d", got)
	}
}

// TestUsedOfCopies is the same question where blocks can't be shared.
func TestUsedOfCopies(t *testing.T) {
	dir := testfs.Ext4(t, 256<<20)
	parent, child := create(t, filepath.Join(dir, "parent")), create(t, filepath.Join(dir, "child"))
	testfs.Random(t, parent.Name(), 4<<20)
	if _, err := Clone(context.Background(), child, parent); err != nil {
		t.Fatal(err)
	}
	if got := used(t, child, parent); got != 4<<20 {
		t.Errorf("a copy uses %d", got)
	}
}

// TestUsedWithoutFiemap is a file system that doesn't tell where its blocks are.
func TestUsedWithoutFiemap(t *testing.T) {
	f := create(t, filepath.Join("/dev/shm", filepath.Base(t.TempDir())+"-cube-used"))
	defer os.Remove(f.Name())
	if _, err := f.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if got := used(t, f, nil); got != 1<<20 {
		t.Errorf("got %d", got)
	}
}
