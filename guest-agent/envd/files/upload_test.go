package files

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/metadata"
)

func TestUpload(t *testing.T) {
	s := newServer(t)
	resp, body := s.do("POST", at("d/e/f"), struct{ io.Reader }{strings.NewReader("content")}, "Content-Type", octets, "X-Metadata-Key", "v", "X-Metadata-a_b", "w")
	var got []written
	if err := json.Unmarshal([]byte(body), &got); err != nil || resp.StatusCode != 200 || len(got) != 1 || got[0].Path != filepath.Join(s.home, "d/e/f") || got[0].Name != "f" || got[0].Type != "file" {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	if m := metadata.Get(got[0].Path); m["key"] != "v" || m["a_b"] != "w" || len(m) != 2 {
		t.Errorf("%v", m)
	}
	packed := &bytes.Buffer{}
	z := gzip.NewWriter(packed)
	fmt.Fprint(z, strings.Repeat("packed", 10_000))
	z.Close()
	for name, c := range map[string]struct {
		header []string
		body   io.Reader
		want   string
	}{
		"empty":  {[]string{"Content-Type", octets}, nil, ""},
		"packed": {[]string{"Content-Type", octets, "Content-Encoding", "gzip"}, packed, strings.Repeat("packed", 10_000)},
	} {
		if resp, body := s.do("POST", at(name), c.body, c.header...); resp.StatusCode != 200 {
			t.Errorf("%s: %d %s", name, resp.StatusCode, body)
		}
		if b, err := os.ReadFile(filepath.Join(s.home, name)); err != nil || string(b) != c.want {
			t.Errorf("%s: %.20q, %v", name, b, err)
		}
	}
	s.left("d", "empty", "packed")
}

func form(t *testing.T, parts ...string) (io.Reader, string) {
	t.Helper()
	b := &bytes.Buffer{}
	w := multipart.NewWriter(b)
	for i := 0; i < len(parts); i += 3 {
		h := textproto.MIMEHeader{"Content-Disposition": {fmt.Sprintf(`form-data; name="%s"; filename="%s"`, parts[i], parts[i+1])}}
		p, err := w.CreatePart(h)
		must(t, err)
		fmt.Fprint(p, parts[i+2])
	}
	must(t, w.Close())
	return b, w.FormDataContentType()
}

func TestForm(t *testing.T) {
	s := newServer(t)
	body, kind := form(t, "other", "x", "ignored", "file", "a/b", "1", "file", "c", "2")
	if resp, got := s.do("POST", "/files", body, "Content-Type", kind); resp.StatusCode != 200 || strings.Count(got, `"path"`) != 2 {
		t.Errorf("%d %s", resp.StatusCode, got)
	}
	body, kind = form(t, "file", "name", "3")
	if resp, got := s.do("POST", at("at-path"), body, "Content-Type", kind); resp.StatusCode != 200 {
		t.Errorf("%d %s", resp.StatusCode, got)
	}
	for path, want := range map[string]string{"a/b": "1", "c": "2", "at-path": "3"} {
		if b, err := os.ReadFile(filepath.Join(s.home, path)); err != nil || string(b) != want {
			t.Errorf("%s: %.20q, %v", path, b, err)
		}
	}
}

func TestUploadRefuses(t *testing.T) {
	s := newServer(t)
	s.put("kept", "kept")
	must(t, os.Mkdir(filepath.Join(s.home, "dir"), 0o755))
	two, twoKind := form(t, "file", "x", "1", "file", "y", "2")
	none, noneKind := form(t, "fil", "x", "1")
	noName, noNameKind := form(t, "file", "", "1")
	long := []string{"Content-Type", octets, "X-Metadata-" + strings.Repeat("k", 247), "v"}
	much := []string{"Content-Type", octets, "X-Metadata-K", strings.Repeat("v", 4096)}
	for what, c := range map[string]struct {
		path   string
		body   io.Reader
		header []string
	}{
		"no path":        {"/files", strings.NewReader("x"), []string{"Content-Type", octets}},
		"directory":      {at("dir"), strings.NewReader("x"), []string{"Content-Type", octets}},
		"below a file":   {at("kept/x"), strings.NewReader("x"), []string{"Content-Type", octets}},
		"zero byte":      {at("a\x00"), strings.NewReader("x"), []string{"Content-Type", octets}},
		"long name":      {at(strings.Repeat("x", 256)), strings.NewReader("x"), []string{"Content-Type", octets}},
		"other type":     {at("x"), strings.NewReader("x"), []string{"Content-Type", "text/plain"}},
		"no type":        {at("x"), strings.NewReader("x"), nil},
		"no boundary":    {at("x"), strings.NewReader("x"), []string{"Content-Type", "multipart/form-data"}},
		"other coding":   {at("x"), strings.NewReader("x"), []string{"Content-Type", octets, "Content-Encoding", "br"}},
		"not gzip":       {at("kept"), strings.NewReader("x"), []string{"Content-Type", octets, "Content-Encoding", "gzip"}},
		"cut gzip":       {at("kept"), strings.NewReader("\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff\x00"), []string{"Content-Type", octets, "Content-Encoding", "gzip"}},
		"cut form":       {at("kept"), strings.NewReader("--b\r\nContent-Disposition: form-data; name=file\r\n\r\nxx"), []string{"Content-Type", "multipart/form-data; boundary=b"}},
		"two for a path": {at("first"), two, []string{"Content-Type", twoKind}},
		"no file":        {at("x"), none, []string{"Content-Type", noneKind}},
		"no name":        {"/files", noName, []string{"Content-Type", noNameKind}},
		"long key":       {at("x"), strings.NewReader("x"), long},
		"much metadata":  {at("x"), strings.NewReader("x"), much},
	} {
		resp, body := s.do("POST", c.path, c.body, c.header...)
		if resp.StatusCode != 400 || !strings.Contains(body, `"code":400`) {
			t.Errorf("%s: %d %s", what, resp.StatusCode, body)
		}
	}
	s.left("dir", "first", "kept")
	if b, err := os.ReadFile(filepath.Join(s.home, "kept")); err != nil || string(b) != "kept" {
		t.Errorf("%.20q, %v", b, err)
	}
}

// A client that goes away in the middle leaves what was there before.
func TestUploadBreaksOff(t *testing.T) {
	s := newServer(t)
	s.put("kept", "kept")
	r, w := io.Pipe()
	request, err := http.NewRequest("POST", s.URL+at("kept"), r)
	must(t, err)
	request.Header.Set("Content-Type", octets)
	done := make(chan error)
	go func() {
		_, err := s.Client().Do(request)
		done <- err
	}()
	_, err = w.Write(make([]byte, 1<<20))
	must(t, err)
	w.CloseWithError(io.ErrUnexpectedEOF)
	if err := <-done; err == nil {
		t.Error("the request has succeeded")
	}
	s.Close() // waits for the handler
	s.left("kept")
	if b, err := os.ReadFile(filepath.Join(s.home, "kept")); err != nil || string(b) != "kept" {
		t.Errorf("%.20q, %v", b, err)
	}
}

func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting takes root")
	}
	s := newServer(t)
	small := filepath.Join(s.home, "small")
	must(t, os.Mkdir(small, 0o755))
	must(t, unix.Mount("tmpfs", small, "tmpfs", 0, "size=1m"))
	defer unix.Unmount(small, unix.MNT_DETACH)
	must(t, os.WriteFile(filepath.Join(small, "kept"), []byte("kept"), 0o644))
	for range 2 {
		resp, body := s.do("POST", at("small/kept"), bytes.NewReader(make([]byte, 8<<20)), "Content-Type", octets)
		if resp.StatusCode != 507 || !strings.Contains(body, `"code":507`) || !strings.Contains(body, "not enough disk space") {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
		resp, body = s.do("POST", "/files/compose", strings.NewReader(`{"source_paths":["/proc/self/exe"],"destination":"small/kept"}`))
		if resp.StatusCode != 507 {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
	}
	all, err := os.ReadDir(small)
	must(t, err)
	if b, err := os.ReadFile(filepath.Join(small, "kept")); len(all) != 1 || err != nil || string(b) != "kept" {
		t.Errorf("%v, %.20q, %v", all, b, err)
	}
}

// What is replaced keeps its mode, links their targets, and what isn't a file is written to.
func TestReplace(t *testing.T) {
	s := newServer(t)
	upload := func(path, content string) {
		t.Helper()
		if resp, body := s.do("POST", at(path), strings.NewReader(content), "Content-Type", octets); resp.StatusCode != 200 {
			t.Errorf("%s: %d %s", path, resp.StatusCode, body)
		}
	}
	must(t, os.MkdirAll(filepath.Join(s.home, "real/below"), 0o755))
	must(t, os.Chmod(s.put("real/file", "old"), 0o751))
	must(t, os.Symlink("real/below", filepath.Join(s.home, "dir")))
	must(t, os.Symlink("../file", filepath.Join(s.home, "real/below/link")))
	must(t, os.Symlink("not-yet", filepath.Join(s.home, "dangling")))
	upload("dir/link", "new")
	upload("dangling", "made")
	for path, want := range map[string]string{"real/file": "new", "not-yet": "made"} {
		if b, err := os.ReadFile(filepath.Join(s.home, path)); err != nil || string(b) != want {
			t.Errorf("%s: %.20q, %v", path, b, err)
		}
	}
	if info, err := os.Stat(filepath.Join(s.home, "real/file")); err != nil || info.Mode() != 0o751 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	upload("/dev/null", "nothing")
	if info, err := os.Stat("/dev/null"); err != nil || info.Mode()&os.ModeCharDevice == 0 {
		t.Fatal("there is no /dev/null", err)
	}
	must(t, os.Symlink("loop", filepath.Join(s.home, "loop")))
	if resp, body := s.do("POST", at("loop"), strings.NewReader("x"), "Content-Type", octets); resp.StatusCode != 400 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

func TestOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root gives files away")
	}
	s := newServer(t)
	if resp, body := s.do("POST", at("a/b", "username", "other"), strings.NewReader("x"), "Content-Type", octets); resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	for path, want := range map[string]uint32{"": 0, "a": 1234, "a/b": 1234} {
		var st unix.Stat_t
		must(t, unix.Stat(filepath.Join(s.home, path), &st))
		if st.Uid != want {
			t.Errorf("%q is %d's", path, st.Uid)
		}
	}
	// What is a mount is written in place.
	bound, over := s.put("bound", "old"), s.put("over", "")
	must(t, unix.Mount(bound, over, "", unix.MS_BIND, ""))
	defer unix.Unmount(over, unix.MNT_DETACH)
	if resp, body := s.do("POST", at("over", "username", "other"), strings.NewReader("new"), "Content-Type", octets); resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	if b, err := os.ReadFile(bound); err != nil || string(b) != "new" {
		t.Errorf("%.20q, %v", b, err)
	}
	s.put("more", "more")
	if resp, body := s.do("POST", "/files/compose", strings.NewReader(`{"source_paths":["more","over"],"destination":"over"}`)); resp.StatusCode != 400 || !strings.Contains(body, "source_paths[1]") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

func TestCompose(t *testing.T) {
	s := newServer(t)
	s.put("a", "1")
	s.put("b", "2")
	compose := func(body string, want int, contains string) {
		t.Helper()
		if resp, got := s.do("POST", "/files/compose", strings.NewReader(body)); resp.StatusCode != want || !strings.Contains(got, contains) {
			t.Errorf("%s: %d %s; want %d", body, resp.StatusCode, got, want)
		}
	}
	compose(`{"source_paths":["a","b","a"],"destination":"to/all"}`, 200, `"name":"all"`)
	compose(`{"source_paths":["b","a"],"destination":"a"}`, 200, `"type":"file"`)
	for path, want := range map[string]string{"to/all": "121", "a": "21"} {
		if b, err := os.ReadFile(filepath.Join(s.home, path)); err != nil || string(b) != want {
			t.Errorf("%s: %.20q, %v", path, b, err)
		}
	}
	compose(`{"source_paths":["a","missing"],"destination":"b"}`, 404, "missing")
	compose(`{"source_paths":[],"destination":"b"}`, 400, "source_paths")
	compose(`{"source_paths":["a"]}`, 400, "destination")
	compose(`{"source_paths":["a",""],"destination":"b"}`, 400, "source_paths[1]")
	compose(`{"source_paths":["a","/dev/zero"],"destination":"b"}`, 400, "source_paths[1]")
	compose(`{"source_paths":["a"],"destination":"b","username":"nobody-here"}`, 401, "nobody-here")
	compose(`{"source_paths":`, 400, "body")
	if b, err := os.ReadFile(filepath.Join(s.home, "b")); err != nil || string(b) != "2" {
		t.Errorf("%.20q, %v", b, err)
	}
	s.left("a", "b", "to")
}
