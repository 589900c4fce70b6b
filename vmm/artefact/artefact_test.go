package artefact

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/internal/flock"
)

func content(s string) func(string) error {
	return func(dir string) error { return os.WriteFile(filepath.Join(dir, "f"), []byte(s), 0o644) }
}

func publish(t *testing.T, parent, s string) string {
	t.Helper()
	dir, err := Publish(parent, content(s))
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestPublish(t *testing.T) {
	parent := filepath.Join(t.TempDir(), "new")
	a := publish(t, parent, "a")
	if err := Verify(a); err != nil {
		t.Error(err)
	}
	b := publish(t, parent, "b")
	if a == b {
		t.Fatal("different content, same directory")
	}
	if got, err := os.ReadFile(filepath.Join(parent, Current, "f")); err != nil || string(got) != "b" {
		t.Fatalf("current has %q (%v), want b", got, err)
	}
	if again := publish(t, parent, "a"); again != a {
		t.Fatalf("the same content went to %s, not %s", again, a)
	}
	if to, err := os.Readlink(filepath.Join(parent, Current)); err != nil || to != filepath.Base(a) {
		t.Fatalf("current is %s (%v), want %s", to, err, a)
	}
}

func TestPublishReplacesDamage(t *testing.T) {
	parent := t.TempDir()
	dir := publish(t, parent, "a")
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Verify(filepath.Join(parent, Current)); err == nil || !strings.Contains(err.Error(), "make setup") {
		t.Fatalf("got %v, want an error with the way out", err)
	}
	publish(t, parent, "a")
	if err := Verify(dir); err != nil {
		t.Fatal(err)
	}
}

func TestPublishFailureKeepsWhatIsThere(t *testing.T) {
	parent := t.TempDir()
	a := publish(t, parent, "a")
	// What a kill -9 in the middle leaves.
	if err := os.MkdirAll(filepath.Join(parent, tmpPrefix+"123", "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	failure := errors.New("disk full")
	if _, err := Publish(parent, func(string) error { return failure }); !errors.Is(err, failure) {
		t.Fatalf("got %v, want %v", err, failure)
	}
	if to, err := filepath.EvalSymlinks(filepath.Join(parent, Current)); err != nil || to != a {
		t.Fatalf("current is %s (%v), want %s", to, err, a)
	}
	if left, err := filepath.Glob(filepath.Join(parent, tmpPrefix+"*")); err != nil || len(left) != 0 {
		t.Fatal("left behind:", left, err)
	}
}

func TestDigestCountsWhatMatters(t *testing.T) {
	make := func(name, content string, perm os.FileMode) string {
		dir := t.TempDir()
		file := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(file, []byte(content), 0o600), os.Chmod(file, perm)); err != nil {
			t.Fatal(err)
		}
		digest, err := Digest(dir)
		if err != nil {
			t.Fatal(err)
		}
		return digest
	}
	first := make("f", "x", 0o644)
	if make("f", "x", 0o644) != first {
		t.Error("the same file has another digest")
	}
	for what, digest := range map[string]string{
		"name": make("g", "x", 0o644), "content": make("f", "y", 0o644), "mode": make("f", "x", 0o755),
		"line in a name": make("f\" -rw-r--r-- \"\n", "x", 0o644),
	} {
		if digest == first {
			t.Errorf("another %s has the same digest", what)
		}
	}
}

func TestTreeWrite(t *testing.T) {
	tree := Tree{}
	tree.Add("/a/b/../c/file", Node{Mode: 0o755, Data: []byte("x")})
	tree.Add("../../link", Node{Mode: os.ModeSymlink | 0o777, Link: "a"})
	dir := t.TempDir()
	if err := tree.Write(dir); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(dir, "a/c/file")); err != nil || info.Mode() != 0o755 {
		t.Errorf("file: %v, %v", info, err)
	}
	if to, err := os.Readlink(filepath.Join(dir, "link")); err != nil || to != "a" {
		t.Errorf("link: %s, %v", to, err)
	}
}

func TestHalfMade(t *testing.T) {
	parent := filepath.Join(t.TempDir(), "artefacts")
	if left, err := HalfMade(parent); err != nil || len(left) != 0 {
		t.Errorf("without a directory: %v, %v", left, err)
	}
	if err := RemoveHalfMade(parent); err != nil {
		t.Error(err)
	}
	killed := filepath.Join(parent, tmpPrefix+"1")
	if err := os.MkdirAll(filepath.Join(killed, "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	if left, err := HalfMade(parent); err != nil || len(left) != 1 || left[0] != killed {
		t.Errorf("got %v, %v; want %s", left, err, killed)
	}
	unlock, err := flock.TryLock(filepath.Join(parent, lockFile))
	if err != nil {
		t.Fatal(err)
	}
	left, err := HalfMade(parent)
	if err := errors.Join(err, RemoveHalfMade(parent)); err != nil || len(left) != 0 {
		t.Errorf("while a Publish is under way: %v, %v", left, err)
	}
	unlock()
	if err := RemoveHalfMade(parent); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(killed); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after the removal: %v", err)
	}
}
