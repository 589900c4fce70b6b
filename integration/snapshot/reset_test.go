package snapshot

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/stack"
	"github.com/cubesandbox/cube/integration/testhost"
)

// talkPort is where the test's server on the internet is.
const talkPort = 7200

// caller has two connections to the server: by one it says a line every now and then, by the other it waits to hear something.
// When either ends it says by what, and which it was.
const caller = `
import os, select, socket, sys, time
talks, waits = (socket.create_connection(("%s", %d)) for _ in "tw")
talks.sendall(b"talks\n")
waits.sendall(b"waits\n")
n, names = 0, {talks: "talks", waits: "waits"}
while names:
    ready, _, _ = select.select(list(names), [], [], 0.05)
    for c in ready:
        try: got = c.recv(100)
        except OSError as e: print(names.pop(c), type(e).__name__, flush=True)
        else:
            if not got: print(names.pop(c), "EOF", flush=True)
    n += 1
    if talks in names:
        try: talks.sendall(b"%%d\n" %% n)
        except OSError as e: print(names.pop(talks), type(e).__name__, flush=True)
print("calls again", flush=True)
socket.create_connection(("%s", %d)).sendall(b"again\n")
time.sleep(10000)
`

// served is what somebody has said to the server.
type served struct {
	name string
	from netip.Addr
	conn net.Conn
	line chan string // closed with the connection
}

// serve has the server on the internet tell of each connection.
func serve(t *testing.T) <-chan *served {
	t.Helper()
	l, err := s.Host.Internet.Listen("tcp4", netip.AddrPortFrom(testhost.Server, talkPort).String())
	must(t, err)
	t.Cleanup(func() { l.Close() })
	come := make(chan *served, 16)
	go func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			} else if err != nil {
				t.Errorf("accept: %v", err)
				return
			}
			go func() {
				r := bufio.NewScanner(c)
				r.Scan()
				v := &served{name: r.Text(), from: c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(), conn: c, line: make(chan string, 1<<16)}
				come <- v
				for r.Scan() {
					v.line <- r.Text()
				}
				close(v.line)
			}()
		}
	}()
	return come
}

func await[V any](t *testing.T, what string, from <-chan V) (v V) {
	t.Helper()
	select {
	case v, ok := <-from:
		if !ok {
			t.Fatalf("%s: it has ended", what)
		}
		return v
	case <-time.After(s.Config.Timeout(30 * time.Second)):
		t.Fatalf("%s: nothing", what)
		return v
	}
}

// TestConnections: the connections that a container has when it is saved are its own. Those of its clones have ended when they
// wake, also if they only wait, and nothing that the clones do reaches the server by them.
func TestConnections(t *testing.T) {
	store(t)
	come := serve(t)
	id := s.ID(t, "caller")
	at := fmt.Sprint(testhost.Server)
	cube(t, "run", "-d", "--name", id, stack.Image, "python3", "-u", "-c", fmt.Sprintf(caller, at, talkPort, at, talkPort))
	t.Cleanup(func() { cube(t, "rm", "-f", id) })
	open := map[string]*served{}
	for range 2 {
		v := await(t, "a connection", come)
		open[v.name] = v
	}
	talks := open["talks"]
	if talks == nil || open["waits"] == nil {
		t.Fatalf("%v have come", open)
	}
	next := 1
	hears := func(lines int) {
		t.Helper()
		for range lines {
			if n, err := strconv.Atoi(await(t, "the parent", talks.line)); err != nil || n != next {
				t.Fatalf("the parent says %d, %v instead of %d", n, err, next)
			}
			next++
		}
	}
	hears(5)

	began := time.Now()
	clones := strings.Fields(cube(t, "clone", "-n", "2", id))
	if len(clones) != 2 {
		t.Fatalf("clones %q", clones)
	}
	for _, clone := range clones {
		t.Cleanup(func() { cube(t, "rm", "-f", clone) })
	}
	for range clones {
		if v := await(t, "a clone's new connection", come); v.name != "again" {
			t.Errorf("a clone says %q", v.name)
		}
	}
	t.Logf("two clones made, and connected anew, in %v", time.Since(began).Round(time.Millisecond))
	for _, clone := range clones {
		var said []string
		s.Eventually(t, 20*time.Second, "what a clone says", func() bool {
			said = strings.Split(cube(t, "logs", clone), "\n")
			return len(said) >= 3
		})
		for _, line := range said[:2] {
			what, how, _ := strings.Cut(line, " ")
			if open[what] == nil || how != "ConnectionAbortedError" && how != "ConnectionResetError" {
				t.Errorf("%s has said %q", clone, line)
			}
		}
		if said[2] != "calls again" {
			t.Errorf("%s has said %q", clone, said)
		}
	}
	// The parent's go on, with its own lines and no other, also by the one that had nothing to say.
	hears(len(talks.line) + 20)
	_, err := open["waits"].conn.Write([]byte("x"))
	must(t, err)
	hears(20)
	if said := cube(t, "logs", id); said != "" {
		t.Errorf("the parent has said %q", said)
	}
}
