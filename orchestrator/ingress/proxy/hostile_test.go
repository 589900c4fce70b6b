package proxy

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cubesandbox/cube/orchestrator/ingress"
)

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

func TestDialsNothingElse(t *testing.T) {
	l := newLife(ingress.Route{Addr: netip.MustParseAddr("127.0.0.1")}, func(d time.Duration) time.Duration { return d })
	for _, to := range []string{"127.0.0.2:80", "localhost:80", "127.0.0.1:0", "[::1]:80", "127.0.0.1:ssh"} {
		if _, err := l.dial(t.Context(), netip.MustParseAddr("127.0.0.1"), to); err == nil || !strings.Contains(err.Error(), "refused: ") {
			t.Errorf("%s: %v", to, err)
		}
	}
}
