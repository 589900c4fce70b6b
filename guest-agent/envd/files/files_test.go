package files

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"net/url"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/auth"
	"github.com/cubesandbox/cube/guest-agent/envd/metadata"
	"github.com/cubesandbox/cube/guest-agent/envd/settings"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// server serves files of a home.
type server struct {
	*httptest.Server
	t     *testing.T
	home  string
	store *settings.Store
}

func newServer(t *testing.T) *server {
	t.Helper()
	me, err := user.Current()
	must(t, err)
	home, passwd := t.TempDir(), filepath.Join(t.TempDir(), "passwd")
	must(t, os.WriteFile(passwd, fmt.Appendf(nil, "%s:x:%s:%s::%s:\nother:x:1234:1235::%s:\n", me.Username, me.Uid, me.Gid, home, home), 0o600))
	s := &server{t: t, home: home, store: &settings.Store{Users: users.Database{Passwd: passwd, Group: "/nonexistent"}}}
	must(t, s.store.Load(settings.Settings{User: me.Username}))
	mux := http.NewServeMux()
	(&Handler{Settings: s.store}).Register(mux)
	s.Server = httptest.NewServer(mux)
	s.Client().Transport.(*http.Transport).DisableCompression = true
	t.Cleanup(s.Close)
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// do sends a request; headers are pairs. The answer's body is read.
func (s *server) do(method, path string, body io.Reader, header ...string) (*http.Response, string) {
	s.t.Helper()
	r, err := http.NewRequest(method, s.URL+path, body)
	must(s.t, err)
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	resp, err := s.Client().Do(r)
	must(s.t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	must(s.t, err)
	return resp, string(b)
}

func (s *server) put(path, content string) string {
	s.t.Helper()
	path = filepath.Join(s.home, path)
	must(s.t, os.WriteFile(path, []byte(content), 0o644))
	return path
}

// left checks that the home has these entries, and nothing of uploads that have failed.
func (s *server) left(want ...string) {
	s.t.Helper()
	all, err := os.ReadDir(s.home)
	must(s.t, err)
	var names []string
	for _, e := range all {
		names = append(names, e.Name())
	}
	if strings.Join(names, " ") != strings.Join(want, " ") {
		s.t.Errorf("there are %q, want %q", names, want)
	}
}

func at(path string, more ...string) string {
	q := url.Values{"path": {path}}
	for i := 0; i < len(more); i += 2 {
		q.Set(more[i], more[i+1])
	}
	return "/files?" + q.Encode()
}

const octets = "application/octet-stream"

func TestDownload(t *testing.T) {
	s := newServer(t)
	path := s.put(`a "b" ü.txt`, "0123456789")
	resp, body := s.do("GET", at(filepath.Base(path)), nil)
	if body != "0123456789" || resp.ContentLength != 10 || resp.Header.Get("Last-Modified") == "" {
		t.Errorf("%q, %v", body, resp.Header)
	}
	if d := resp.Header.Get("Content-Disposition"); !strings.HasPrefix(d, "inline; filename") || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/plain") {
		t.Errorf("%v", resp.Header)
	}
	if resp, body := s.do("GET", at(path), nil, "Range", "bytes=2-4", "Accept-Encoding", "gzip"); resp.StatusCode != 206 || body != "234" {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	if resp, body := s.do("GET", at(path), nil, "Range", "bytes=20-"); resp.StatusCode != 416 {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
	if resp, _ := s.do("GET", at(path), nil, "If-Modified-Since", time.Now().UTC().Format(http.TimeFormat)); resp.StatusCode != 304 {
		t.Error(resp.StatusCode)
	}
	if resp, body := s.do("HEAD", at(path), nil); resp.ContentLength != 10 || body != "" {
		t.Errorf("%d %q", resp.ContentLength, body)
	}
	s.put("empty", "")
	if resp, body := s.do("GET", at("empty"), nil); resp.ContentLength != 0 || body != "" || resp.Header.Get("Content-Length") != "0" {
		t.Errorf("%v %q", resp.Header, body)
	}
	if resp, body := s.do("GET", at("/proc/self/status"), nil); resp.StatusCode != 200 || !strings.Contains(body, "Name:") {
		t.Errorf("%v %q", resp.Header, body)
	}
	// It says that it has 4096 bytes.
	if resp, body := s.do("GET", at("/sys/kernel/mm/transparent_hugepage/enabled"), nil, "Range", "bytes=0-"); resp.StatusCode != 404 && (resp.StatusCode != 200 || !strings.HasSuffix(body, "\n")) {
		t.Errorf("%v %q", resp.Header, body)
	}
}

func TestDownloadRefuses(t *testing.T) {
	s := newServer(t)
	file := s.put("file", "x")
	must(t, os.Symlink("loop", filepath.Join(s.home, "loop")))
	must(t, unix.Mkfifo(filepath.Join(s.home, "pipe"), 0o600))
	for path, want := range map[string]int{
		at("missing"): 404, at("file/below"): 404, at("/"): 400, at("."): 400, at(""): 400, "/files": 400, at("a\x00b"): 400, at("loop"): 400,
		at(strings.Repeat("x/", 3000)): 400, at(strings.Repeat("x", 300)): 400, at("file", "username", "nobody-here"): 401,
	} {
		resp, body := s.do("GET", path, nil)
		var e struct {
			Code    int
			Message string
		}
		if resp.StatusCode != want || json.Unmarshal([]byte(body), &e) != nil || e.Code != want || e.Message == "" {
			t.Errorf("%.50s: %d %s; want %d", path, resp.StatusCode, body, want)
		}
	}
	if resp, _ := s.do("GET", at("pipe"), nil); resp.StatusCode != 200 { // nobody writes to it
		t.Error(resp.StatusCode)
	}
	if resp, _ := s.do("GET", at(file), nil, "Accept-Encoding", "identity;q=0, br"); resp.StatusCode != 406 {
		t.Error(resp.StatusCode)
	}
	call := func(token string) {
		r := httptest.NewRequest("POST", "/init", strings.NewReader(`{"accessToken":"`+token+`"}`))
		s.store.Init(httptest.NewRecorder(), r)
	}
	call("secret")
	for path, want := range map[string]int{
		at("file"): 401, at("file", "signature", "v1_x"): 401, at("file", "signature", auth.Sign("file", auth.Write, "", "secret", nil)): 401,
		at("file", "signature", auth.Sign("file", auth.Read, "", "secret", nil)): 200,
		at(file, "signature", auth.Sign("file", auth.Read, "", "secret", nil)):   401,
	} {
		if resp, body := s.do("GET", path, nil); resp.StatusCode != want {
			t.Errorf("%s: %d %s; want %d", path, resp.StatusCode, body, want)
		}
	}
	if resp, _ := s.do("POST", at("new", "signature", auth.Sign("new", auth.Read, "", "secret", nil)), strings.NewReader("x"), "Content-Type", octets); resp.StatusCode != 401 {
		t.Error(resp.StatusCode)
	}
	s.left("file", "loop", "pipe")
}

func TestNegotiate(t *testing.T) {
	for accept, want := range map[string]encoding{
		"": identity, "gzip": compressed, "GZIP ; q=0.5": compressed, "gzip, deflate": identity, "br, gzip, deflate": identity, "*": identity,
		"gzip;q=1, deflate;q=0.5": compressed, "gzip;q=0": identity, "identity": identity, "identity;q=0": unacceptable, "identity;q=0, gzip": compressed,
		"*;q=0": unacceptable, "*;q=0, gzip": compressed, "gzip;q=0.5, identity": identity, "gzip, identity;q=0.5": compressed, "gzip;q=2": identity,
		"gzip;x=1": identity, ",,;": identity, "identity;q=0, *": compressed,
	} {
		if got := negotiate(http.Header{"Accept-Encoding": {accept}}); got != want {
			t.Errorf("%q: %v, want %v", accept, got, want)
		}
	}
	if got := negotiate(http.Header{"Accept-Encoding": {"gzip"}, "Range": {"bytes=0-"}}); got != identity {
		t.Error(got)
	}
}

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
