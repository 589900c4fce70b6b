package complete

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// disk makes one of files; those that begin with #! can be run.
func disk(t *testing.T, files map[string]string) (Disk, *bytes.Buffer) {
	t.Helper()
	out := &bytes.Buffer{}
	d := Disk{Root: t.TempDir(), Out: out}
	for name, content := range files {
		at := d.path(name)
		must(t, os.MkdirAll(filepath.Dir(at), 0o755))
		mode := os.FileMode(0o644)
		if strings.HasPrefix(content, "#!") {
			mode = 0o755
		}
		must(t, os.WriteFile(at, []byte(content), mode))
	}
	return d, out
}

func (d Disk) read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(d.path(name))
	must(t, err)
	return string(b)
}

// TestComplete: a disk without the user gets one as useradd would make it, once.
func TestComplete(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root gives files away")
	}
	d, out := disk(t, map[string]string{
		"/bin/bash": "#!", "/usr/bin/sudo": "#!", "/etc/sudoers.d/README": "", "/etc/skel/.profile": "hello\n",
		"/etc/passwd": "root:x:0:0::/root:/bin/bash\nother:x:1000:1000::/:/bin/sh", "/etc/group": "root:x:0:\nsudo:x:27:other\nthird:x:1001:\nwheel:x:28:\n",
		"/etc/shadow": "root:*:1:0:::::\n",
	})
	for range 2 {
		must(t, d.Complete("user"))
	}
	u, err := users.Database{Passwd: d.path("/etc/passwd"), Group: d.path("/etc/group")}.Lookup("user")
	if err != nil || u.UID != 1002 || u.GID != 1002 || u.Home != "/home/user" || len(u.Groups) != 3 {
		t.Errorf("%+v, %v", u, err)
	}
	for name, want := range map[string]string{
		"/etc/passwd":                 "root:x:0:0::/root:/bin/bash\nother:x:1000:1000::/:/bin/sh\nuser:x:1002:1002::/home/user:/bin/bash\n",
		"/etc/group":                  "root:x:0:\nsudo:x:27:other,user\nthird:x:1001:\nwheel:x:28:user\nuser:x:1002:\n",
		"/etc/shadow":                 "root:*:1:0:::::\nuser:!:::::::\n",
		"/home/user/.profile":         "hello\n",
		"/etc/sudoers.d/90-cube-user": "user ALL=(ALL:ALL) NOPASSWD:ALL\n",
	} {
		if got := d.read(t, name); got != want {
			t.Errorf("%s: %q", name, got)
		}
	}
	if _, err := os.Stat(d.path("/etc/gshadow")); !os.IsNotExist(err) {
		t.Errorf("a gshadow that wasn't there: %v", err)
	}
	for name, want := range map[string]os.FileMode{"/tmp": os.ModeDir | os.ModeSticky | 0o777, "/etc/sudoers.d/90-cube-user": 0o440, "/etc/passwd": 0o644} {
		if info, err := os.Stat(d.path(name)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	uid, gid, ok := ownerOf(d.path("/home/user/.profile"))
	if uid != 1002 || gid != 1002 || !ok {
		t.Errorf("the home's files are %d:%d's", uid, gid)
	}
	if !strings.Contains(out.String(), "made the user user, 1002") || strings.Count(out.String(), "made the user") != 1 {
		t.Errorf("it says %q", out)
	}
}

// TestBash: a bash that is elsewhere is found; without one there has to be a shell that can bring it, or the image is refused, with what
// it has to have, and nothing is changed.
func TestBash(t *testing.T) {
	d, _ := disk(t, map[string]string{"/usr/local/bin/bash": "#!", "/bin/sh": "#!", "/etc/passwd": "user:x:1:1::/:\n"})
	must(t, d.Complete("user"))
	if to, err := os.Readlink(d.path("/bin/bash")); err != nil || to != "/usr/local/bin/bash" {
		t.Errorf("bash is %q, %v", to, err)
	}
	d, out := disk(t, map[string]string{"/bin/sh": "#!", "/etc/passwd": "user:x:1:1::/:\n"})
	must(t, d.Complete("user"))
	if !strings.Contains(out.String(), "steps are done by /bin/sh") {
		t.Errorf("without bash it says %q", out)
	}
	d, _ = disk(t, map[string]string{"/etc/passwd": "root:x:0:0::/:\n"})
	if err := d.Complete("user"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "the image has no shell") {
		t.Errorf("without a shell: %v", err)
	}
	if got := d.read(t, "/etc/passwd"); got != "root:x:0:0::/:\n" {
		t.Errorf("passwd is %q", got)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
