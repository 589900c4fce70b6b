package ctr

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestContainersInAContainer: a privileged container has, from its machine's kernel, what an engine for containers takes,
// whichever kernel that is: a network of its own with NAT, overlays, FUSE, disks of files, taps.
func TestContainersInAContainer(t *testing.T) {
	dir := t.TempDir()
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", filepath.Join(dir, "nested"), "./nested")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	id := s.ID(t, "nested")
	r := s.Ctr(runArgs(id, append(bind(dir, "/tests", "rbind:ro"), "--rm", "--privileged"), "/tests/nested")...)
	if want := "overlay\nfuse\nloop\ntun\nnetwork\n"; r.Code != 0 || r.Stdout != want {
		t.Errorf("kernel %s: exit code %d, passed %q: %s", guestKernel(t), r.Code, r.Stdout, r.Stderr)
	}
	noLeaks(t, id)
}
