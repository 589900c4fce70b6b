package image

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/reflink"
	"github.com/cubesandbox/cube/internal/testfs"
)

func TestMain(m *testing.M) { testfs.Main(m) }

func create(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func blocks(t testing.TB, f *os.File) int64 {
	t.Helper()
	n, err := allocated(f)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func tool(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestFormat(t *testing.T) {
	for _, size := range []int64{MinSize, 10 << 30, MaxSize} {
		f := create(t, filepath.Join(t.TempDir(), "img"))
		if err := Format(context.Background(), f.Name(), size); err != nil {
			t.Fatal(err)
		}
		if err := CheckClean(f); err != nil {
			t.Error(err)
		}
		if size == MaxSize {
			continue // the tools take seconds for it
		}
		tool(t, "e2fsck", "-fn", f.Name())
		if ls := tool(t, "debugfs", "-R", "ls -p /", f.Name()); strings.Contains(ls, "lost+found") {
			t.Errorf("lost+found is there: %s", ls)
		}
		if n := blocks(t, f); n > 1<<20 {
			t.Errorf("an empty disk of %d bytes takes %d", size, n)
		}
		header := tool(t, "dumpe2fs", f.Name())
		for _, want := range []string{"has_journal", "Reserved block count:     0\n"} {
			if !strings.Contains(header, want) {
				t.Errorf("no %q in %s", want, header)
			}
		}
		if groups, zeroed := strings.Count(header, ": (Blocks "), strings.Count(header, "ITABLE_ZEROED"); groups == 0 || groups != zeroed {
			t.Errorf("%d of %d inode tables are known to be zeroed; the kernel would write the others", zeroed, groups)
		}
	}
}

// TestFormatGrows shows that even the smallest disk has room for the group descriptors of the largest.
func TestFormatGrows(t *testing.T) {
	f := create(t, filepath.Join(t.TempDir(), "img"))
	if err := Format(context.Background(), f.Name(), MinSize); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(MaxSize); err != nil {
		t.Fatal(err)
	}
	tool(t, "resize2fs", f.Name())
	tool(t, "e2fsck", "-fn", f.Name())
	if h := tool(t, "dumpe2fs", "-h", f.Name()); !strings.Contains(h, "Block count:              268435456\n") || strings.Contains(h, "meta_bg") {
		t.Errorf("not grown in place: %s", h)
	}
}

func TestFormatWithoutTools(t *testing.T) {
	f := create(t, filepath.Join(t.TempDir(), "img"))
	t.Setenv("PATH", "")
	if err := Format(context.Background(), f.Name(), MinSize); err == nil || !strings.Contains(err.Error(), "install e2fsprogs") {
		t.Fatalf("got %v", err)
	}
}

func TestClone(t *testing.T) {
	for name, dir := range map[string]string{"xfs": testfs.XFS(t, 512<<20), "ext4": testfs.Ext4(t, 256<<20)} {
		t.Run(name, func(t *testing.T) {
			src := create(t, filepath.Join(dir, "src"))
			data := bytes.Repeat([]byte("cube"), 1<<18)
			for _, at := range []int64{4096, 50 << 20} {
				if _, err := src.WriteAt(data, at); err != nil {
					t.Fatal(err)
				}
			}
			if err := src.Truncate(100 << 20); err != nil {
				t.Fatal(err)
			}
			dst := create(t, filepath.Join(dir, "dst"))
			shared, err := Clone(context.Background(), dst, src)
			if err != nil {
				t.Fatal(err)
			}
			if shared != (name == "xfs") {
				t.Errorf("shared = %v", shared)
			}
			tool(t, "cmp", src.Name(), dst.Name())
			if n := blocks(t, dst); n > 3<<20 {
				t.Errorf("the clone of a sparse file takes %d bytes", n)
			}
			if ok, err := reflink.Possible(dir); err != nil || ok != shared {
				t.Errorf("reflink.Possible = %v, %v", ok, err)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, ".probe*")); len(left) > 0 {
				t.Errorf("probe left %v", left)
			}
			// An empty file, and one that ends in data.
			for _, size := range []int64{0, 5 << 20} {
				a, b := create(t, filepath.Join(t.TempDir(), "a")), create(t, filepath.Join(t.TempDir(), "b"))
				if _, err := a.Write(make([]byte, size)); err != nil {
					t.Fatal(err)
				}
				if _, err := Clone(context.Background(), b, a); err != nil {
					t.Fatal(err)
				}
				tool(t, "cmp", a.Name(), b.Name())
			}
		})
	}
}

func TestCloneCarriesTheMark(t *testing.T) {
	dir := testfs.XFS(t, 512<<20)
	src, dst := create(t, filepath.Join(dir, "src")), create(t, filepath.Join(dir, "dst"))
	if err := guestmark.Set(src); err != nil {
		t.Fatal(err)
	}
	if _, err := Clone(context.Background(), dst, src); err != nil {
		t.Fatal(err)
	}
	if marked, err := guestmark.IsSet(dst.Name()); err != nil || !marked {
		t.Fatalf("marked = %v, %v", marked, err)
	}
}

func TestCopyStopsWithContext(t *testing.T) {
	dir := testfs.Ext4(t, 256<<20)
	src, dst := create(t, filepath.Join(dir, "src")), create(t, filepath.Join(dir, "dst"))
	testfs.Random(t, src.Name(), 4<<20)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Clone(ctx, dst, src); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
}

func TestCheckClean(t *testing.T) {
	f := create(t, filepath.Join(t.TempDir(), "img"))
	if err := CheckClean(f); err == nil {
		t.Error("an empty file passes")
	}
	if err := Format(context.Background(), f.Name(), MinSize); err != nil {
		t.Fatal(err)
	}
	mnt := filepath.Join(t.TempDir(), "mnt")
	testfs.Mount(t, mount.Mount{Type: "ext4", Source: f.Name(), Options: []string{"loop"}}, mnt)
	if err := os.WriteFile(filepath.Join(mnt, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	unix.Sync()
	if err := CheckClean(f); !errors.Is(err, ErrNotClean) {
		t.Errorf("mounted: %v", err)
	}
	if err := unix.Unmount(mnt, 0); err != nil {
		t.Fatal(err)
	}
	if err := CheckClean(f); err != nil {
		t.Errorf("unmounted: %v", err)
	}
	tool(t, "debugfs", "-w", "-R", "ssv state 2", f.Name())
	if err := CheckClean(f); !errors.Is(err, ErrNotClean) {
		t.Errorf("with errors: %v", err)
	}
	tool(t, "dd", "if=/dev/zero", "of="+f.Name(), "bs=4096", "count=1", "conv=notrunc")
	if err := CheckClean(f); !errors.Is(err, ErrNotClean) {
		t.Errorf("without superblock: %v", err)
	}
}

func TestSettle(t *testing.T) {
	w := create(t, filepath.Join(t.TempDir(), "img"))
	f, err := os.Open(w.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()

	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := Settle(ctx, f); !errors.Is(err, ErrBusy) {
		t.Fatalf("with a writer: %v", err)
	}

	type result struct {
		release func()
		err     error
	}
	settled := make(chan result, 1)
	ctx, cancel = context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	go func() {
		release, err := Settle(ctx, f)
		settled <- result{release, err}
	}()
	select {
	case r := <-settled:
		t.Fatalf("settled although there is a writer: %v", r.err)
	case <-time.After(50 * time.Millisecond):
	}
	w.Close()
	r := <-settled
	if r.err != nil {
		t.Fatal(r.err)
	}
	if _, err := os.OpenFile(f.Name(), os.O_RDWR|unix.O_NONBLOCK, 0); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("a writer gets in before release: %v", err)
	}
	r.release()
	again, err := os.OpenFile(f.Name(), os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatalf("after release: %v", err)
	}
	again.Close()
}

// TestSettleSeesLoopDevices is the case that matters: a mount that somebody else still has.
func TestSettleSeesLoopDevices(t *testing.T) {
	f := create(t, filepath.Join(t.TempDir(), "img"))
	if err := Format(context.Background(), f.Name(), MinSize); err != nil {
		t.Fatal(err)
	}
	f.Close()
	mnt := filepath.Join(t.TempDir(), "mnt")
	testfs.Mount(t, mount.Mount{Type: "ext4", Source: f.Name(), Options: []string{"loop"}}, mnt)
	// A process in a copy of this mount namespace.
	holder := exec.Command("unshare", "--mount", "sh", "-c", "echo; read line")
	stdin, err := holder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := stdout.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Unmount(mnt, 0); err != nil {
		t.Fatal(err)
	}
	r, err := os.Open(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := Settle(ctx, r); !errors.Is(err, ErrBusy) {
		t.Fatalf("while another namespace has the mount: %v", err)
	}
	stdin.Close()
	if err := holder.Wait(); err == nil {
		t.Log("holder ended 0")
	}
	ctx, cancel = context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	release, err := Settle(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if err := CheckClean(r); err != nil {
		t.Error(err)
	}
}
