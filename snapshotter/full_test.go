package snapshotter

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/space"
	"github.com/cubesandbox/cube/internal/testfs"
)

// fill leaves about the given number of bytes free in dir's file system, and returns how to give the rest back.
func fill(t *testing.T, dir string, leave int64) (empty func()) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var size int64
	for step := int64(256 << 20); step >= 4096; {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		if int64(st.Bfree)*st.Bsize-step < leave || unix.Fallocate(int(f.Fd()), 0, size, step) != nil {
			step /= 2
			continue
		}
		size += step
	}
	return func() {
		if err := os.Remove(f.Name()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFullStore(t *testing.T) {
	for _, fs := range []struct {
		name string
		make func(testing.TB, int64) string
	}{{"xfs", testfs.XFS}, {"ext4", testfs.Ext4}} {
		t.Run(fs.name, func(t *testing.T) {
			dir := fs.make(t, 512<<20)
			f := open(t, dir)
			f.cfg.Store.HighWatermark = 100
			f.layer("base", "", 8<<20)
			f.layer("old", "base", 16<<20)
			fill(t, dir, 0)
			for _, parent := range []string{"", "base"} {
				_, err := f.Prepare(f.ctx, "new", parent)
				if parent == "base" && err == nil && fs.name == "xfs" {
					// A clone takes no blocks, so there may be room for it.
					if err := f.Remove(f.ctx, "new"); err != nil {
						t.Fatal(err)
					}
					continue
				}
				wantErr(t, err, errdefs.IsResourceExhausted, `prepare snapshot "new"`, f.cfg.StoreDir(), "is full", "store.size")
			}
			if err := f.Cleanup(f.ctx); err != nil {
				t.Fatal(err)
			}
			f.check([]string{"base", "old"})

			// The way out is open: a snapshotter that starts on the full store can remove what isn't needed.
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			f = open(t, dir)
			f.cfg.Store.HighWatermark = 100
			if err := f.Remove(f.ctx, "old"); err != nil {
				t.Fatal(err)
			}
			if err := f.Cleanup(f.ctx); err != nil {
				t.Fatal(err)
			}
			f.prepare("new", "")
			f.check([]string{"base", "new"})
		})
	}
}

// Above the watermark no disk is made, while layers that are being unpacked can be completed, looked at and removed.
func TestWatermark(t *testing.T) {
	f := open(t, testfs.XFS(t, 512<<20))
	f.layer("old", "", 32<<20)
	f.prepare("unpacked", "old")
	f.cfg.Store.HighWatermark = 50
	empty := fill(t, f.cfg.StateDir, 128<<20)
	_, err := f.Prepare(f.ctx, "new", "old")
	wantErr(t, err, errdefs.IsResourceExhausted, `prepare snapshot "new"`, f.cfg.StoreDir(), "store.high_watermark = 50", "cube prune")
	if err := f.Commit(f.ctx, "layer", "unpacked"); err != nil {
		t.Error(err)
	}
	if _, err := f.View(f.ctx, "view", "layer"); err != nil {
		t.Error(err)
	}
	if err := f.Remove(f.ctx, "view"); err != nil {
		t.Error(err)
	}
	if err := f.Cleanup(f.ctx); err != nil {
		t.Error(err)
	}
	empty()
	space.Settle(f.cfg.StoreDir())
	f.prepare("new", "layer")
}

// TestFullStoreWhileUnpacking: the writer of a layer may never learn that its data was lost, but the commit does, even
// if the store was full for no longer than the data took to be written.
func TestFullStoreWhileUnpacking(t *testing.T) {
	dir := testfs.XFS(t, 512<<20)
	f := open(t, dir)
	m := f.prepare("layer", "")
	empty := fill(t, dir, 8<<20)
	onHost(t, m, func(dir string) {
		file, err := os.Create(filepath.Join(dir, "data"))
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		if _, err := file.Write(make([]byte, 32<<20)); err != nil {
			t.Fatal(err)
		}
		// Only the data is written, as the kernel does when it is old enough; who doesn't ask isn't told.
		const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
		if err := unix.SyncFileRange(int(file.Fd()), 0, 0, all); err == nil {
			t.Fatal("the data fits into the full store")
		}
		empty()
	})
	wantErr(t, f.Commit(f.ctx, "new", "layer"), errdefs.IsFailedPrecondition, "not clean", "full for a while", f.cfg.StoreDir())
	if err := f.Remove(f.ctx, "layer"); err != nil {
		t.Fatal(err)
	}
}
