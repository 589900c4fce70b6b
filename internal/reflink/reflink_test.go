package reflink

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/testfs"
)

func TestMain(m *testing.M) { testfs.Main(m) }

// sample is a file with data here and there.
func sample(t *testing.T, dir string) *os.File {
	t.Helper()
	f, err := os.CreateTemp(dir, "reflink-test-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close(); os.Remove(f.Name()) })
	for _, at := range []int64{0, 3 << 20, 9<<20 - 4096} {
		if _, err := f.WriteAt(bytes.Repeat([]byte{byte(at>>20) + 1}, 4096), at); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func content(t *testing.T, f *os.File) []byte {
	t.Helper()
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<30))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Many clones of one file at once, and between file systems that share nothing.
func TestCloneManyAtOnce(t *testing.T) {
	for name, dir := range map[string]string{"one file system": t.TempDir(), "two": "/dev/shm"} {
		t.Run(name, func(t *testing.T) {
			src := sample(t, dir)
			want := content(t, src)
			var wg sync.WaitGroup
			for i := range 4 {
				wg.Go(func() {
					dst, err := os.Create(filepath.Join(t.TempDir(), string(rune('a'+i))))
					if err != nil {
						t.Error(err)
						return
					}
					defer dst.Close()
					if _, err := Clone(t.Context(), dst, src); err != nil {
						t.Error(err)
						return
					}
					var st unix.Stat_t
					if err := unix.Fstat(int(dst.Fd()), &st); err != nil || st.Blocks*512 > 1<<20 {
						t.Errorf("the clone takes %d bytes, %v", st.Blocks*512, err)
					}
					if !bytes.Equal(content(t, dst), want) {
						t.Error("the clone differs")
					}
				})
			}
			wg.Wait()
		})
	}
}

func TestCopyCalledOff(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	src := sample(t, "/dev/shm")
	dst, err := os.Create(filepath.Join(t.TempDir(), "dst"))
	if err != nil {
		t.Fatal(err)
	}
	defer dst.Close()
	if _, err := Clone(ctx, dst, src); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// Clones differ where one of them was written to, and nowhere else; files that share nothing differ everywhere.
func TestDiffering(t *testing.T) {
	const size = 9 << 20
	for name, dir := range map[string]string{"xfs": testfs.XFS(t, 320<<20), "ext4": testfs.Ext4(t, 64<<20)} {
		t.Run(name, func(t *testing.T) {
			a := sample(t, dir) // data in 0, 3 and 8
			if _, err := Differing(a, sample(t, "/dev/shm"), size, 1<<20); !errors.Is(err, ErrUnmapped) {
				t.Errorf("on another device: %v", err)
			}
			b, err := os.CreateTemp(dir, "reflink-test-*")
			if err != nil {
				t.Fatal(err)
			}
			defer os.Remove(b.Name())
			defer b.Close()
			if err := a.Sync(); err != nil {
				t.Fatal(err)
			}
			shared, err := Clone(t.Context(), b, a)
			if err != nil || shared != (name == "xfs") {
				t.Fatalf("shared: %v, %v", shared, err)
			}
			check := func(want ...int64) {
				t.Helper()
				got, err := Differing(b, a, size, 1<<20)
				if err != nil {
					t.Fatal(err)
				}
				for _, n := range want {
					if !slices.Contains(got, n) {
						t.Errorf("no difference in unit %d, but in %v", n, got)
					}
				}
				if shared && !slices.Equal(got, want) {
					t.Errorf("differences in %v, want %v", got, want)
				}
				for n := range int64(9) { // none is overlooked
					x, y := content(t, a)[n<<20:min((n+1)<<20, size)], content(t, b)[n<<20:min((n+1)<<20, size)]
					if !bytes.Equal(x, y) && !slices.Contains(got, n) {
						t.Errorf("unit %d differs, but isn't in %v", n, got)
					}
				}
			}
			check()
			if _, err := b.WriteAt([]byte("x"), 3<<20+5); err != nil {
				t.Fatal(err)
			}
			check(3)
			if _, err := b.WriteAt([]byte("y"), 6<<20-1); err != nil {
				t.Fatal(err)
			}
			check(3, 5)
			if err := unix.Fallocate(int(b.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 1<<20); err != nil {
				t.Fatal(err)
			}
			check(0, 3, 5)
		})
	}
}
