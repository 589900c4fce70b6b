package filesystem

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/api/filesystem"
	"github.com/cubesandbox/cube/guest-agent/envd/settings"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// newClient calls a service; home is where relative paths are.
func newClient(t *testing.T) (c filesystem.FilesystemClient, home string) {
	t.Helper()
	me, err := user.Current()
	must(t, err)
	home = t.TempDir()
	passwd := filepath.Join(t.TempDir(), "passwd")
	must(t, os.WriteFile(passwd, fmt.Appendf(nil, "%s:x:%s:%s::%s:\nother:x:1234:1235::%s:\n", me.Username, me.Uid, me.Gid, home, home), 0o600))
	store := &settings.Store{Users: users.Database{Passwd: passwd, Group: "/nonexistent"}}
	must(t, store.Load(settings.Settings{User: me.Username}))
	mux := http.NewServeMux()
	mux.Handle(filesystem.NewFilesystemHandler(&Service{Settings: store}))
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return filesystem.NewFilesystemClient(s.Client(), s.URL, connect.WithProtoJSON()), home
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, path string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte("x"), 0o644))
}

func wantCode(t *testing.T, what string, err error, code connect.Code) {
	t.Helper()
	if connect.CodeOf(err) != code {
		t.Errorf("%s: %v, want %v", what, err, code)
	}
}

func stat(c filesystem.FilesystemClient, path string) (*filesystem.EntryInfo, error) {
	r, err := c.Stat(context.Background(), connect.NewRequest(&filesystem.StatRequest{Path: path}))
	if err != nil {
		return nil, err
	}
	return r.Msg.Entry, nil
}

func TestStat(t *testing.T) {
	c, home := newClient(t)
	write(t, filepath.Join(home, "f"))
	for name, target := range map[string]string{"link": "f", "dirlink": ".", "broken": "gone", "loop": "loop"} {
		must(t, os.Symlink(target, filepath.Join(home, name)))
	}
	for path, want := range map[string]struct {
		is     filesystem.FileType
		target string
	}{
		"f": {filesystem.FileType_FILE_TYPE_FILE, ""}, "~": {filesystem.FileType_FILE_TYPE_DIRECTORY, ""}, "/dev/null": {},
		"link":    {filesystem.FileType_FILE_TYPE_FILE, filepath.Join(home, "f")},
		"dirlink": {filesystem.FileType_FILE_TYPE_DIRECTORY, home}, "broken": {0, "gone"}, "loop": {0, "loop"},
	} {
		e, err := stat(c, path)
		if err != nil || e.Type != want.is || e.GetSymlinkTarget() != want.target {
			t.Errorf("%s: %v, %v", path, e, err)
		}
	}
	e, err := stat(c, "f")
	must(t, err)
	if e.Name != "f" || e.Path != filepath.Join(home, "f") || e.Size != 1 || e.Mode != 0o644 || e.Permissions != "-rw-r--r--" || e.Owner == "" || e.Group == "" || e.ModifiedTime == nil {
		t.Error(e)
	}
	must(t, os.WriteFile(filepath.Join(home, "\xff"), nil, 0o644)) // no UTF-8
	list, err := c.ListDir(t.Context(), connect.NewRequest(&filesystem.ListDirRequest{Path: "~"}))
	if err != nil || !slices.ContainsFunc(list.Msg.Entries, func(e *filesystem.EntryInfo) bool { return e.Name == "\uFFFD" }) {
		t.Error(list, err)
	}
	for path, code := range map[string]connect.Code{
		"gone": connect.CodeNotFound, "f/below": connect.CodeNotFound, "loop/x": connect.CodeFailedPrecondition,
		"a\x00": connect.CodeInvalidArgument, strings.Repeat("x", 300): connect.CodeInvalidArgument, strings.Repeat("x", 5000): connect.CodeInvalidArgument,
	} {
		_, err := stat(c, path)
		wantCode(t, fmt.Sprintf("%.20q", path), err, code)
	}
}

func TestTree(t *testing.T) {
	c, home := newClient(t)
	makeDir := func(path string) error {
		_, err := c.MakeDir(t.Context(), connect.NewRequest(&filesystem.MakeDirRequest{Path: path}))
		return err
	}
	must(t, makeDir("a/b/c"))
	wantCode(t, "again", makeDir("a/b"), connect.CodeAlreadyExists)
	write(t, filepath.Join(home, "a/f"))
	wantCode(t, "a file", makeDir("a/f"), connect.CodeInvalidArgument)
	wantCode(t, "below a file", makeDir("a/f/g"), connect.CodeInvalidArgument)
	must(t, os.Symlink("b", filepath.Join(home, "a/link")))
	must(t, os.Symlink("a", filepath.Join(home, "root")))
	list := func(path string, depth uint32) (string, error) {
		r, err := c.ListDir(t.Context(), connect.NewRequest(&filesystem.ListDirRequest{Path: path, Depth: depth}))
		if err != nil {
			return "", err
		}
		var paths []string
		for _, e := range r.Msg.Entries {
			paths = append(paths, strings.TrimPrefix(e.Path, home+"/"))
		}
		return strings.Join(paths, " "), nil
	}
	for _, want := range []struct {
		path  string
		depth uint32
		list  string
	}{
		{"a", 0, "a/b a/f a/link"}, {"a", 1, "a/b a/f a/link"}, {"a", 2, "a/b a/b/c a/f a/link"}, {"a", 1 << 31, "a/b a/b/c a/f a/link"},
		{"root", 2, "root/b root/b/c root/f root/link"}, {"a/b/c", 9, ""},
	} {
		if got, err := list(want.path, want.depth); err != nil || got != want.list {
			t.Errorf("%+v: %q, %v", want, got, err)
		}
	}
	_, err := list("a/f", 1)
	wantCode(t, "a file", err, connect.CodeInvalidArgument)
	_, err = list("gone", 1)
	wantCode(t, "nothing", err, connect.CodeNotFound)
	must(t, os.Symlink("loop", filepath.Join(home, "loop")))
	_, err = list("loop", 1)
	wantCode(t, "a circle", err, connect.CodeFailedPrecondition)

	move := func(from, to string) error {
		_, err := c.Move(t.Context(), connect.NewRequest(&filesystem.MoveRequest{Source: from, Destination: to}))
		return err
	}
	must(t, move("a/f", "new/dir/g"))
	wantCode(t, "nothing", move("a/f", "x"), connect.CodeNotFound)
	wantCode(t, "into itself", move("a", "a/b/d"), connect.CodeInvalidArgument)
	must(t, move("root", "other")) // the link and not what it leads to
	if e, err := stat(c, "other"); err != nil || e.GetSymlinkTarget() == "" {
		t.Error(e, err)
	}
	remove := func(path string) error {
		_, err := c.Remove(t.Context(), connect.NewRequest(&filesystem.RemoveRequest{Path: path}))
		return err
	}
	must(t, remove("new"))
	must(t, remove("new"))
	wantCode(t, "/", remove("/../"), connect.CodeInvalidArgument)
	wantCode(t, "remove nothing", remove(""), connect.CodeInvalidArgument)
	wantCode(t, "move nothing", move("", "x"), connect.CodeInvalidArgument)
	wantCode(t, "move to nothing", move("other", ""), connect.CodeInvalidArgument)
}

func TestOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root gives files away")
	}
	c, home := newClient(t)
	r := connect.NewRequest(&filesystem.MakeDirRequest{Path: "a/b"})
	r.Header().Set("Authorization", "Basic b3RoZXI6") // other:
	_, err := c.MakeDir(t.Context(), r)
	must(t, err)
	for path, want := range map[string]uint32{"": 0, "a": 1234, "a/b": 1234} {
		var st unix.Stat_t
		must(t, unix.Stat(filepath.Join(home, path), &st))
		if st.Uid != want {
			t.Errorf("%q is %d's", path, st.Uid)
		}
	}
}
