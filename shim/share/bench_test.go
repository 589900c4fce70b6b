package share_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/shim/share"
	"github.com/cubesandbox/cube/shim/spec"
)

// BenchmarkStart is what a container with a bind mount pays before its guest sees anything, and at its end.
func BenchmarkStart(b *testing.B) {
	cfg := host(b)
	c := configFor(b, cfg, &recorder{}, spec.Share{Source: b.TempDir()})
	for b.Loop() {
		s, err := share.Start(within(b, cfg, 20*time.Second), c)
		if err != nil {
			b.Fatal(err)
		}
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRead is a large read of what is in the host's page cache, BenchmarkStat the smallest request.
func BenchmarkRead(b *testing.B) {
	dir := b.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), make([]byte, 1<<20), 0o600); err != nil {
		b.Fatal(err)
	}
	s := start(b, spec.Share{Source: dir})
	c, root := connect(b, s.Conns()[0], 0)
	f := must(c.Open(root, unix.O_RDONLY, "f"))(b)
	size := c.MSize - 11
	b.SetBytes(int64(size))
	for b.Loop() {
		if got, err := c.Read(f, 0, size); err != nil || len(got) != int(size) {
			b.Fatal(len(got), err)
		}
	}
}

// See BenchmarkRead.
func BenchmarkStat(b *testing.B) {
	s := start(b, spec.Share{Source: b.TempDir()})
	c, root := connect(b, s.Conns()[0], 0)
	for b.Loop() {
		if _, err := c.Stat(root); err != nil {
			b.Fatal(err)
		}
	}
}
