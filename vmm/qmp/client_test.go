package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const greeting = `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}`

// server is the scripted QEMU at the other end.
type server struct {
	t    *testing.T
	conn *net.UnixConn
	r    *bufio.Reader
}

type command struct {
	Execute   string          `json:"execute"`
	Arguments json.RawMessage `json:"arguments"`
	ID        uint64          `json:"id"`
}

func (s *server) say(format string, args ...any) {
	if _, err := fmt.Fprintf(s.conn, format+"\n", args...); err != nil {
		s.t.Logf("server: %v", err)
	}
}

func (s *server) hear() command {
	line, err := s.r.ReadBytes('\n')
	if err != nil {
		s.t.Errorf("server: %v", err)
		return command{}
	}
	var c command
	if err := json.Unmarshal(line, &c); err != nil {
		s.t.Errorf("server: the client said %q: %v", line, err)
	}
	return c
}

func pair(t testing.TB) (*net.UnixConn, *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socketpair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = c.(*net.UnixConn)
		t.Cleanup(func() { c.Close() })
	}
	return conns[0], conns[1]
}

// scripted returns a client whose QEMU follows the script after the negotiation.
func scripted(t *testing.T, script func(*server)) *Client {
	t.Helper()
	a, b := pair(t)
	s := &server{t: t, conn: b, r: bufio.NewReader(b)}
	var wg sync.WaitGroup
	wg.Go(func() {
		s.say("%s", greeting)
		if c := s.hear(); c.Execute != "qmp_capabilities" {
			t.Errorf("the first command is %q", c.Execute)
		} else {
			s.say(`{"return": {}, "id": %d}`, c.ID)
		}
		script(s)
	})
	c := New(a)
	t.Cleanup(func() { c.Close(); b.Close(); wg.Wait() })
	if err := c.Open(within(t, 5*time.Second)); err != nil {
		t.Fatal(err)
	}
	return c
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestDo(t *testing.T) {
	c := scripted(t, func(s *server) {
		q := s.hear()
		if q.Execute != "query-status" || string(q.Arguments) != `{"a":1}` {
			t.Errorf("got %+v", q)
		}
		s.say(`{"return": {"status": "running"}, "id": %d}`, q.ID)
		q = s.hear()
		s.say(`{"error": {"class": "DeviceNotFound", "desc": "Device 'x' not found"}, "id": %d}`, q.ID)
		s.hear()
		s.conn.Close()
	})
	var out struct{ Status string }
	if err := c.Do(within(t, 5*time.Second), "query-status", map[string]int{"a": 1}, &out); err != nil || out.Status != "running" {
		t.Fatal(out, err)
	}
	err := c.Do(within(t, 5*time.Second), "device_del", nil, nil)
	var qe *Error
	if !errors.Is(err, ErrDeviceNotFound) || errors.Is(err, ErrGeneric) || !errors.As(err, &qe) || qe.Desc != "Device 'x' not found" {
		t.Fatalf("got %v", err)
	}
	if err := c.Do(within(t, 5*time.Second), "quit", nil, nil); !errors.Is(err, ErrClosed) {
		t.Fatalf("got %v", err)
	}
	<-c.Done()
	if err := c.Do(context.Background(), "query-status", nil, nil); !errors.Is(err, ErrClosed) {
		t.Fatalf("after the end: %v", err)
	}
}

// Answers may come in any order, and go to who asked.
func TestConcurrentCallers(t *testing.T) {
	const n = 50
	c := scripted(t, func(s *server) {
		var qs []command
		for range n {
			qs = append(qs, s.hear())
		}
		for i := n - 1; i >= 0; i-- {
			s.say(`{"return": %s, "id": %d}`, qs[i].Arguments, qs[i].ID)
		}
	})
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			var out int
			if err := c.Do(within(t, 5*time.Second), "echo", i, &out); err != nil || out != i {
				t.Errorf("caller %d got %d, %v", i, out, err)
			}
		})
	}
	wg.Wait()
}

func TestLateReply(t *testing.T) {
	gaveUp := make(chan struct{})
	c := scripted(t, func(s *server) {
		late := s.hear()
		<-gaveUp
		next := s.hear()
		s.say(`{"return": "late", "id": %d}`, late.ID)
		s.say(`{"return": "right", "id": %d}`, next.ID)
	})
	err := c.Do(within(t, 20*time.Millisecond), "slow", nil, nil)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	close(gaveUp)
	var out string
	if err := c.Do(within(t, 5*time.Second), "next", nil, &out); err != nil || out != "right" {
		t.Fatal(out, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pending) != 0 {
		t.Fatalf("%d tombstones left", len(c.pending))
	}
}

func TestSilentPeer(t *testing.T) {
	a, _ := pair(t)
	c := New(a)
	defer c.Close()
	start := time.Now()
	if err := c.Open(within(t, 30*time.Millisecond)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	if d := time.Since(start); d > 2*time.Second {
		t.Fatalf("took %s", d)
	}
}

// A peer that never reads and never answers costs its callers their deadlines and no more.
func TestPeerThatDoesNotRead(t *testing.T) {
	a, _ := pair(t)
	c := New(a)
	defer c.Close()
	big := strings.Repeat("x", 1<<20)
	for range 3 {
		if err := c.Do(within(t, 20*time.Millisecond), "big", big, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("got %v", err)
		}
	}
}

func TestUnansweredCommandsAreBounded(t *testing.T) {
	heard := make(chan struct{})
	c := scripted(t, func(s *server) {
		for range maxPending {
			s.hear()
		}
		close(heard)
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range maxPending {
		wg.Go(func() { _ = c.Do(ctx, "hang", nil, nil) })
	}
	<-heard
	cancel()
	wg.Wait()
	if err := c.Do(within(t, time.Second), "more", nil, nil); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v, want a refusal", err)
	}
}

func TestHostilePeer(t *testing.T) {
	for name, line := range map[string]string{
		"garbage":        "\x00\xff\x1b[31m not json",
		"not an object":  `[1, 2, 3]`,
		"empty object":   `{}`,
		"unknown id":     `{"return": {}, "id": 4711}`,
		"foreign id":     `{"return": {}, "id": "x"}`,
		"negative id":    `{"return": {}, "id": -1}`,
		"greeting again": greeting,
		"loose error":    `{"error": {"class": "GenericError", "desc": "JSON parse error"}}`,
		"huge line":      `{"return": "` + strings.Repeat("a", 2*maxLine) + `", "id": 2}`,
		"deep nesting":   strings.Repeat(`{"a":`, maxLine/5-1) + "1",
	} {
		t.Run(name, func(t *testing.T) {
			c := scripted(t, func(s *server) { s.say("%s", line) })
			select {
			case <-c.Done():
			case <-time.After(5 * time.Second):
				t.Fatal("the session goes on")
			}
			if !errors.Is(c.Err(), ErrProtocol) {
				t.Fatalf("got %v", c.Err())
			}
		})
	}
}

func TestEndlessLine(t *testing.T) {
	c := scripted(t, func(s *server) {
		for {
			if _, err := s.conn.Write(make([]byte, 64<<10)); err != nil {
				return
			}
		}
	})
	select {
	case <-c.Done():
	case <-time.After(5 * time.Second):
		t.Fatal("the session goes on")
	}
}

func TestWrongAnswerType(t *testing.T) {
	c := scripted(t, func(s *server) { s.say(`{"return": [1], "id": %d}`, s.hear().ID) })
	var out struct{ Status string }
	if err := c.Do(within(t, 5*time.Second), "query-status", nil, &out); err == nil {
		t.Fatal("an array is not a status")
	}
}

func TestEvents(t *testing.T) {
	subscribed := make(chan struct{})
	c := scripted(t, func(s *server) {
		<-subscribed
		for i := range 3 * eventBuffer { // nobody reads "slow"
			s.say(`{"timestamp": {"seconds": 7, "microseconds": 5}, "event": "NOISE", "data": {"n": %d}}`, i)
		}
		s.say(`{"timestamp": {"seconds": 7, "microseconds": 5}, "event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}}`)
		s.conn.Close()
	})
	slow, picky, closed := c.Subscribe(), c.Subscribe("SHUTDOWN"), c.Subscribe()
	closed.Close()
	closed.Close()
	if _, ok := <-closed.C(); ok {
		t.Fatal("an event after Close")
	}
	close(subscribed)
	e := <-picky.C()
	if e.Name != "SHUTDOWN" || !strings.Contains(string(e.Data), "guest-reset") || !e.Time.Equal(time.Unix(7, 5000)) {
		t.Fatalf("got %+v", e)
	}
	if _, ok := <-picky.C(); ok {
		t.Fatal("the channel must be closed with the session")
	}
	if picky.Lost() != 0 || slow.Lost() != 2*eventBuffer+1 {
		t.Fatalf("lost %d and %d", picky.Lost(), slow.Lost())
	}
	if _, ok := <-c.Subscribe().C(); ok {
		t.Fatal("a subscription to a session that has ended must be closed")
	}
}

func TestPassDescriptors(t *testing.T) {
	got := make(chan string, 1)
	c := scripted(t, func(s *server) {
		buf, oob := make([]byte, 4096), make([]byte, 4096)
		n, oobn, _, _, err := s.conn.ReadMsgUnix(buf, oob)
		if err != nil {
			t.Error(err)
			return
		}
		var q command
		if err := json.Unmarshal(buf[:n], &q); err != nil {
			t.Error(err)
		}
		ms, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil || len(ms) != 1 {
			t.Errorf("%d control messages, %v", len(ms), err)
			return
		}
		fds, err := unix.ParseUnixRights(&ms[0])
		if err != nil || len(fds) != 1 {
			t.Errorf("%d descriptors, %v", len(fds), err)
			return
		}
		f := os.NewFile(uintptr(fds[0]), "received")
		defer f.Close()
		b := make([]byte, 5)
		_, _ = f.ReadAt(b, 0)
		got <- string(b)
		s.say(`{"return": {}, "id": %d}`, q.ID)
	})
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString("hello"); err != nil {
		t.Fatal(err)
	}
	if err := c.Do(within(t, 5*time.Second), "add-fd", nil, nil, f); err != nil {
		t.Fatal(err)
	}
	if s := <-got; s != "hello" {
		t.Fatalf("QEMU got %q", s)
	}
	f.Close()
	if err := c.Do(within(t, 5*time.Second), "add-fd", nil, nil, f); err == nil || c.Err() != nil {
		t.Fatalf("a closed file: %v; the session: %v", err, c.Err())
	}
}

// FuzzReceive feeds the client what a taken-over QEMU might say: it must neither panic nor hang.
func FuzzReceive(f *testing.F) {
	for _, s := range []string{
		greeting, `{"return": {}, "id": 1}`, `{"event": "STOP", "timestamp": {"seconds": 1e9}}`,
		`{"error": {"class": "x", "desc": "y"}, "id": 1}`, "\n\n{", `{"id":18446744073709551615}`, `{"QMP":null}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a, peer := pair(t)
		c := New(a)
		sub := c.Subscribe()
		go func() {
			_, _ = peer.Write(append(b, '\n'))
			_ = peer.CloseWrite()
			_, _ = io.Copy(io.Discard, peer)
		}()
		_ = c.Open(within(t, 5*time.Second))
		for range sub.C() {
		}
		if c.Err() == nil {
			t.Fatal("the session must have ended")
		}
		c.Close()
	})
}
