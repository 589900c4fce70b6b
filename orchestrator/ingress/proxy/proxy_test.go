package proxy

import (
	"bufio"
	"bytes"
	"context"
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
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/auth"
	"github.com/cubesandbox/cube/orchestrator/ingress"
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

func TestTrafficToken(t *testing.T) {
	w := newWorld(t, mirror)
	sum := sha256.Sum256([]byte("token"))
	w.route.AllowPublic, w.route.TrafficToken = false, sum[:]
	w.put(w.route)
	const missing = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
	const invalid = "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"
	eventually(t, "it stays public", func() bool {
		resp, body := w.get(t, "/")
		return resp.StatusCode == 403 && answerOf(t, body).Message == missing
	})
	if resp, body := w.get(t, "/", "E2B-TRAFFIC-ACCESS-TOKEN", "tokem"); resp.StatusCode != 403 || answerOf(t, body).Message != invalid {
		t.Error(resp.Status, body)
	}
	if resp, body := w.get(t, "/", "e2b-traffic-access-token", "token"); resp.StatusCode != 200 || strings.Contains(body, "oken") {
		t.Error(resp.Status, body)
	}
	// envd's port asks for its own.
	if resp, body := w.get(t, "/health", "Host", "49983-"+id+"."+domain); resp.StatusCode != 502 || answerOf(t, body).Port != 49983 {
		t.Error(resp.Status, body)
	}
	w.route.TrafficToken = nil
	w.put(w.route)
	eventually(t, "it opens without a token to compare with", func() bool {
		resp, _ := w.get(t, "/", "e2b-traffic-access-token", "token")
		return resp.StatusCode == 403
	})
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

func TestWake(t *testing.T) {
	w := newWorld(t, mirror)
	paused := w.route
	paused.State, paused.Addr, paused.Epoch = "paused", netip.Addr{}, ""
	w.put(paused)
	eventually(t, "a paused sandbox that isn't woken is found", func() bool {
		resp, body := w.get(t, "/")
		return resp.StatusCode == 502 && answerOf(t, body).Message == "The sandbox was not found"
	})
	paused.AutoResume, paused.Secure, paused.EnvdToken = true, true, "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"
	w.put(paused)
	var wakes atomic.Int32
	for class, status := range map[error]int{
		errdefs.ErrPermissionDenied: 403, errdefs.ErrFailedPrecondition: 409, errdefs.ErrConflict: 409, errdefs.ErrResourceExhausted: 429,
		errdefs.ErrUnavailable: 503, errdefs.ErrNotFound: 502,
	} {
		w.wake = func(context.Context, string) (ingress.Route, error) { return ingress.Route{}, class }
		resp, body := w.get(t, "/")
		if resp.StatusCode != status || answerOf(t, body).Code != status || (status == 429 || status == 503) != (resp.Header.Get("Retry-After") != "") {
			t.Errorf("%v: %s %s", class, resp.Status, body)
		}
	}
	envd := "49983-" + id + "." + domain
	w.wake = func(context.Context, string) (ingress.Route, error) {
		wakes.Add(1)
		return ingress.Route{}, errdefs.ErrConflict
	}
	for _, tc := range []struct {
		path   string
		header []string
		wakes  bool
	}{
		{"/health", nil, false},
		{"/health", []string{"X-Access-Token", "wrong"}, false},
		{"/health", []string{"X-Access-Token", paused.EnvdToken}, true},
		{"/files?path=hello.txt&username=user", nil, false},
		{"/files?path=hello.txt&username=user&signature=v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E", nil, true},
		{"/files?path=hello.txt&username=root&signature=v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E", nil, false},
		{"/envs?path=hello.txt&username=user&signature=v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E", nil, false},
		{"/files?path=x&signature_expiration=1&signature=" + auth.Sign("x", auth.Read, "", paused.EnvdToken, new(int64(1))), nil, false},
	} {
		before := wakes.Load()
		resp, body := w.get(t, tc.path, append(tc.header, "Host", envd)...)
		if woken := wakes.Load() > before; woken != tc.wakes || !woken && resp.StatusCode != 403 {
			t.Errorf("%s %q: woken %v, %s %s", tc.path, tc.header, woken, resp.Status, body)
		}
	}
	// Many ask, one wakes; all get there.
	wakes.Store(0)
	release := make(chan struct{})
	w.wake = func(context.Context, string) (ingress.Route, error) {
		wakes.Add(1)
		<-release
		r := w.route
		r.Epoch = "e2"
		w.put(ingress.Route{SandboxID: id, State: "resuming", AutoResume: true})
		return w.put(r), nil
	}
	const n = 30
	results := make(chan int, n)
	for range n {
		go func() {
			r := w.request(t, http.MethodGet, "/", nil)
			resp, err := w.server.Client().Do(r)
			if err != nil {
				results <- 0
				return
			}
			resp.Body.Close()
			results <- resp.StatusCode
		}()
	}
	eventually(t, "nobody wakes it", func() bool { return wakes.Load() == 1 })
	close(release)
	for range n {
		if status := <-results; status != 200 {
			t.Error(status)
		}
	}
	if wakes.Load() != 1 {
		t.Errorf("woken %d times", wakes.Load())
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

func TestHostileServer(t *testing.T) {
	for name, answer := range map[string]string{
		"not HTTP":           "SSH-2.0-x\r\n",
		"endless header":     "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 2*maxResponseHeader),
		"two lengths":        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
		"bad status":         "HTTP/1.1 20x OK\r\n\r\n",
		"upgrade unasked":    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
		"silence":            "",
		"many interim":       strings.Repeat("HTTP/1.1 103 Early Hints\r\nX: "+strings.Repeat("x", 10000)+"\r\n\r\n", 100),
		"bad transfer":       "HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\n\r\n",
		"header with a line": "HTTP/1.1 200 OK\r\nX\r\n: y\r\n\r\n",
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					_, _ = http.ReadRequest(bufio.NewReader(c))
					_, _ = io.WriteString(c, answer)
				}()
			}
		}()
		c := newControl()
		w := worldOf(t, c, c, l.Addr())
		c.put(w.route)
		if resp, body := w.get(t, "/"); resp.StatusCode != 502 || answerOf(t, body).Message != "The sandbox's server broke off or gave no valid answer" {
			t.Errorf("%s: %s %s", name, resp.Status, body)
		}
	}
}

func TestSmuggling(t *testing.T) {
	var seen atomic.Int32
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen.Add(1)
		if r.URL.Path == "/smuggled" {
			t.Error("a request got past the proxy")
		}
		_, _ = io.Copy(io.Discard, r.Body)
	}))
	host := "Host: " + w.host() + "\r\n"
	const inner = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
	for name, text := range map[string]string{
		"length and chunks":       "POST / HTTP/1.1\r\n" + host + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n" + inner,
		"two lengths":             "POST / HTTP/1.1\r\n" + host + "Content-Length: 0\r\nContent-Length: 37\r\nConnection: close\r\n\r\n" + inner,
		"chunked, disguised":      "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: xchunked\r\nConnection: close\r\n\r\n" + inner,
		"chunked twice":           "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked, chunked\r\nConnection: close\r\n\r\n0\r\n\r\n" + inner,
		"space before the colon":  "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding : chunked\r\nConnection: close\r\n\r\n0\r\n\r\n" + inner,
		"folded":                  "POST / HTTP/1.1\r\n" + host + "X: y\r\n Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n",
		"length that isn't one":   "POST / HTTP/1.1\r\n" + host + "Content-Length: +5\r\nConnection: close\r\n\r\nabcde" + inner,
		"chunk extension's lines": "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n5;\nabcde\r\n0\r\n\r\n",
		"two hosts":               "GET / HTTP/1.1\r\n" + host + "Host: evil\r\nConnection: close\r\n\r\n",
		"hop-by-hop":              "GET / HTTP/1.1\r\n" + host + "Connection: close, X-Forwarded-For, Host\r\n\r\n",
	} {
		c := w.raw(t, text)
		b, err := io.ReadAll(c)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if n := strings.Count(string(b), "HTTP/1.1 "); n > 1 && name != "length and chunks" {
			t.Errorf("%s: %d answers: %q", name, n, b)
		}
	}
}

// TestTunnels has clients ask for upgrades by which they could speak to a server past the proxy.
func TestTunnels(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if up := r.Header.Get("Upgrade"); up != "" {
			w.Header().Set("Connection", "Upgrade")
			w.Header().Set("Upgrade", up)
			w.WriteHeader(http.StatusSwitchingProtocols)
			return
		}
		_, _ = io.WriteString(w, "plain"+r.Header.Get("Http2-Settings"))
	}))
	for _, up := range []string{"h2c", "H2C", "h2"} {
		resp, body := w.get(t, "/", "Connection", "Upgrade, HTTP2-Settings", "Upgrade", up, "HTTP2-Settings", "AAMAAABkAAQAoAAAAAIAAAAA")
		if resp.StatusCode != 200 || body != "plain" {
			t.Errorf("%s: %s %s", up, resp.Status, body)
		}
	}
}

func TestBrokenBodyIsTheClients(t *testing.T) {
	w := newWorld(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		panic(http.ErrAbortHandler)
	}))
	c := w.raw(t, "POST / HTTP/1.1\r\nHost: "+w.host()+"\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\nzz\r\n")
	if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != 400 {
		t.Error(resp, err)
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

func TestDialsNothingElse(t *testing.T) {
	l := newLife(ingress.Route{Addr: netip.MustParseAddr("127.0.0.1")}, func(d time.Duration) time.Duration { return d })
	for _, to := range []string{"127.0.0.2:80", "localhost:80", "127.0.0.1:0", "[::1]:80", "127.0.0.1:ssh"} {
		if _, err := l.dial(t.Context(), netip.MustParseAddr("127.0.0.1"), to); err == nil || !strings.Contains(err.Error(), "refused: ") {
			t.Errorf("%s: %v", to, err)
		}
	}
}
