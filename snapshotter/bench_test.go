package snapshotter

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/internal/testfs"
)

// BenchmarkPrepare makes a container's disk from an image of 256 MiB of files, and removes it again.
func BenchmarkPrepare(b *testing.B) {
	for _, fs := range []struct {
		name string
		make func(testing.TB, int64) string
	}{{"xfs", testfs.XFS}, {"ext4", testfs.Ext4}} {
		b.Run(fs.name, func(b *testing.B) {
			cfg := testConfig(b, fs.make(b, xfsSize))
			s, err := New(cfg, slog.New(slog.DiscardHandler))
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			ctx := context.Background()
			mounts, err := s.Prepare(ctx, "layer", "")
			if err != nil {
				b.Fatal(err)
			}
			onHost(b, mounts, func(dir string) { testfs.Random(b, filepath.Join(dir, "data"), 256<<20) })
			if err := s.Commit(ctx, "image", "layer"); err != nil {
				b.Fatal(err)
			}
			for i := 0; b.Loop(); i++ {
				if _, err := s.Prepare(ctx, fmt.Sprint(i), "image"); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := s.Remove(ctx, fmt.Sprint(i)); err != nil {
					b.Fatal(err)
				}
				if err := s.Cleanup(ctx); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
