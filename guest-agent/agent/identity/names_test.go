package identity

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const id = "00112233445566778899aabbccddeeff"

// A root's machine-id is replaced where there is one, and nothing else, in it or beyond it, is touched.
func TestReplaceMachineID(t *testing.T) {
	old := strings.Repeat("a", 32)
	outside := filepath.Join(t.TempDir(), "outside")
	for name, c := range map[string]struct {
		make func(file string) error
		want string // "" is as it was
	}{
		"an id":          {func(f string) error { return os.WriteFile(f, []byte(old+"\n"), 0o444) }, id + "\n"},
		"without an end": {func(f string) error { return os.WriteFile(f, []byte(old), 0o444) }, id + "\n"},
		"empty":          {func(f string) error { return os.WriteFile(f, nil, 0o444) }, id + "\n"},
		"a link inside": {func(f string) error {
			return errors.Join(os.WriteFile(filepath.Join(filepath.Dir(f), "real"), []byte(old), 0o444), os.Symlink("/etc/real", f))
		}, id + "\n"},
		"first boot":     {func(f string) error { return os.WriteFile(f, []byte("uninitialized\n"), 0o444) }, ""},
		"something else": {func(f string) error { return os.WriteFile(f, []byte(strings.Repeat("a", 40)), 0o444) }, ""},
		"no file":        {func(string) error { return nil }, ""},
		"a directory":    {func(f string) error { return os.Mkdir(f, 0o755) }, ""},
		"a pipe":         {func(f string) error { return unix.Mkfifo(f, 0o644) }, ""},
		"a loop":         {func(f string) error { return os.Symlink("machine-id", f) }, ""},
		"a link out":     {func(f string) error { return os.Symlink(outside, f) }, ""},
		"a way out":      {func(f string) error { return os.Symlink("../../../../../../../.."+outside, f) }, ""},
		"a magic link":   {func(f string) error { return os.Symlink("/proc/self/exe", f) }, ""},
	} {
		if err := os.WriteFile(outside, []byte(old), 0o600); err != nil {
			t.Fatal(err)
		}
		root := t.TempDir()
		file := filepath.Join(root, "etc/machine-id")
		if err := errors.Join(os.Mkdir(filepath.Dir(file), 0o755), c.make(file)); err != nil {
			t.Fatal(err)
		}
		if err := ReplaceMachineID(root, id); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if c.want != "" {
			at := file
			if to, err := os.Readlink(file); err == nil {
				at = filepath.Join(root, to)
			}
			if got, err := os.ReadFile(at); err != nil || string(got) != c.want {
				t.Errorf("%s: %q, %v", name, got, err)
			}
		}
		if got, err := os.ReadFile(outside); err != nil || string(got) != old {
			t.Errorf("%s: outside is %q, %v", name, got, err)
		}
	}
	for _, wrong := range []string{"", "0011", id + "\n", strings.ToUpper(id), strings.Repeat("/", 32)} {
		if err := ReplaceMachineID(t.TempDir(), wrong); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", wrong, err)
		}
	}
}

// A process's host name is its namespace's alone.
func TestSetHostnameOf(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	own, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", "echo; read x; cat /proc/sys/kernel/hostname")
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWUTS}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := SetHostnameOf(fd, "another"); err != nil {
		t.Error(err)
	}
	if err := SetHostnameOf(fd, strings.Repeat("x", 65)); !errors.Is(err, ErrInvalid) {
		t.Errorf("a name that is too long: %v", err)
	}
	_ = in.Close()
	if err := cmd.Wait(); err != nil || strings.TrimSpace(out.String()) != "another" {
		t.Errorf("it is named %q, %v", out.String(), err)
	}
	if now, err := os.Hostname(); err != nil || now != own {
		t.Errorf("the host is named %q instead of %q, %v", now, own, err)
	}
}
