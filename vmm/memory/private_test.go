package memory

import (
	"bytes"
	"encoding/base64"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/reflink"
)

// mapped is a sealed memory that this process maps privately, as a restored machine does.
func mapped(t testing.TB, src *os.File, n int64, flags int) (*os.File, []byte) {
	t.Helper()
	f, _, err := Seal(src, n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	prot := unix.PROT_READ
	if flags == unix.MAP_PRIVATE {
		prot |= unix.PROT_WRITE
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(n), prot, flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return f, b
}

// overlay saves the mapped memory over a clone of src.
func overlay(t testing.TB, f, src *os.File, n int64) (*os.File, Written) {
	t.Helper()
	p, err := OpenPrivate("/proc/self", f, n)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	dst, err := os.Create(filepath.Join(t.TempDir(), "saved"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dst.Close() })
	if _, err := reflink.Clone(t.Context(), dst, src); err != nil {
		t.Fatal(err)
	}
	u, err := NewUnderlay(dst, n)
	if err != nil {
		t.Fatal(err)
	}
	w, err := p.Overlay(t.Context(), u)
	if err != nil {
		t.Fatal(err)
	}
	return dst, w
}

// What a process has written, and nothing else, is in the copy; zeros are holes; the digests are right without reading what
// didn't change.
func TestOverlay(t *testing.T) {
	src := sample(t)
	base, err := Digest(src, size)
	if err != nil {
		t.Fatal(err)
	}
	f, b := mapped(t, src, size, unix.MAP_PRIVATE)
	dst, w := overlay(t, f, src, size)
	if w.Pages != 0 || w.Bytes != 0 || len(w.Chunks) != 0 || !bytes.Equal(content(t, dst), content(t, src)) {
		t.Errorf("nothing was written, but %+v", w)
	}
	for _, off := range []int{0, 100, ChunkSize - 1, ChunkSize, 3*ChunkSize + 70*pageSize, size - 1} {
		b[off] ^= 0x55
	}
	clear(b[2*ChunkSize : 3*ChunkSize]) // has data in the file
	dst, w = overlay(t, f, src, size)
	if !bytes.Equal(content(t, dst), b) {
		t.Error("the copy differs")
	}
	if want := []int64{0, 1, 2, 3, 8}; !slices.Equal(w.Chunks, want) {
		t.Errorf("chunks %v, want %v", w.Chunks, want)
	}
	if want := int64(5 + ChunkSize/pageSize); w.Pages != want {
		t.Errorf("%d pages, want %d", w.Pages, want)
	}
	if want := int64(4*clusterSize + 3*pageSize); w.Bytes != want { // the last cluster is cut short
		t.Errorf("%d bytes written, want %d", w.Bytes, want)
	}
	if held, err := segments(dst, size, pageSize); err != nil || slices.ContainsFunc(held, func(s segment) bool { return s.start < 3*ChunkSize && s.end > 2*ChunkSize }) {
		t.Errorf("zeros are no hole: %v, %v", held, err)
	}
	updated, err := base.Update(dst, size, w.Chunks)
	if err != nil {
		t.Fatal(err)
	}
	if want, err := Digest(dst, size); err != nil || !maps.Equal(updated, want) || maps.Equal(updated, base) {
		t.Errorf("digests %s, want %s, %v", updated, want, err)
	}
}

// The kernel's search and ours find the same.
func TestScan(t *testing.T) {
	src := sample(t)
	f, b := mapped(t, src, size, unix.MAP_PRIVATE)
	for range 300 {
		b[rand.N(size)]++
	}
	_ = bytes.Count(b, []byte{1}) // the file's own pages are there, too
	p, err := OpenPrivate("/proc/self", f, size)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	want, err := p.read(p.spans[0])
	if err != nil || len(want) < 100 {
		t.Fatalf("%d runs, %v", len(want), err)
	}
	got, err := p.scan(p.spans[0])
	if errors.Is(err, unix.ENOTTY) {
		t.Skip("this kernel has no PAGEMAP_SCAN")
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v\n%v, %v", got, want, err)
	}
}

func TestOpenPrivateFails(t *testing.T) {
	src := sample(t)
	shared, _ := mapped(t, src, size, unix.MAP_SHARED)
	private, b := mapped(t, src, 2*ChunkSize, unix.MAP_PRIVATE)
	for name, tc := range map[string]struct {
		f    *os.File
		size int64
		want string
	}{
		"shared":     {shared, size, "not mapped privately"},
		"not at all": {src, size, "0 bytes of"},
		"too small":  {private, size, "of 8400896"},
	} {
		if _, err := OpenPrivate("/proc/self", tc.f, tc.size); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
	if _, err := OpenPrivate("/proc/0", private, size); err == nil {
		t.Error("a process that isn't there has a memory")
	}
	// A hole in the middle: what is mapped over it is another memory.
	if _, err := unix.MmapPtr(-1, 0, ptr(&b[ChunkSize]), pageSize, unix.PROT_READ, unix.MAP_FIXED|unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenPrivate("/proc/self", private, 2*ChunkSize); err == nil || !strings.Contains(err.Error(), "mapped once and in order") {
		t.Errorf("with a hole: %v", err)
	}
}

func TestDigestsText(t *testing.T) {
	src := sample(t)
	d, err := Digest(src, size)
	if err != nil {
		t.Fatal(err)
	}
	text, err := d.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	var again Digests
	if err := again.UnmarshalText(text); err != nil || !maps.Equal(again, d) {
		t.Errorf("%s, want %s, %v", again, d, err)
	}
	double := append(d.bytes(), d.bytes()[:entrySize]...)
	for name, bad := range map[string][]byte{
		"cut short":  text[:len(text)-8],
		"no base64":  []byte("!" + string(text[1:])),
		"unordered":  []byte(encode(double)),
		"negative":   []byte(encode(append([]byte{0xff}, d.bytes()[1:entrySize]...))),
		"twice over": append(slices.Clone(text), text...),
	} {
		if err := again.UnmarshalText(bad); err == nil {
			t.Errorf("%s: was read", name)
		}
	}
	delete(again, 0)
	if err := d.Check(src, size); err != nil {
		t.Error(err)
	}
	for _, other := range []Digests{{}, nil, {99: {1}}} {
		if err := other.Check(src, size); !errors.Is(err, ErrDamaged) {
			t.Errorf("%v: %v", other, err)
		}
	}
}

// BenchmarkOverlay is a save of 64 MiB of written memory.
func BenchmarkOverlay(b *testing.B) {
	const n = 256 << 20
	src, err := os.CreateTemp(b.TempDir(), "src")
	if err != nil {
		b.Fatal(err)
	}
	defer src.Close()
	if err := src.Truncate(n); err != nil {
		b.Fatal(err)
	}
	f, m := mapped(b, src, n, unix.MAP_PRIVATE)
	for off := 0; off < 64<<20; off += pageSize {
		m[off] = 1
	}
	b.SetBytes(64 << 20)
	for b.Loop() {
		overlay(b, f, src, n)
	}
}

func encode(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

func ptr(b *byte) unsafe.Pointer { return unsafe.Pointer(b) }
