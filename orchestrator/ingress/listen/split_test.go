package listen

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"
)

const timeout = 10 * time.Second

// options has a test's certificate.
func options(o Options) Options {
	ts := httptest.NewTLSServer(nil)
	ts.Close()
	o.TLS = &tls.Config{Certificates: ts.TLS.Certificates, NextProtos: []string{"h2", "http/1.1"}}
	if o.Max == 0 {
		o.Max = 100
	}
	if o.Hello == 0 {
		o.Hello = timeout
	}
	return o
}

func listen(t *testing.T) *net.TCPListener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l.(*net.TCPListener)
}

func split(t *testing.T, o Options) (*Listener, string) {
	t.Helper()
	s := Split(listen(t), options(o))
	t.Cleanup(func() { s.Close() })
	return s, s.Addr().String()
}

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(timeout))
	return c
}

func TestBothOnOnePort(t *testing.T) {
	l := listen(t)
	addr := l.Addr().String()
	srv := NewServer(l, options(Options{}), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.Proto)
		if r.TLS != nil {
			io.WriteString(w, " by TLS")
		}
	}), nil)
	go srv.Serve()
	defer srv.Close()
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	insecure := &tls.Config{InsecureSkipVerify: true}
	for _, tc := range []struct {
		scheme, want string
		transport    *http.Transport
	}{
		{"http", "HTTP/1.1", &http.Transport{}},
		{"http", "HTTP/2.0", &http.Transport{Protocols: h2c}},
		{"https", "HTTP/1.1 by TLS", &http.Transport{TLSClientConfig: insecure}},
		{"https", "HTTP/2.0 by TLS", &http.Transport{TLSClientConfig: insecure, ForceAttemptHTTP2: true}},
	} {
		resp, err := (&http.Client{Transport: tc.transport, Timeout: timeout}).Get(tc.scheme + "://" + addr)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(b) != tc.want {
			t.Errorf("%q, want %q", b, tc.want)
		}
		tc.transport.CloseIdleConnections()
	}
}

// TestSlowClients: who says nothing is let go, and keeps nobody waiting.
func TestSlowClients(t *testing.T) {
	l, addr := split(t, Options{Hello: 200 * time.Millisecond})
	silent := dial(t, addr)
	quick := dial(t, addr)
	if _, err := io.WriteString(quick, "x"); err != nil {
		t.Fatal(err)
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1)
	if _, err := io.ReadFull(c, b); err != nil || b[0] != 'x' {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := silent.Read(b); err != io.EOF && !strings.Contains(err.Error(), "reset") {
		t.Errorf("who says nothing has %v", err)
	}
	// Only the first byte had to come in time.
	time.AfterFunc(300*time.Millisecond, func() { io.WriteString(quick, "y") })
	if _, err := io.ReadFull(c, b); err != nil || b[0] != 'y' {
		t.Errorf("%q, %v", b, err)
	}
}

func TestMax(t *testing.T) {
	l, addr := split(t, Options{Max: 2})
	var got []net.Conn
	for range 3 {
		if _, err := io.WriteString(dial(t, addr), "x"); err != nil {
			t.Fatal(err)
		}
	}
	accepted := make(chan net.Conn)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	for range 2 {
		got = append(got, <-accepted)
	}
	select {
	case <-accepted:
		t.Fatal("there are more than may be")
	case <-time.After(100 * time.Millisecond):
	}
	got[0].Close()
	got[0].Close() // gives back one
	select {
	case <-accepted:
	case <-time.After(timeout):
		t.Fatal("the third one waits for ever")
	}
}

// TestHandOver gives the port to another server, by another descriptor of it, while connections come in: none is refused or lost.
func TestHandOver(t *testing.T) {
	release := make(chan struct{})
	first := listen(t)
	addr := first.Addr().String()
	f, err := first.File()
	if err != nil {
		t.Fatal(err)
	}
	second, err := net.FileListener(f)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	servers := make([]*Server, 2)
	for i, l := range []*net.TCPListener{first, second.(*net.TCPListener)} {
		servers[i] = NewServer(l, options(Options{}), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/long" {
				<-release
			}
			w.WriteHeader(200 + i)
		}), nil)
		go servers[i].Serve()
		defer servers[i].Close()
	}
	// One that has connected and not said anything yet is the first's, maybe.
	early := dial(t, addr)
	done := make(chan error)
	stop := make(chan struct{})
	for range 8 {
		go func() {
			client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: timeout}
			for {
				select {
				case <-stop:
					done <- nil
					return
				default:
				}
				resp, err := client.Get("http://" + addr)
				if err != nil {
					done <- err
					return
				}
				resp.Body.Close()
			}
		}()
	}
	long := dial(t, addr)
	io.WriteString(long, "GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
	time.AfterFunc(100*time.Millisecond, func() { io.WriteString(early, "GET / HTTP/1.1\r\nHost: x\r\n\r\n") })
	time.AfterFunc(200*time.Millisecond, func() { close(release) })
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	if err := servers[0].Drain(ctx); err != nil {
		t.Error(err)
	}
	if resp, err := http.ReadResponse(bufio.NewReader(long), nil); err != nil {
		t.Error("the long one: ", resp, err)
	}
	if resp, err := http.ReadResponse(bufio.NewReader(early), nil); err != nil {
		t.Error("the early one: ", resp, err)
	}
	close(stop)
	for range 8 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestClose(t *testing.T) {
	l, addr := split(t, Options{})
	c := dial(t, addr)
	if _, err := io.WriteString(c, "x"); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a connection that nobody took: %v", err)
	}
}

// TestSlowFirstWords: who begins a handshake or a header and doesn't go on is let go, too.
func TestSlowFirstWords(t *testing.T) {
	l := listen(t)
	addr := l.Addr().String()
	srv := NewServer(l, options(Options{Hello: 300 * time.Millisecond}), http.NotFoundHandler(), log.New(io.Discard, "", 0))
	go srv.Serve()
	defer srv.Close()
	for name, begin := range map[string]string{
		"TLS":     "\x16\x03\x01",
		"HTTP/1":  "GET / HTTP/1.1\r\nHost: x\r\n",
		"HTTP/2":  "PRI * HTTP/2.0\r\n",
		"a byte":  "G",
		"nothing": "",
	} {
		c := dial(t, addr)
		if _, err := io.WriteString(c, begin); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A header without end is refused long before it is taken.
	c := dial(t, addr)
	go func() {
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\nX: "); err == nil {
			_, _ = io.Copy(c, endless{})
		}
	}()
	if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err == nil && resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Error(resp.Status)
	}
}

type endless struct{}

func (endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = 'x'
	}
	return len(b), nil
}
