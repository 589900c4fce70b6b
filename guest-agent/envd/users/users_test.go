package users

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

func database(t testing.TB, passwd, group string) Database {
	t.Helper()
	dir := t.TempDir()
	d := Database{Passwd: filepath.Join(dir, "passwd"), Group: filepath.Join(dir, "group")}
	for path, content := range map[string]string{d.Passwd: passwd, d.Group: group} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func TestLookup(t *testing.T) {
	d := database(t, strings.Join([]string{
		"# a comment", "short:x:1", "root:x:0:0:root:/root:/bin/bash", "neg:x:-1:0::/:", "big:x:4294967295:0::/:", "bad:x:1x:0::/:",
		"user:x:1000:1001:Us Er,,,:/home/user/:/bin/bash", "user:x:0:0::/second:/bin/sh", "nohome:x:5:5::relative:",
	}, "\n"), "root:x:0:\nsudo:x:27:other,user\nuser:x:1001:user\ndup:x:27:user\nusers:x:100:usera,xuser\nbad:x:y:user")
	u, err := d.Lookup("user")
	if err != nil {
		t.Fatal(err)
	}
	if u.UID != 1000 || u.GID != 1001 || u.Home != "/home/user" || !slices.Equal(u.Groups, []uint32{1001, 27}) {
		t.Errorf("%+v", u)
	}
	if u, err := d.Lookup("nohome"); err != nil || u.Home != "/" {
		t.Errorf("%+v, %v", u, err)
	}
	for _, name := range []string{"", "nobody", "short", "neg", "big", "bad", "# a comment", "user:x"} {
		if u, err := d.Lookup(name); !errdefs.IsNotFound(err) {
			t.Errorf("%q is %+v, %v", name, u, err)
		}
	}
	n := d.Names()
	if n.User(1000) != "user" || n.User(7) != "7" || n.Group(27) != "sudo" || n.Group(8) != "8" {
		t.Errorf("%+v", n)
	}
}

func TestLookupWithoutFiles(t *testing.T) {
	d := Database{Passwd: "/nonexistent/passwd", Group: "/nonexistent/group"}
	if _, err := d.Lookup("root"); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	if name := d.Names().User(0); name != "0" {
		t.Error(name)
	}
}

func TestResolve(t *testing.T) {
	u := User{Home: "/home/user"}
	for _, c := range []struct{ path, empty, want string }{
		{"", "", "/home/user"}, {"", "/work", "/work"}, {"", "~/w", "/home/user/w"}, {"a/b", "/work", "/home/user/a/b"},
		{"~", "", "/home/user"}, {"~/x/../y", "", "/home/user/y"}, {"~other", "", "/home/user/~other"}, {"/a//b/", "", "/a/b"},
		{"../../../../etc", "", "/etc"}, {".", "", "/home/user"}, {"/..", "", "/"},
	} {
		if got, err := u.Resolve(c.path, c.empty); err != nil || got != c.want {
			t.Errorf("Resolve(%q, %q) = %q, %v; want %q", c.path, c.empty, got, err, c.want)
		}
	}
	for _, path := range []string{"a\x00b", strings.Repeat("x", 4096)} {
		if got, err := u.Resolve(path, ""); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Resolve of %d bytes = %q, %v", len(path), got, err)
		}
	}
}

func TestFindCommand(t *testing.T) {
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"run": 0o755, "data": 0o644} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ command, dir, path, want string }{
		{"/any/thing", dir, "", "/any/thing"}, {"./run", dir, "", filepath.Join(dir, "run")}, {"run", "/", "/nowhere:" + dir, filepath.Join(dir, "run")},
		{"run", dir, ".", filepath.Join(dir, "run")}, {"data", dir, dir, ""}, {"", dir, dir, ""}, {"absent", dir, dir, ""},
	} {
		got, err := FindCommand(c.command, c.dir, c.path)
		if got != c.want || (c.want == "") != errdefs.IsInvalidArgument(err) {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
}

// FuzzUsers: whatever the files have, who is found is who was asked for, with an absolute home.
func FuzzUsers(f *testing.F) {
	f.Add("user:x:1000:1001::/home/user:/bin/bash\n", "sudo:x:27:user\n", "user")
	f.Add("a:::::::\n::::::\n", ":::,,,\n", "")
	f.Fuzz(func(t *testing.T, passwd, group, name string) {
		u, err := database(t, passwd, group).Lookup(name)
		if err != nil {
			return
		}
		if u.Name != name || name == "" || !filepath.IsAbs(u.Home) || u.Home != filepath.Clean(u.Home) || len(u.Groups) == 0 || u.Groups[0] != u.GID {
			t.Errorf("%+v for %q", u, name)
		}
	})
}

// FuzzResolve: a path is absolute and clean, and one without a leading "/" is below the home unless it climbs out of it.
func FuzzResolve(f *testing.F) {
	f.Add("/home/user", "~/a", "")
	f.Add("/", "../../etc/passwd", "/work")
	f.Add("/home/user", "", "~//x")
	f.Add("/home/user", "a\x00b", "")
	f.Fuzz(func(t *testing.T, home, path, empty string) {
		if !filepath.IsAbs(home) || strings.ContainsRune(home, 0) {
			return
		}
		u := User{Home: filepath.Clean(home)}
		got, err := u.Resolve(path, empty)
		if path == "" {
			path = empty
		}
		if bad := strings.ContainsRune(path, 0) || len(path) >= maxPath; bad != errdefs.IsInvalidArgument(err) {
			t.Fatalf("%q: %v", path, err)
		}
		if err != nil {
			return
		}
		if !filepath.IsAbs(got) || got != filepath.Clean(got) || strings.ContainsRune(got, 0) {
			t.Errorf("%q is %q", path, got)
		}
		if rel, err := filepath.Rel(u.Home, got); !filepath.IsAbs(path) && !strings.Contains(path, "..") && (err != nil || strings.HasPrefix(rel, "..")) {
			t.Errorf("%q is %q, which is not below %q", path, got, u.Home)
		}
	})
}
