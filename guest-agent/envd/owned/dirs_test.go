package owned

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// TestGive: what somebody has put in place of a directory that was just made isn't given away.
func TestGive(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root gives files away")
	}
	dir := t.TempDir()
	secret, made := filepath.Join(dir, "secret"), filepath.Join(dir, "made")
	if err := os.WriteFile(secret, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	u := users.User{UID: 1234, GID: 1235}
	for what, trap := range map[string]func() error{
		"link":      func() error { return os.Symlink(dir, made) },
		"hard link": func() error { return os.Link(secret, made) },
	} {
		if err := trap(); err != nil {
			t.Fatal(err)
		}
		if err := give(made, u); err == nil {
			t.Errorf("%s: it was given away", what)
		}
		if err := os.Remove(made); err != nil {
			t.Fatal(err)
		}
	}
	if err := MakeDirs(filepath.Join(made, "below"), u); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]uint32{dir: 0, secret: 0, made: 1234, filepath.Join(made, "below"): 1234} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if uid := info.Sys().(*syscall.Stat_t).Uid; uid != want {
			t.Errorf("%s is %d's", path, uid)
		}
	}
}
