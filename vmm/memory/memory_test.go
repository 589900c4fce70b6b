package memory

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/process"
)

const size = 8*ChunkSize + 3*pageSize // not a whole number of chunks

// sample is a memory with some data, some written zeros and many holes.
func sample(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "memory"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for _, w := range []struct {
		off  int64
		data []byte
	}{
		{0, bytes.Repeat([]byte{1}, 100)},
		{2*ChunkSize + 5*pageSize, bytes.Repeat([]byte{2}, 2*pageSize)},
		{4 * ChunkSize, make([]byte, 2*ChunkSize)},
		{6*ChunkSize - 10, bytes.Repeat([]byte{3}, 20)},
		{size - 1, []byte{4}},
	} {
		if _, err := f.WriteAt(w.data, w.off); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func content(t testing.TB, f *os.File) []byte {
	t.Helper()
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 2*size))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func blocks(t testing.TB, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

func TestCopy(t *testing.T) {
	f := sample(t)
	digest, err := Digest(f, size)
	if err != nil {
		t.Fatal(err)
	}
	dst, err := os.Create(filepath.Join(t.TempDir(), "copy"))
	if err != nil {
		t.Fatal(err)
	}
	defer dst.Close()
	got, err := Copy(dst, f, size)
	if err != nil || !maps.Equal(got, digest) {
		t.Fatalf("digest %s, want %s, %v", got, digest, err)
	}
	if now, was := blocks(t, dst), blocks(t, f); now >= was-ChunkSize {
		t.Errorf("the copy takes %d bytes, the source %d", now, was)
	}
	if !bytes.Equal(content(t, dst), content(t, f)) {
		t.Error("the content differs")
	}
	if again, err := Digest(dst, size); err != nil || !maps.Equal(again, digest) {
		t.Errorf("digest with holes %s, without %s, %v", again, digest, err)
	}
}

func TestDigestSeesEveryChange(t *testing.T) {
	f := sample(t)
	seen := make(map[string]int64)
	for _, off := range []int64{-1, 50, 3 * ChunkSize, 6*ChunkSize - 1, size - 1} {
		if off >= 0 {
			if _, err := f.WriteAt([]byte{0xee}, off); err != nil {
				t.Fatal(err)
			}
		}
		d, err := Digest(f, size)
		if err != nil {
			t.Fatal(err)
		}
		if was, ok := seen[d.String()]; ok {
			t.Errorf("a change at %d gives the digest of that at %d", off, was)
		}
		seen[d.String()] = off
	}
	if err := f.Truncate(size - 1); err != nil {
		t.Fatal(err)
	}
	if _, err := Digest(f, size); err == nil {
		t.Error("a file cut short has a digest")
	}
}

// The copy can't be changed: not by its maker, not by another descriptor, not by a mapping.
func TestSeal(t *testing.T) {
	src := sample(t)
	f, digest, err := Seal(src, size)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if want, err := Digest(src, size); err != nil || !maps.Equal(digest, want) {
		t.Fatalf("digest %s, want %s, %v", digest, want, err)
	}
	if !bytes.Equal(content(t, f), content(t, src)) {
		t.Fatal("the copy differs")
	}
	if blocks(t, f) > 4*ChunkSize {
		t.Errorf("the copy takes %d bytes", blocks(t, f))
	}
	other, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for name, try := range map[string]func(f *os.File) error{
		"write":    func(f *os.File) error { _, err := f.WriteAt([]byte{9}, 0); return err },
		"truncate": func(f *os.File) error { return f.Truncate(0) },
		"grow":     func(f *os.File) error { return f.Truncate(2 * size) },
		"punch": func(f *os.File) error {
			return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, pageSize)
		},
		"map shared": func(f *os.File) error {
			_, err := unix.Mmap(int(f.Fd()), 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			return err
		},
		"unseal": func(f *os.File) error {
			_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_EXEC)
			return err
		},
	} {
		for _, f := range []*os.File{f, other} {
			if err := try(f); !errors.Is(err, unix.EPERM) {
				t.Errorf("%s: %v, want EPERM", name, err)
			}
		}
	}
	// What QEMU does: a private mapping that it may write to.
	m, err := unix.Mmap(int(other.Fd()), 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	m[0] = 77
	_ = unix.Munmap(m)
	if !bytes.Equal(content(t, f), content(t, src)) {
		t.Error("a private mapping has changed the file")
	}
}

// holderEnv makes the test binary a process that holds a memory in the pool of that directory.
const holderEnv = "CUBE_TEST_HOLD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(holderEnv); dir != "" {
		fmt.Println(hold(dir))
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func hold(dir string) string {
	src, err := os.Open(filepath.Join(dir, "memory"))
	if err != nil {
		return err.Error()
	}
	h, err := NewPool(dir).Hold(context.Background(), "key", size, func() (*os.File, error) {
		f, _, err := Seal(src, size)
		return f, err
	})
	if err != nil {
		return err.Error()
	}
	_, ino, err := identity(h.File)
	return fmt.Sprint(h.Copied, " ", ino, " ", err)
}

// other starts a process that holds the memory.
func other(t *testing.T, dir string) (copied bool, ino uint64, kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), holderEnv+"="+dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = in.Close()
	}
	t.Cleanup(kill)
	line, _ := bufio.NewReader(out).ReadString('\n')
	if _, err := fmt.Sscan(line, &copied, &ino); err != nil {
		t.Fatalf("the holder says %q", line)
	}
	return copied, ino, kill
}

func TestPoolBetweenProcesses(t *testing.T) {
	src := sample(t)
	dir := filepath.Dir(src.Name())
	pool := NewPool(dir)
	get := func() *Held {
		t.Helper()
		h, err := pool.Hold(context.Background(), "key", size, func() (*os.File, error) {
			f, _, err := Seal(src, size)
			return f, err
		})
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	copied, ino, kill := other(t, dir)
	if !copied || !pool.InUse("key") {
		t.Fatalf("the first holder copied: %v, in use: %v", copied, pool.InUse("key"))
	}
	h := get()
	if _, mine, _ := identity(h.File); h.Copied || mine != ino {
		t.Fatalf("copied %v, inode %d, the holder's %d", h.Copied, mine, ino)
	}
	kill()
	// The holder is gone, the memory isn't: this process holds it.
	copied, again, kill := other(t, dir)
	if copied || again != ino {
		t.Fatalf("the second holder copied: %v, inode %d, want %d", copied, again, ino)
	}
	if err := h.Release(); err != nil {
		t.Fatal(err)
	}
	kill()
	if pool.InUse("key") {
		t.Fatal("in use by nobody")
	}
	h = get()
	defer h.Release()
	if !h.Copied {
		t.Fatal("a dead holder's memory was found")
	}
	entries, _ := filepath.Glob(filepath.Join(dir, "key", "[0-9]*"))
	if len(entries) != 1 {
		t.Fatalf("entries %v, want this process's only", entries)
	}
}

// An entry is believed only as far as the file behind it is what it should be.
func TestPoolRefusesOtherFiles(t *testing.T) {
	src := sample(t)
	self, err := process.Self()
	if err != nil {
		t.Fatal(err)
	}
	unsealed, err := memfd("unsealed")
	if err != nil {
		t.Fatal(err)
	}
	defer unsealed.Close()
	if err := unsealed.Truncate(size); err != nil {
		t.Fatal(err)
	}
	sealed, _, err := Seal(src, size)
	if err != nil {
		t.Fatal(err)
	}
	defer sealed.Close()
	entry := func(f *os.File, ino uint64) holder {
		h := holder{ID: self, FD: int(f.Fd())}
		h.Dev, h.Ino, _ = identity(f)
		if ino != 0 {
			h.Ino = ino
		}
		return h
	}
	for name, h := range map[string]holder{
		"unsealed":       entry(unsealed, 0),
		"a plain file":   entry(src, 0),
		"another inode":  entry(sealed, 1),
		"closed":         {ID: self, FD: 4711},
		"no such holder": {ID: process.ID{PID: self.PID, Start: self.Start + 1}, FD: int(sealed.Fd())},
	} {
		if f, err := h.open(size); err == nil && h.Alive() {
			f.Close()
			t.Errorf("%s was taken", name)
		}
	}
	f, err := entry(sealed, 0).open(size)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if f, err := entry(sealed, 0).open(size + 1); err == nil {
		f.Close()
		t.Error("another size was taken")
	}
}

func TestHoldFailure(t *testing.T) {
	pool := NewPool(t.TempDir())
	boom := errors.New("boom")
	if _, err := pool.Hold(context.Background(), "key", size, func() (*os.File, error) { return nil, boom }); !errors.Is(err, boom) {
		t.Fatalf("got %v", err)
	}
	if _, err := pool.Hold(context.Background(), "key", size, func() (*os.File, error) { return memfd("unsealed") }); err == nil {
		t.Fatal("an unsealed copy was taken")
	}
	if pool.InUse("key") {
		t.Fatal("in use by nobody")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	h, err := pool.Hold(ctx, "key", size, func() (*os.File, error) { f, _, err := Seal(sample(t), size); return f, err })
	if err != nil {
		t.Fatalf("after failures: %v", err)
	}
	_ = h.Release()
}
