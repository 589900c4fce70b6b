package snapshotter

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/testfs"
)

// slack is what ext4's own metadata may add to a known amount of data, in bytes.
const slack = 1 << 20

func near(t *testing.T, what string, got, want int64) {
	t.Helper()
	if got < want || got > want+slack {
		t.Errorf("%s: %d bytes, want %d and a little", what, got, want)
	}
}

func TestUsage(t *testing.T) {
	dir := testfs.XFS(t, xfsSize)
	f := open(t, dir)
	taken := func() int64 {
		unix.Sync()
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		return int64(st.Blocks-st.Bfree) * st.Bsize
	}
	before := taken()
	f.layer("base", "", 8<<20)
	near(t, "base layer", f.usage("base"), 8<<20)
	f.layer("top", "base", 4<<20)
	near(t, "second layer", f.usage("top"), 4<<20)
	near(t, "store, against the sum of both", taken()-before, f.usage("base")+f.usage("top"))

	m := f.prepare("container", "top")
	if got := f.usage("container"); got != 0 {
		t.Errorf("a clone uses %d", got)
	}
	onHost(t, m, func(dir string) {
		testfs.Random(t, filepath.Join(dir, "new"), 16<<20)
		near(t, "while mounted", f.usage("container"), 16<<20)
	})
	near(t, "container", f.usage("container"), 16<<20)
	// Deleted files give their space back through the loop device.
	onHost(t, m, func(dir string) {
		if err := os.Remove(filepath.Join(dir, "new")); err != nil {
			t.Fatal(err)
		}
	})
	near(t, "container after deleting", f.usage("container"), 0)

	if _, err := f.View(f.ctx, "view", "top"); err != nil {
		t.Fatal(err)
	}
	u, err := f.Usage(f.ctx, "view")
	if err != nil || u.Size != 0 || u.Inodes != 0 {
		t.Errorf("a view uses %+v, %v", u, err)
	}
	if u, err := f.Usage(f.ctx, "container"); err != nil || u.Inodes != 1 {
		t.Errorf("a container uses %+v, %v", u, err)
	}
	// A layer whose parent was rewritten doesn't change.
	near(t, "second layer, still", f.usage("top"), 4<<20)

	for _, key := range []string{"view", "container", "top", "base"} {
		if err := f.Remove(f.ctx, key); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Cleanup(f.ctx); err != nil {
		t.Fatal(err)
	}
	// XFS frees the blocks of deleted files in the background, and has no event for it.
	for end := time.Now().Add(10 * time.Second); taken()-before > 1<<20 && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
	}
	near(t, "store after removing everything", taken()-before, 0)
}

// TestUsageOfCopies: without reflinks a child takes all of its image's space, and Usage says so.
func TestUsageOfCopies(t *testing.T) {
	f := open(t, testfs.Ext4(t, 256<<20))
	f.layer("base", "", 8<<20)
	f.prepare("container", "base")
	near(t, "copy", f.usage("container"), 8<<20)
}
