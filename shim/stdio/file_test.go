package stdio

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// logDir returns the sizes of the files of a directory, by name.
func logDir(t *testing.T, dir string) (sizes map[string]int64, total int64) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	sizes = map[string]int64{}
	for _, e := range entries {
		fi, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // renamed meanwhile
		}
		if err != nil {
			t.Fatal(err)
		}
		sizes[e.Name()] = fi.Size()
		total += fi.Size()
	}
	return sizes, total
}

// TestFlood: a guest that writes 200 MB in lines, to both streams, leaves no more than the limit, and the last of it.
func TestFlood(t *testing.T) {
	dir := t.TempDir()
	uri := "file://" + filepath.Join(dir, "log") + "?max-size=10MiB&max-files=3"
	s := open(t, Config{Stdout: uri, Stderr: uri})
	out, farOut := newPipe(t)
	errs, farErrs := newPipe(t)
	s.Attach(Streams{Stdout: out, Stderr: errs})
	line := strings.Repeat("x", 99) + "\n"
	block := bytes.Repeat([]byte(line), 1000)
	write := func(w io.WriteCloser, last string) {
		for range 1000 {
			if _, err := w.Write(block); err != nil {
				t.Error(err)
				break
			}
		}
		io.WriteString(w, last) // its absence is seen below
		w.Close()
	}
	write(farErrs, "")
	most := int64(0)
	go write(farOut, "last\n")
	for tick := time.Tick(time.Millisecond); ; {
		_, total := logDir(t, dir)
		most = max(most, total)
		select {
		case <-s.drained:
		case <-tick:
			continue
		}
		break
	}
	sizes, total := logDir(t, dir)
	if most > 30<<20 || total > 30<<20 || total < 19<<20 || len(sizes) != 3 {
		t.Errorf("%d bytes at most, %d at the end: %v", most, total, sizes)
	}
	for name := range sizes {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		rest := bytes.TrimSuffix(b, []byte("last\n"))
		if !bytes.HasSuffix(b, []byte("\n")) || len(rest)%len(line) != 0 || !bytes.HasPrefix(b, []byte(line)) {
			t.Errorf("%s isn't whole lines", name)
		}
	}
	if b, err := os.ReadFile(filepath.Join(dir, "log")); err != nil || !bytes.HasSuffix(b, []byte("\nlast\n")) {
		t.Errorf("the last line isn't in the newest file: %v", err)
	}
}

// logTo returns a logFile and what it says to the shim's log.
func logTo(t *testing.T, path, query string) (*logFile, *bytes.Buffer) {
	t.Helper()
	var said bytes.Buffer
	o := owner(t)
	o.Log = slog.New(slog.NewTextHandler(&said, nil))
	s, err := openFile(target{scheme: schemeFile, path: path, query: query}, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	return s.stdout.(*logFile), &said
}

func TestRotation(t *testing.T) {
	full := func(c string) string { return strings.Repeat(c, minLogSize) } // one line too long for a file
	for _, tc := range []struct {
		name   string
		files  int
		before map[string]string
		write  []string
		after  map[string]string
	}{
		{name: "appends", files: 3, before: map[string]string{"log": "old\n"}, write: []string{"new\n"},
			after: map[string]string{"log": "old\nnew\n"}},
		{name: "splits a long line", files: 3, write: []string{full("a") + full("b") + "c\n"},
			after: map[string]string{"log.2": full("a"), "log.1": full("b"), "log": "c\n"}},
		{name: "forgets the oldest", files: 2, write: []string{full("a") + full("b") + "c\n"},
			after: map[string]string{"log.1": full("b"), "log": "c\n"}},
		{name: "a single file", files: 1, write: []string{full("a") + "b\n"},
			after: map[string]string{"log": "b\n"}},
		{name: "ends with a line", files: 3, write: []string{full("a")[10:] + "\n", strings.Repeat("b", 20) + "\n"},
			after: map[string]string{"log.1": full("a")[10:] + "\n", "log": strings.Repeat("b", 20) + "\n"}},
		{name: "ends with a line within what is written", files: 3, write: []string{full("a")[10:] + "\n" + strings.Repeat("b", 20) + "\n"},
			after: map[string]string{"log.1": full("a")[10:] + "\n", "log": strings.Repeat("b", 20) + "\n"}},
		{name: "fewer than before", files: 2, write: []string{full("a") + "b\n"},
			before: map[string]string{"log.1": "1", "log.2": "2", "log.3": "3"},
			after:  map[string]string{"log.1": full("a"), "log": "b\n"}},
		{name: "fills a gap", files: 4, write: []string{full("a") + "b\n"},
			before: map[string]string{"log.2": "2", "log.3": "3"},
			after:  map[string]string{"log.3": "3", "log.2": "2", "log.1": full("a"), "log": "b\n"}},
		{name: "larger than the limit before", files: 3, write: []string{"b\n"},
			before: map[string]string{"log": full("a") + full("a")},
			after:  map[string]string{"log.1": full("a") + full("a"), "log": "b\n"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, text := range tc.before {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			l, _ := logTo(t, filepath.Join(dir, "log"), fmt.Sprintf("max-size=4KiB&max-files=%d", tc.files))
			for _, text := range tc.write {
				if n, err := l.Write([]byte(text)); n != len(text) || err != nil {
					t.Fatal(n, err)
				}
			}
			sizes, _ := logDir(t, dir)
			if len(sizes) != len(tc.after) {
				t.Errorf("files %v", sizes)
			}
			for name, want := range tc.after {
				if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
					t.Errorf("%s: %d bytes, want %d: %v", name, len(got), len(want), err)
				}
			}
		})
	}
}

func TestLogLimits(t *testing.T) {
	dir := t.TempDir()
	for query, says := range map[string]string{
		"":                              "",
		"other=1":                       "",
		"max-size=1048576":              "",
		"max-size=10MiB&max-files=1":    "",
		"max-size=10MiB&other=x":        "",
		"max-files=3":                   "max-size",
		"max-size=many":                 "max-size",
		"max-size=-1":                   "max-size",
		"max-size=4095":                 "4KiB",
		"max-size=10MiB&max-files=0":    "max-files",
		"max-size=10MiB&max-files=1001": "1000",
		"max-size=10MiB&max-files=x":    "max-files",
		"max-size=%zz":                  "query",
	} {
		s, err := Open(t.Context(), Config{Stdout: "file://" + dir + "/new/log?" + query}, owner(t))
		if err == nil {
			s.Close()
		}
		if (err == nil) != (says == "") || err != nil && (!errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), says)) {
			t.Errorf("%q: %v", query, err)
		}
	}
	for _, c := range []Config{
		{Stdout: "file:///dev/null?max-size=1MiB"},
		{Stdout: "file://" + dir + "/log?max-size=1MiB", Stderr: "file://" + dir + "/log"},
	} {
		if s, err := Open(t.Context(), c, owner(t)); !errdefs.IsInvalidArgument(err) {
			s.Close()
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// TestFullDisk: output is lost while there is no space, which is said once, and written again afterwards.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("it needs root: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	other := filepath.Join(dir, "other")
	if err := os.WriteFile(other, make([]byte, 48<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	l, said := logTo(t, filepath.Join(dir, "log"), "max-size=8KiB&max-files=3")
	block := bytes.Repeat([]byte("0123456\n"), 512)
	for range 100 {
		if n, err := l.Write(block); n != len(block) || err != nil {
			t.Fatal(n, err)
		}
	}
	if n := strings.Count(said.String(), "level="); n != 1 || !strings.Contains(said.String(), "no space left") {
		t.Errorf("said %d times: %s", n, said)
	}
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		l.Write(block) // never fails
	}
	l.Write([]byte("last\n"))
	if b, err := os.ReadFile(l.path); err != nil || !bytes.HasSuffix(b, []byte("last\n")) {
		t.Errorf("%v: it ends with %q", err, b[max(0, len(b)-20):])
	}
	if n := strings.Count(said.String(), "level="); n != 1 {
		t.Errorf("said %d times: %s", n, said)
	}
}

// TestLogDirectoryGoes: so does the output, but not for ever.
func TestLogDirectoryGoes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "logs")
	l, said := logTo(t, filepath.Join(dir, "log"), "max-size=4KiB")
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		l.Write(make([]byte, minLogSize)) // never fails
	}
	if n := strings.Count(said.String(), "level="); n != 1 {
		t.Errorf("said %d times: %s", n, said)
	}
	if err := os.Rename(dir+".away", dir); err != nil {
		t.Fatal(err)
	}
	l.Write([]byte("back\n"))
	if b, err := os.ReadFile(l.path); err != nil || string(b) != "back\n" {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

// TestFileEndsWithClose: a closed log takes nothing, so that the copying ends.
func TestFileEndsWithClose(t *testing.T) {
	l, said := logTo(t, filepath.Join(t.TempDir(), "log"), "")
	l.close()
	l.close()
	if _, err := l.Write([]byte("late")); err == nil || said.Len() > 0 {
		t.Errorf("%v, said %s", err, said)
	}
}

// TestFifoAsFile: a file that is a fifo without a reader doesn't hold up the container's creation.
func TestFifoAsFile(t *testing.T) {
	within(t, 5*time.Second, "open", func() {
		if s, err := Open(t.Context(), Config{Stdout: "file://" + fifo(t)}, owner(t)); err == nil {
			s.Close()
			t.Error("no error")
		}
	})
}
