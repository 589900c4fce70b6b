package e2b

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestConnections: a client that has one connection too many is told so, and served when there is one less.
func TestConnections(t *testing.T) {
	_, addr, _, _ := serving(t, func(o *Options) { o.MaxConnections = 2 })
	ask := func() (net.Conn, *http.Response, string) {
		t.Helper()
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.WriteString(conn, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return conn, resp, string(b)
	}
	first, resp, _ := ask()
	if _, second, _ := ask(); resp.StatusCode != 200 || second.StatusCode != 200 {
		t.Fatal(resp.Status, second.Status)
	}
	third, resp, body := ask()
	if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" || !resp.Close || !strings.Contains(body, "2 connections open") {
		t.Errorf("%s %v %s", resp.Status, resp.Header, body)
	}
	if n, err := third.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("its connection goes on: %d, %v", n, err)
	}
	first.Close()
	for deadline := time.Now().Add(10 * time.Second); ; { // the server has to hear of it
		if _, resp, body := ask(); resp.StatusCode == 200 {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("%s %s", resp.Status, body)
		}
	}
}

// TestSilentConnections: those beyond the most, and those who are to be told so, wait in the kernel, which takes no descriptors.
func TestSilentConnections(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := limit(inner, 2)
	defer l.Close()
	accepted := make(chan net.Conn)
	ended := make(chan error, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				ended <- err
				return
			}
			accepted <- c
		}
	}()
	var last net.Conn
	for i := range 2 + surplus + 3 {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if i >= 2+surplus {
			continue
		}
		last = <-accepted
		defer last.Close()
		if got := last.(*connection).surplus; got != (i >= 2) {
			t.Errorf("connection %d: too many: %v", i, got)
		}
	}
	select {
	case <-accepted:
		t.Fatal("there are more than may be")
	case <-time.After(100 * time.Millisecond):
	}
	last.Close()
	last.Close() // which gives back one
	another := <-accepted
	defer another.Close()
	select {
	case <-accepted:
		t.Fatal("there are more than may be")
	case <-time.After(100 * time.Millisecond):
	}
	l.Close()
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}
