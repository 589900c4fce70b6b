package proxy

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"
)

// mirror answers with what it was asked.
var mirror = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintf(w, "%s %s %s\nHost: %s\n", r.Method, r.RequestURI, r.Proto, r.Host)
	_ = r.Header.Write(w)
})

func TestRequestAsTheSandboxGetsIt(t *testing.T) {
	w := newWorld(t, mirror)
	resp, got := w.get(t, "/a%2Fb?x=1;y&%zz", "X-Forwarded-For", "1.2.3.4", "X-Forwarded-Host", "evil", "Forwarded", "for=evil",
		"E2b-Traffic-Access-Token", "hidden", "E2b-Sandbox-Id", "other", "X-Access-Token", "kept")
	if resp.StatusCode != 200 {
		t.Fatal(resp.Status, got)
	}
	for _, want := range []string{"GET /a%2Fb?x=1;y&%zz HTTP/1.1\n", "Host: " + w.host() + "\n", "X-Forwarded-For: 127.0.0.1\r", "X-Forwarded-Host: " + w.host() + "\r", "X-Forwarded-Proto: http\r", "X-Access-Token: kept\r"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %q", want, got)
		}
	}
	for _, no := range []string{"hidden", "other", "evil", "1.2.3.4"} {
		if strings.Contains(got, no) {
			t.Errorf("%q in %q", no, got)
		}
	}
	if _, got = w.get(t, "/", append(byHeader(w.port), "Host", "localhost:3002")...); !strings.Contains(got, "Host: localhost:3002\n") {
		t.Error(got)
	}
	w.route.MaskHost = "localhost:${PORT}"
	w.put(w.route)
	eventually(t, "no mask", func() bool {
		_, got = w.get(t, "/")
		return strings.Contains(got, "Host: localhost:"+w.port+"\n") && strings.Contains(got, "X-Forwarded-Host: "+w.host())
	})
}

func answerOf(t *testing.T, body string) (a refusal) {
	t.Helper()
	if err := json.Unmarshal([]byte(body), &a); err != nil {
		t.Fatalf("%q: %v", body, err)
	}
	return a
}

func TestRefusals(t *testing.T) {
	w := newWorld(t, mirror)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free := strconv.Itoa(int(netip.MustParseAddrPort(closed.Addr().String()).Port()))
	closed.Close()
	for _, tc := range []struct {
		name, path string
		header     []string
		status     int
		body       string
	}{
		{"unknown", "/", []string{"Host", "80-unknown1." + domain}, 502, `{"sandboxId":"unknown1","message":"The sandbox was not found","code":502}`},
		{"closed port", "/", []string{"Host", free + "-" + id + "." + domain}, 502, `{"sandboxId":"` + id + `","message":"The sandbox is running but port is not open","port":` + free + `,"code":502}`},
		{"init", "/init", []string{"Host", "49983-" + id + "." + domain}, 404, `{"sandboxId":"` + id + `","message":"The endpoint is reserved for the E2B control plane","code":404}`},
		{"init, disguised", "/x/..//%69nit", []string{"Host", "49983-" + id + "." + domain}, 404, `{"sandboxId":"` + id + `","message":"The endpoint is reserved for the E2B control plane","code":404}`},
		{"init by header", "/init", append(byHeader("49983"), "Host", "localhost"), 404, `{"sandboxId":"` + id + `","message":"The endpoint is reserved for the E2B control plane","code":404}`},
		{"foreign host", "/", []string{"Host", "example.com"}, 400, ""},
		{"headers at another's host", "/", append(byHeader(w.port), "Host", "example.com"), 400, ""},
		{"no target", "/", []string{"Host", "localhost"}, 400, ""},
		{"port 0", "/", []string{"Host", "0-" + id + "." + domain}, 400, ""},
	} {
		resp, body := w.get(t, tc.path, tc.header...)
		if resp.StatusCode != tc.status || resp.Header.Get("Content-Type") != "application/json; charset=utf-8" || tc.body != "" && strings.TrimSpace(body) != tc.body {
			t.Errorf("%s: %s %q %s", tc.name, resp.Status, resp.Header, body)
		}
		if a := answerOf(t, body); a.Code != tc.status || a.Message == "" {
			t.Errorf("%s: %s", tc.name, body)
		}
	}
	c := w.raw(t, "CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: "+w.host()+"\r\n\r\n")
	if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != 400 {
		t.Error(resp, err)
	}
}

func TestPageForPeople(t *testing.T) {
	w := newWorld(t, mirror)
	for _, tc := range []struct {
		header []string
		html   bool
	}{
		{[]string{"Accept", "text/html,application/xhtml+xml"}, true},
		{[]string{"Sec-Fetch-Mode", "navigate"}, true},
		{[]string{"Sec-Fetch-Mode", "cors", "Accept", "text/html"}, false},
		{[]string{"Accept", "application/json"}, false},
	} {
		resp, body := w.get(t, "/", append(tc.header, "Host", "80-unknown1."+domain)...)
		if html := strings.HasPrefix(resp.Header.Get("Content-Type"), "text/html"); html != tc.html || resp.StatusCode != 502 || !strings.Contains(body, "The sandbox was not found") {
			t.Errorf("%q: %s %s", tc.header, resp.Header, body)
		}
	}
}

func TestStateThatTheWatchHasNotToldYet(t *testing.T) {
	w := newWorld(t, mirror)
	if resp, _ := w.get(t, "/"); resp.StatusCode != 200 {
		t.Fatal(resp.Status)
	}
	w.mu.Lock()
	w.muted = true
	w.mu.Unlock()
	// A sandbox that was made just before is found by asking.
	r := w.route
	r.SandboxID = "inew"
	w.put(r)
	if resp, body := w.get(t, "/", "Host", w.port+"-inew."+domain); resp.StatusCode != 200 {
		t.Error(resp.Status, body)
	}
	// One that has gone doesn't look like a closed port.
	r = w.route
	r.SandboxID, r.Addr = "iold", netip.MustParseAddr("127.255.255.254")
	w.put(r)
	free := "1"
	if resp, body := w.get(t, "/", "Host", free+"-iold."+domain); answerOf(t, body).Port != 1 {
		t.Error(resp.Status, body)
	}
	w.remove("iold")
	if resp, body := w.get(t, "/", "Host", free+"-iold."+domain); answerOf(t, body).Message != "The sandbox was not found" {
		t.Error(resp.Status, body)
	}
}

func TestServerThatIsStarting(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr()
	l.Close()
	c := newControl()
	w := worldOf(t, c, c, addr)
	c.put(w.route)
	late := &http.Server{Handler: mirror}
	defer late.Close()
	time.AfterFunc(150*time.Millisecond, func() {
		if l, err := net.Listen("tcp", addr.String()); err == nil {
			_ = late.Serve(l)
		}
	})
	if resp, body := w.get(t, "/"); resp.StatusCode != 200 {
		t.Error(resp.Status, body)
	}
}

func TestBodies(t *testing.T) {
	const size = 16 << 20
	sums := make(chan string, 1)
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		n, err := io.Copy(h, r.Body)
		sums <- fmt.Sprintf("%d %x %v %v", n, h.Sum(nil), err, r.Trailer.Get("X-End"))
		w.Header().Set("Trailer", "X-Sum")
		_, _ = io.CopyN(w, &endless{}, size)
		w.Header().Set("X-Sum", "done")
	}))
	want := sha256.New()
	_, _ = io.CopyN(want, &endless{}, size)
	r := w.request(t, http.MethodPost, "/", nil)
	r.Body = io.NopCloser(io.LimitReader(&endless{}, size)) // chunked
	r.Trailer = http.Header{"X-End": {"end"}}
	r.Header.Set("Expect", "100-continue")
	resp, err := (&http.Client{Transport: &http.Transport{ExpectContinueTimeout: timeout}}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	h := sha256.New()
	if n, err := io.Copy(h, resp.Body); err != nil || n != size || !bytes.Equal(h.Sum(nil), want.Sum(nil)) {
		t.Error(n, err)
	}
	if got := <-sums; got != fmt.Sprintf("%d %x <nil> end", size, want.Sum(nil)) {
		t.Error(got)
	}
	if resp.Trailer.Get("X-Sum") != "done" {
		t.Error(resp.Trailer)
	}
}

// endless is the same bytes each time.
type endless struct{ n byte }

func (e *endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = e.n
		e.n++
	}
	return len(b), nil
}

func TestContinueIsTheServersToSay(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }))
	c := w.raw(t, "POST / HTTP/1.1\r\nHost: "+w.host()+"\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n")
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil || !strings.Contains(line, " 401 ") {
		t.Errorf("%q, %v", line, err)
	}
}

func TestNothingIsBuffered(t *testing.T) {
	step := make(chan struct{})
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		w.Header().Set("Content-Length", "3")
		for _, part := range []string{"a", "b", "c"} {
			_, _ = io.WriteString(w, part)
			_ = rc.Flush()
			<-step
		}
	}))
	resp, err := w.server.Client().Do(w.request(t, http.MethodGet, "/", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b := make([]byte, 10)
	for _, want := range []string{"a", "b", "c"} {
		if n, err := resp.Body.Read(b); string(b[:n]) != want || err != nil && err != io.EOF {
			t.Fatalf("%q, %v", b[:n], err)
		}
		step <- struct{}{}
	}
}

func TestTLSPort(t *testing.T) {
	backend := httptest.NewTLSServer(mirror)
	defer backend.Close()
	c := newControl()
	w := worldOf(t, c, c, backend.Listener.Addr())
	port, _ := strconv.ParseUint(w.port, 10, 16)
	w.route.HTTPSPorts = []uint16{uint16(port)}
	c.put(w.route)
	if resp, body := w.get(t, "/x"); resp.StatusCode != 200 || !strings.HasPrefix(body, "GET /x ") {
		t.Error(resp.Status, body)
	}
}
