package snapshot_test

import (
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/testfs"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// TestDeleteInAFullStore: what frees space needs none.
func TestDeleteInAFullStore(t *testing.T) {
	cfg := config.Default()
	cfg.StateDir, cfg.RunDir = testfs.XFS(t, 300<<20), t.TempDir()
	s := &shelf{snapshot.New(cfg, slog.New(slog.DiscardHandler)), cfg}
	s.save(t, "one")
	testfs.Fill(t, s.cfg.SnapshotDir())
	if _, err := s.Delete("one"); err != nil {
		t.Error(err)
	}
	left, err := os.ReadDir(s.cfg.SnapshotDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range left {
		if !strings.HasPrefix(e.Name(), "ballast") {
			t.Errorf("%s is left", e.Name())
		}
	}
}
