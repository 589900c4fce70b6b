package owned

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// names are what is in a directory.
func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// TestJournal: of a file that was being written when its daemon was killed nothing is left, and what was there before stays; files
// that another one is writing by then stay, too.
func TestJournal(t *testing.T) {
	me := users.User{UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}
	dir := t.TempDir()
	j := Journal{Dir: filepath.Join(t.TempDir(), "below", "journal")}
	clean, err := j.Open()
	if err != nil {
		t.Fatal(err)
	}
	clean()
	path := filepath.Join(dir, "file")
	write := func(text string) *File {
		t.Helper()
		f, err := j.Create(path, me)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
		return f
	}
	if err := write("whole").Commit(nil); err != nil {
		t.Fatal(err)
	}
	write("aborted").Abort()
	if got := append(names(t, dir), names(t, j.Dir)...); len(got) != 1 || got[0] != "file" {
		t.Fatalf("there is %q", got)
	}
	killed := write("half")
	defer killed.Close()
	for name, text := range map[string]string{"foreign": path, "cut": "", "gone": filepath.Join(dir, "gone", temporary+"gone")} {
		if err := os.WriteFile(filepath.Join(j.Dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if clean, err = j.Open(); err != nil {
		t.Fatal(err)
	}
	meanwhile := write("another")
	defer meanwhile.Abort()
	clean()
	if _, err := os.Lstat(killed.temp); !os.IsNotExist(err) {
		t.Errorf("it is left: %v", err)
	}
	if got, notes := names(t, dir), names(t, j.Dir); len(got) != 2 || len(notes) != 1 || temporary+notes[0] != filepath.Base(meanwhile.temp) {
		t.Errorf("there is %q, and %q in the journal", got, notes)
	}
	if b, err := os.ReadFile(path); string(b) != "whole" {
		t.Errorf("the file is %q, %v", b, err)
	}
}
