package artefact

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestAddLibraries takes a dynamic program of this host with its libraries and runs it where there is nothing else.
func TestAddLibraries(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("chroot needs root")
	}
	tree := Tree{}
	if err := Sysroot("/").Add(tree, "bin/ls"); err != nil {
		t.Fatal(err)
	}
	if len(tree) < 3 {
		t.Fatalf("no libraries: %v", tree.Paths())
	}
	dir := t.TempDir()
	if err := tree.Write(dir); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("chroot", dir, "/bin/ls", "/").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "bin") {
		t.Fatalf("%v: %s", err, out)
	}
}

func TestSysrootStaysInside(t *testing.T) {
	outside, root := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "secret"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(outside, "secret"), filepath.Join(root, "link")); err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{"link", "../" + filepath.Base(outside) + "/secret"} {
		if err := Sysroot(root).Add(Tree{}, at); err == nil {
			t.Errorf("%s led out of the sysroot", at)
		}
	}
}

func TestMissingLibrary(t *testing.T) {
	root := t.TempDir()
	b, err := os.ReadFile("/bin/ls")
	if err != nil {
		t.Skip("no /bin/ls:", err)
	}
	if err := os.WriteFile(filepath.Join(root, "ls"), b, 0o755); err != nil {
		t.Fatal(err)
	}
	err = Sysroot(root).Add(Tree{}, "ls")
	if err == nil || !strings.Contains(err.Error(), "libraries of ls: ") {
		t.Fatalf("got %v, want the name of the library that is missing", err)
	}
}
