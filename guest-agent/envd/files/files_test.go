package files

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/auth"
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

// user adds one.
func (s *server) user(name, home string) {
	s.t.Helper()
	f, err := os.OpenFile(s.store.Users.Passwd, os.O_WRONLY|os.O_APPEND, 0)
	must(s.t, err)
	_, err = fmt.Fprintf(f, "%s:x:2000:2000::%s:\n", name, home)
	must(s.t, errors.Join(err, f.Close()))
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
	// A signature is for its user: another one, in whose home there is another file, takes the token.
	other := t.TempDir()
	must(t, os.WriteFile(filepath.Join(other, "file"), []byte("another"), 0o600))
	s.user("third", other)
	for header, want := range map[string]string{"": "x", "secret": "another"} {
		address := at("file", "signature", auth.Sign("file", auth.Read, "", "secret", nil))
		if resp, body := s.do("GET", address, nil, "Authorization", "Basic dGhpcmQ6", auth.Header, header); resp.StatusCode != 200 || body != want {
			t.Errorf("with the token %q: %d %s; want %s", header, resp.StatusCode, body, want)
		}
	}
	if resp, _ := s.do("POST", at("new", "signature", auth.Sign("new", auth.Read, "", "secret", nil)), strings.NewReader("x"), "Content-Type", octets); resp.StatusCode != 401 {
		t.Error(resp.StatusCode)
	}
	s.left("file", "loop", "pipe")
}

// Who is refused doesn't hold a connection by sending slowly.
func TestRefusedInTime(t *testing.T) {
	s := newServer(t)
	s.store.Init(httptest.NewRecorder(), httptest.NewRequest("POST", "/init", strings.NewReader(`{"accessToken":"secret"}`)))
	c, err := net.Dial("tcp", s.Listener.Addr().String())
	must(t, err)
	defer c.Close()
	must(t, c.SetDeadline(time.Now().Add(30*time.Second)))
	_, err = io.WriteString(c, "POST /files?path=x HTTP/1.1\r\nHost: box\r\nContent-Type: "+octets+"\r\nContent-Length: 1000\r\n\r\nslow")
	must(t, err)
	if answer, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 401 ") {
		t.Errorf("%s, %v", answer, err)
	}
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
