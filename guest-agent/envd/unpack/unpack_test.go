package unpack

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// made is when the files of archives were changed last.
var made = time.Unix(1_500_000_000, 0)

// archive makes a tar of entries: "NAME/", "NAME=CONTENT", "NAME->TARGET" for a symbolic link and "NAME=>TARGET" for a hard one.
func archive(t testing.TB, entries ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e, Typeflag: tar.TypeDir, Mode: 0o750, ModTime: made, Format: tar.FormatPAX}
		content := ""
		if name, target, ok := strings.Cut(e, "->"); ok {
			h.Name, h.Typeflag, h.Linkname = name, tar.TypeSymlink, target
		} else if name, target, ok := strings.Cut(e, "=>"); ok {
			h.Name, h.Typeflag, h.Linkname = name, tar.TypeLink, target
		} else if name, text, ok := strings.Cut(e, "="); ok {
			h.Name, h.Typeflag, h.Mode, h.Size, content = name, tar.TypeReg, 0o4755, int64(len(text)), text
		} else if !strings.HasSuffix(e, "/") {
			h.Typeflag = tar.TypeFifo
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func compressed(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	if _, err := z.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// tree is what is below a directory: directories with a slash, files with their content, links with what they name.
func tree(t testing.TB, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, _ := filepath.Rel(dir, path)
		switch {
		case e.IsDir():
			name += "/"
		case e.Type() == fs.ModeSymlink:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			name += "->" + to
		default:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			name += "=" + string(b)
		}
		all = append(all, name)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	return all
}

// me is who the test runs as: only root gives files away.
func me() users.User { return users.User{UID: uint32(os.Getuid()), GID: uint32(os.Getgid())} }

// TestUnpack: what a COPY copies gets where Docker would put it.
func TestUnpack(t *testing.T) {
	src := []string{"src/", "src/a=A", "src/sub/", "src/sub/b=B", "src/link->a"}
	for name, c := range map[string]struct {
		entries  []string
		from, to string // to is below the directory
		want     []string
	}{
		"directory":             {src, "src", "app", []string{"app/", "app/a=A", "app/link->a", "app/sub/", "app/sub/b=B"}},
		"into one that is":      {src, "src/", "there", []string{"there/", "there/a=A", "there/link->a", "there/old=old", "there/sub/", "there/sub/b=B"}},
		"all":                   {src, ".", "app", []string{"app/", "app/src/", "app/src/a=A", "app/src/link->a", "app/src/sub/", "app/src/sub/b=B"}},
		"without its entry":     {[]string{"src/sub/b=B"}, "src", "app", []string{"app/", "app/sub/", "app/sub/b=B"}},
		"file":                  {[]string{"f=F"}, "f", "x/g", []string{"x/", "x/g=F"}},
		"file into":             {[]string{"d/f=F"}, "d/f", "x/", []string{"x/", "x/f=F"}},
		"file into one that is": {[]string{"f=F"}, "./f", "there", []string{"there/", "there/f=F", "there/old=old"}},
		"over a file":           {[]string{"f=F"}, "f", "there/old", []string{"there/", "there/old=F"}},
		"link alone":            {[]string{"l->/etc/passwd"}, "l", "x", []string{"x->/etc/passwd"}},
		"pattern":               {[]string{"a.js=A", "b.js=B", "c.ts=C", "d.js/", "d.js/e=E"}, "*.js", "x", []string{"x/", "x/a.js=A", "x/b.js=B", "x/e=E"}},
		"deep pattern":          {[]string{"s/", "s/a.js=A", "s/t/u/b.js=B", "s/t/c.ts=C"}, "s/**/*.js", "x", []string{"x/", "x/a.js=A", "x/b.js=B"}},
		"hard link":             {[]string{"s/a=A", "s/b=>s/a"}, "s", "x", []string{"x/", "x/a=A", "x/b=A"}},
		"link over a link":      {[]string{"s/a->b", "s/a->c"}, "s", "x", []string{"x/", "x/a->c"}},
		"through its own link":  {[]string{"s/real/", "s/l->real", "s/l/a=A"}, "s", "x", []string{"x/", "x/l->real", "x/real/", "x/real/a=A"}},
		"unused beside":         {[]string{"f=F", "g=G"}, "f", "x/", []string{"x/", "x/f=F"}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, zip := range []bool{false, true} {
				dir := t.TempDir()
				if strings.HasPrefix(c.to, "there") {
					must(t, os.Mkdir(filepath.Join(dir, "there"), 0o755))
					must(t, os.WriteFile(filepath.Join(dir, "there/old"), []byte("old"), 0o644))
				}
				b := archive(t, c.entries...)
				if zip {
					b = compressed(t, b)
				}
				must(t, Unpack(bytes.NewReader(b), Request{From: c.from, To: dir + "/" + c.to, Owner: me()}))
				if got := tree(t, dir); !slices.Equal(got, c.want) {
					t.Errorf("%q", got)
				}
			}
		})
	}
}

// TestRefused: an archive puts nothing outside of the directory, and tells why it isn't taken.
func TestRefused(t *testing.T) {
	for name, c := range map[string]struct {
		entries []string
		from    string
		want    string
	}{
		"climbs":             {[]string{"s/../../out=X"}, "s", "nowhere below"},
		"climbs at once":     {[]string{"../out=X"}, ".", "nowhere below"},
		"absolute":           {[]string{"/etc/out=X"}, ".", "nowhere below"},
		"through a link":     {[]string{"s/l->..", "s/l/out=X"}, "s", "file exists"},
		"through a far link": {[]string{"s/l->/", "s/l/tmp/cube-out=X"}, "s", "file exists"},
		"linked from out":    {[]string{"s/", "s/l=>../secret"}, "s", "isn't copied"},
		"linked beside":      {[]string{"secret=S", "s/l=>secret"}, "s", "isn't copied"},
		"pipe":               {[]string{"s/", "s/pipe"}, "s", "neither a file"},
		"file on directory":  {[]string{"s/d/", "s/d=X"}, "s", "directory of that name"},
		"not there":          {[]string{"a=A"}, "b", `"b" is not in`},
		"request climbs":     {[]string{"a=A"}, "../a", "nowhere below"},
		"no pattern":         {[]string{"a=A"}, "[", "no pattern"},
	} {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "secret"), []byte("secret"), 0o600))
		err := Unpack(bytes.NewReader(archive(t, c.entries...)), Request{From: c.from, To: dir + "/to/s/", Owner: me()})
		if !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		for _, f := range tree(t, dir) {
			if strings.Contains(f, "out=") {
				t.Errorf("%s: it has put %s", name, f)
			}
		}
	}
	for name, b := range map[string][]byte{
		"nothing": nil, "noise": []byte("this is no archive at all, whoever says so"), "cut gzip": compressed(t, archive(t, "a=A"))[:20], "false gzip": {0x1f, 0x8b, 0, 0},
	} {
		if err := Unpack(bytes.NewReader(b), Request{From: ".", To: t.TempDir(), Owner: me()}); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestModes: files have the owner and the mode that was asked for, or the archive's mode.
func TestModes(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root gives files away")
	}
	mode := fs.FileMode(0o640)
	for _, c := range []struct {
		mode      *fs.FileMode
		file, dir fs.FileMode
	}{{nil, fs.ModeSetuid | 0o755, fs.ModeDir | 0o750}, {&mode, 0o640, fs.ModeDir | 0o750}} {
		dir := t.TempDir()
		err := Unpack(bytes.NewReader(archive(t, "s/", "s/d/", "s/d/f=F")), Request{From: "s", To: dir + "/to", Owner: users.User{UID: 4321, GID: 1234}, Mode: c.mode})
		must(t, err)
		for path, want := range map[string]fs.FileMode{"to/d": c.dir, "to/d/f": c.file} {
			info, err := os.Stat(filepath.Join(dir, path))
			must(t, err)
			st := info.Sys().(*syscall.Stat_t)
			if info.Mode() != want || st.Uid != 4321 || st.Gid != 1234 {
				t.Errorf("%s is %s of %d:%d", path, info.Mode(), st.Uid, st.Gid)
			}
			if path == "to/d/f" && !info.ModTime().Equal(made) {
				t.Errorf("%s is of %v", path, info.ModTime())
			}
		}
	}
}

// FuzzUnpack: whatever the archive, nothing outside of the directory is touched.
func FuzzUnpack(f *testing.F) {
	f.Add(archive(f, "s/", "s/a=A", "s/l->..", "s/l/x=X"), "s")
	f.Add(compressed(f, archive(f, "a=A", "b=>a")), "*")
	f.Add(archive(f, "s/l->/", "s/l=>s/l"), "**")
	f.Fuzz(func(t *testing.T, b []byte, from string) {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "secret"), []byte("secret"), 0o600))
		_ = Unpack(io.LimitReader(bytes.NewReader(b), 1<<20), Request{From: from, To: dir + "/to/", Owner: me()})
		for _, e := range tree(t, dir) {
			if e != "secret=secret" && e != "to/" && !strings.HasPrefix(e, "to/") {
				t.Errorf("outside: %q", e)
			}
		}
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
