package reflink

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

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
