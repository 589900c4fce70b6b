package settings

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// TestInitAgain: what the request before has done already isn't done again, and what is another by now is; what an envd has left that
// was killed amid it is in nobody's way.
func TestInitAgain(t *testing.T) {
	s := newStore(t)
	s.Hosts = filepath.Join(t.TempDir(), "hosts")
	fact := filepath.Join(s.Dir, ".E2B_SANDBOX_ID")
	told := func(id string) os.FileInfo {
		t.Helper()
		if code, body := call(s, "", fmt.Sprintf(`{"sandboxID":%q,"defaultUser":"user"}`, id)); code != 204 {
			t.Fatalf("%d %s", code, body)
		}
		if b, err := os.ReadFile(fact); err != nil || string(b) != id {
			t.Errorf("the sandbox is %q, not %s: %v", b, id, err)
		}
		info, err := os.Stat(fact)
		must(t, err)
		return info
	}
	must(t, os.MkdirAll(s.Dir, 0o755))
	must(t, os.WriteFile(fact+".next", []byte("half of something that is longer"), 0o600))
	first := told("one")
	must(t, os.Remove(s.Hosts))
	must(t, os.Remove(s.Users.Passwd))
	if again := told("one"); !os.SameFile(first, again) {
		t.Error("a file was written that says the same")
	}
	if _, err := os.Stat(s.Hosts); err == nil {
		t.Error("a name was added that had been")
	}
	if next := told("two"); os.SameFile(first, next) || next.Mode().Perm() != 0o644 {
		t.Errorf("what is another by now is in the same file, of mode %v", next.Mode())
	}
	if code, _ := call(s, "", `{"defaultUser":"root"}`); code != 400 {
		t.Errorf("a user who isn't there: %d", code)
	}
	if left, err := filepath.Glob(filepath.Join(s.Dir, "*.next")); err != nil || len(left) > 0 {
		t.Errorf("%v are left, %v", left, err)
	}
}
