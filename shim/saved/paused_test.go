package saved

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/testfs"
)

func TestMain(m *testing.M) { testfs.Main(m) }

// TestPausedWithoutSpace: a container that is paused can be removed from a full disk, and so can one that isn't.
func TestPausedWithoutSpace(t *testing.T) {
	cfg := config.Default()
	cfg.StateDir = testfs.XFS(t, 300<<20)
	p := PausedOf(cfg, "default", "paused")
	unlock, err := p.Lock(t.Context())
	must(t, err)
	must(t, p.Write(Checkpoint{Snapshot: "s", Container: "paused", Time: time.Now()}))
	unlock()
	testfs.Fill(t, cfg.StateDir)

	other := PausedOf(cfg, "default", "other")
	if _, err := other.Lock(t.Context()); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a directory is made: %v", err)
	}
	unlock, there, err := other.LockExisting(t.Context())
	if err != nil || there {
		t.Errorf("one that isn't paused: %v, %v", there, err)
	}
	unlock()
	unlock, there, err = p.LockExisting(t.Context())
	if err != nil || !there {
		t.Fatalf("the paused one: %v, %v", there, err)
	}
	if _, locked, err := p.TryLock(); locked || err != nil {
		t.Errorf("a second time: %v, %v", locked, err)
	}
	must(t, p.Forget())
	unlock()
	empty(t, cfg)
}

// TestPausedLeavesNothing: the directories go with their last checkpoint, also of a pause that was killed while it wrote it.
func TestPausedLeavesNothing(t *testing.T) {
	cfg := config.Default()
	cfg.StateDir = t.TempDir()
	p := PausedOf(cfg, "default", "killed")
	unlock, err := p.Lock(t.Context())
	must(t, err)
	must(t, os.WriteFile(filepath.Join(string(p), checkpointFile+unfinished), []byte("{"), 0o600))
	unlock()
	empty(t, cfg)

	// Others make what one is about to remove.
	var g sync.WaitGroup
	for i := range 8 {
		p := PausedOf(cfg, fmt.Sprint("ns", i%2), fmt.Sprint("c", i%4))
		g.Go(func() {
			for range 50 {
				unlock, err := p.Lock(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				if err := errors.Join(p.Write(Checkpoint{Snapshot: "s"}), p.End("s")); err != nil {
					t.Error(err)
				}
				unlock()
			}
		})
	}
	g.Wait()
	empty(t, cfg)
}

func empty(t *testing.T, cfg *config.Config) {
	t.Helper()
	if left, err := os.ReadDir(cfg.PausedDir()); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
