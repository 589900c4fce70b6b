package snapshot

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/artefact"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// ownArtefacts has the stack that the test starts use artefacts that are its own.
func ownArtefacts(t *testing.T) {
	t.Helper()
	artefacts := filepath.Join(t.TempDir(), "artefacts")
	must(t, exec.Command("cp", "-a", s.Config.Artefacts, artefacts).Run())
	t.Setenv("CUBE_ARTEFACTS", artefacts)
}

// ownStack starts a stack for the test alone, which s is until the test's end.
func ownStack(t *testing.T, start func(root string) (*stack.Stack, error)) {
	t.Helper()
	root, err := stack.Repository()
	must(t, err)
	own, err := start(root)
	if own != nil {
		shared := s
		t.Cleanup(func() {
			if t.Failed() {
				t.Log(own.Logs())
			}
			must(t, own.Stop())
			s = shared
		})
	}
	must(t, err)
	s = own
	must(t, s.ImportDemo())
}

// another makes another artefact of the one in use, which is that from then on.
func another(t *testing.T, current string) {
	t.Helper()
	_, err := artefact.Publish(filepath.Dir(current), func(dir string) error {
		if err := exec.Command("cp", "-a", current+"/.", dir).Run(); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, "another"), nil, 0o644)
	})
	must(t, err)
}

// breakDisk has a saved root disk be what a guest that has destroyed its own file system would leave: what is saved is whole, but
// no file system.
func breakDisk(t *testing.T, st *snapshot.Store, id string) (heal func()) {
	t.Helper()
	info, err := st.Inspect(id)
	must(t, err)
	dir := filepath.Join(s.Config.SnapshotDir(), id)
	disk, description := filepath.Join(dir, vmm.DiskFile(vmm.RootSerial)), filepath.Join(dir, "snapshot.json")
	for _, path := range []string{disk, description} {
		must(t, os.Rename(path, path+".whole"))
		must(t, copyFile(path+".whole", path))
	}
	f, err := os.OpenFile(disk, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	const superblock, size = 1024, 1024
	_, err = f.WriteAt(make([]byte, size), superblock)
	must(t, err)
	n := slices.IndexFunc(info.Disks, func(d snapshot.Disk) bool { return d.Serial == vmm.RootSerial })
	info.Disks[n].File.Digests, err = memory.Digest(f, info.Disks[n].File.Size)
	must(t, err)
	b, err := json.Marshal(info)
	must(t, err)
	b, err = json.Marshal(map[string]any{"sha256": fmt.Sprintf("%x", sha256.Sum256(b)), "snapshot": json.RawMessage(b)})
	must(t, err)
	must(t, os.WriteFile(description, b, 0o600))
	return func() {
		for _, path := range []string{disk, description} {
			must(t, os.Rename(path+".whole", path))
		}
	}
}

// TestUpgrade: what was saved with an older QEMU goes on with it as long as that is there, and comes back from its disk when it
// isn't, if there is a file system on that.
func TestUpgrade(t *testing.T) {
	if os.Getenv("CUBE_TEST_LONG") == "" {
		t.Skip("it takes a minute and a stack of its own: CUBE_TEST_LONG=1 runs it")
	}
	ownArtefacts(t)
	ownStack(t, func(root string) (*stack.Stack, error) { return stack.Start(root) })
	st := store(t)
	id := s.ID(t, "old")
	cube(t, "run", "-d", "--name", id, stack.Image, "sh", "-c", keeper)
	t.Cleanup(func() { s.Cube("rm", "-f", id) }) // unless the test has come to that
	s.Eventually(t, time.Minute, "numbers", func() bool { return gapless(t, id) > 0 })
	before := lasts(t, id)
	cube(t, "pause", id)
	qemuOf := func() string {
		t.Helper()
		info, err := st.Inspect(cube(t, "snapshot", "ls", "-q"))
		must(t, err)
		return info.Platform.QEMU
	}
	old := qemuOf()

	cube(t, "down")
	another(t, s.Config.QEMUDir())
	another(t, s.Config.GuestDir())
	cube(t, "up", "-d")
	fresh := s.ID(t, "fresh")
	cube(t, "run", "-d", "--name", fresh, stack.Image, "sleep", "1000")
	cube(t, "prune")
	resumes(t, id)
	if after := lasts(t, id); after < before {
		t.Errorf("%d before, %d after", before, after)
	}
	cube(t, "pause", id)
	if q := qemuOf(); q != old {
		t.Errorf("it went on with QEMU %s, not %s", q, old)
	}
	cube(t, "snapshot", "create", "--name", "fresh", fresh)
	if info, err := st.Inspect("fresh"); err != nil || info.Platform.QEMU == old {
		t.Errorf("a new one has QEMU %s, %v", info.Platform.QEMU, err)
	}
	cube(t, "snapshot", "rm", "fresh")
	cube(t, "rm", "-f", fresh)

	must(t, os.RemoveAll(filepath.Join(filepath.Dir(s.Config.QEMUDir()), old)))
	heal := breakDisk(t, st, cube(t, "snapshot", "ls", "-q"))
	if r := s.Cube("resume", id); r.Err == nil || !strings.Contains(r.Stderr, "resume container "+id) {
		t.Errorf("resume with a broken disk: %+v", r)
	} else {
		t.Logf("with a broken disk: %s", r.Stderr)
	}
	isPaused(t, id)
	heal()
	if note := resumed(t, id); !strings.Contains(note, "not among the artefacts any more") || strings.Count(note, "\n") != 1 {
		t.Fatalf("resume without its QEMU: %q", note)
	}
	// The keeper began anew, in the file of before.
	s.Eventually(t, time.Minute, "a second beginning", func() bool { return cube(t, "exec", id, "sh", "-c", "grep -c ^1$ /n; :") == "2" })
	connected(t, id)
	cube(t, "pause", id)
	resumes(t, id)
	if n := cube(t, "exec", id, "grep", "-c", "^1$", "/n"); n != "2" {
		t.Errorf("it began %s times", n)
	}
	cube(t, "rm", "-f", id)
	if left, _ := os.ReadDir(s.Config.DiskDir()); len(left) > 0 {
		t.Errorf("disks are left: %v", left)
	}
}
