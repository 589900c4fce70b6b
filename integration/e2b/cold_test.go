package e2b

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cubesandbox/cube/internal/reflink"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm"
)

// TestColdPause: a pause without memory keeps the disk, with what was written a moment ago, and nothing else. The sandbox boots with
// it, by its id and its token, when it is connected to; a request doesn't wake it.
func TestColdPause(t *testing.T) {
	c := newClient(t)
	sb := c.create(map[string]any{"autoResume": map[string]any{"enabled": true}})
	defer c.killAll()
	c.marks(sb, "word")
	c.says(sb, "head -c 64M /dev/urandom > /dev/shm/ballast; echo kept > note; cat note", "kept")

	began := time.Now()
	c.do("POST", "/sandboxes/"+sb.ID+"/pause", map[string]any{"memory": false}, nil, 204)
	took := time.Since(began)
	cp, err := saved.PausedOf(s.Config, s.Config.Containerd.Namespace, sb.ID).Checkpoint()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(s.Config.SnapshotDir(), cp.Snapshot)
	if !cp.Cold {
		t.Error("it is paused with its memory")
	}
	for _, name := range []string{vmm.MemoryFile, vmm.StateFile} {
		if _, err := os.Stat(filepath.Join(dir, name)); !os.IsNotExist(err) {
			t.Errorf("%s was saved: %v", name, err)
		}
	}
	own := exclusive(t, filepath.Join(dir, vmm.DiskFile(vmm.RootSerial)))
	if _, err := c.run(sb, "true"); err == nil {
		t.Error("a request has woken it")
	}

	began = time.Now()
	var again sandbox
	c.do("POST", "/v2/sandboxes/"+sb.ID+"/connect", map[string]any{"timeout": 3600}, &again, 201)
	t.Logf("paused in %v, %d KiB of its own on the disk; booted again in %v", took.Round(time.Millisecond), own>>10, time.Since(began).Round(time.Millisecond))
	if again.ID != sb.ID || again.Token != sb.Token {
		t.Errorf("it comes back as %s", again.ID)
	}
	c.says(sb, "cat note; ls /dev/shm; pgrep -fc '^word 36000' || true", "kept\n0")
}

// exclusive is what a file has on the disk that no other has, in bytes.
func exclusive(t *testing.T, path string) (bytes uint64) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = reflink.EachExtent(f, func(e reflink.Extent) error {
		if !e.Shared() {
			bytes += e.Length
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}
