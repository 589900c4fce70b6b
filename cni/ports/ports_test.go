package ports_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/cni/ports"
	"github.com/cubesandbox/cube/internal/testnet"
)

// TestForward: what comes to the host's ports gets to the sandbox and back as it was, and what is cut is cut.
func TestForward(t *testing.T) {
	h := testnet.New(t)
	h.Daemon()
	a := start(t, h, "a", tcp("127.0.0.1", 8080, 80), tcp("0.0.0.0", 9090, 80), tcp("127.0.0.1", 8081, 81), udp("0.0.0.0", 5353, 53), udp("127.0.0.1", 5454, 53))
	b := start(t, h, "b", tcp("127.0.0.2", 8080, 80))
	testnet.Must(t, check(t.Context(), h, a))
	client := make(chan string, 1)
	a.serve(t, 80, echo("a: "))
	a.serve(t, 81, func(c *net.TCPConn) { client <- c.RemoteAddr().String() })
	a.serveUDP(t, 53, "a: ")
	b.serve(t, 80, echo("b: "))

	transfer(t, dial(t, "127.0.0.1:8080", "a: "), 8<<20)
	transfer(t, dial(t, "127.0.0.2:8080", "b: "), 1<<20)
	for _, at := range []string{"127.0.0.1:9090", "127.0.0.9:9090", "198.51.100.2:9090"} {
		dial(t, at, "a: ").Close()
	}
	if c, err := net.DialTimeout("tcp4", "198.51.100.2:8080", wait); err == nil {
		c.Close()
		t.Error("a port of one address is open at another one")
	}
	dial(t, "127.0.0.1:8081", "").Close()
	if from := <-client; !strings.HasPrefix(from, h.Config.Network.Gateway().String()+":") {
		t.Errorf("the guest sees %s", from)
	}

	for _, at := range []string{"127.0.0.1:5454", "127.0.0.1:5353", "127.0.0.9:5353", "198.51.100.2:5353"} {
		for _, message := range []string{"", "hello", strings.Repeat("x", 1400)} {
			if got := ask(t, at, []byte(message)); got != "a: "+message {
				t.Errorf("%s answers %q", at, got)
			}
		}
	}
	if got := ask(t, "127.0.0.1:5454", make([]byte, 60000)); got != "a: 60000 bytes" { // in many fragments
		t.Errorf("the answer is %q", got)
	}

	// Nobody listens there in the guest: connections end, and the port works when somebody does.
	c, err := net.DialTimeout("tcp4", "127.0.0.2:8080", wait)
	testnet.Must(t, err)
	testnet.Must(t, c.Close())

	open := dial(t, "127.0.0.1:9090", "a: ")
	other := dial(t, "127.0.0.2:8080", "b: ")
	a.stop(t, h)
	if n, err := io.Copy(io.Discard, open); err == nil {
		t.Errorf("a connection to what is closed ends in order, after %d bytes", n)
	}
	for _, p := range a.Ports {
		free(t, p)
	}
	transfer(t, other, 1000)
	b.stop(t, h)
	expectNone(t, h)
}

// TestRefusedPorts: what can't be had is refused by name, and leaves nothing.
func TestRefusedPorts(t *testing.T) {
	h := testnet.New(t)
	stop := h.Daemon()
	ctx := t.Context()
	a := start(t, h, "a", tcp("127.0.0.1", 8080, 80), tcp("0.0.0.0", 9090, 80), udp("127.0.0.1", 7070, 70))
	l, err := net.Listen("tcp4", "127.0.0.1:6060")
	testnet.Must(t, err)
	defer l.Close()
	many := make([]network.Port, 129)
	for i := range many {
		many[i] = tcp("127.0.0.1", uint16(20000+i), 80)
	}
	sctp := tcp("127.0.0.1", 1000, 80)
	sctp.Protocol = "sctp"
	for _, tc := range []struct {
		name  string
		ports []network.Port
		is    func(error) bool
		want  string
	}{
		{"another sandbox's", []network.Port{tcp("127.0.0.1", 1000, 80), tcp("127.0.0.1", 8080, 80)}, errdefs.IsAlreadyExists, "port 127.0.0.1:8080/tcp of the host is mapped to container default-a already"},
		{"another's, of all addresses", []network.Port{tcp("127.0.0.1", 9090, 80)}, errdefs.IsAlreadyExists, "default-a"},
		{"of all addresses, one another's", []network.Port{tcp("0.0.0.0", 8080, 80)}, errdefs.IsAlreadyExists, "default-a"},
		{"another's, by UDP", []network.Port{udp("0.0.0.0", 7070, 80)}, errdefs.IsAlreadyExists, "default-a"},
		{"another process's", []network.Port{udp("127.0.0.1", 1000, 80), tcp("127.0.0.1", 6060, 80)}, errdefs.IsConflict, "port 127.0.0.1:6060/tcp of the host is another process's"},
		{"of all, one another process's", []network.Port{tcp("0.0.0.0", 6060, 80)}, errdefs.IsConflict, "0.0.0.0:6060/tcp"},
		{"no address of the host's", []network.Port{tcp("198.51.100.3", 1000, 80)}, errdefs.IsInvalidArgument, "port 198.51.100.3:1000/tcp: the host has no such address"},
		{"twice", []network.Port{tcp("127.0.0.1", 1000, 80), tcp("0.0.0.0", 1000, 81)}, errdefs.IsInvalidArgument, "port mapping 2 (0.0.0.0:1000/tcp): mapping 1 (127.0.0.1:1000/tcp)"},
		{"SCTP", []network.Port{sctp}, errdefs.IsInvalidArgument, `protocol "sctp"`},
		{"no host port", []network.Port{tcp("127.0.0.1", 0, 80)}, errdefs.IsInvalidArgument, "between 1 and 65535"},
		{"no container port", []network.Port{tcp("127.0.0.1", 80, 0)}, errdefs.IsInvalidArgument, "between 1 and 65535"},
		{"no address", []network.Port{{HostPort: 1000, ContainerPort: 80, Protocol: ports.TCP}}, errdefs.IsInvalidArgument, "hostIP is missing"},
		{"IPv6", []network.Port{tcp("::1", 1000, 80)}, errdefs.IsInvalidArgument, "no IPv4 address"},
		{"multicast", []network.Port{udp("224.0.0.1", 1000, 80)}, errdefs.IsInvalidArgument, "no IPv4 address"},
		{"broadcast", []network.Port{udp("255.255.255.255", 1000, 80)}, errdefs.IsInvalidArgument, "no IPv4 address"},
		{"too many", many, errdefs.IsInvalidArgument, "at most 128"},
		{"the proxy's", []network.Port{tcp("0.0.0.0", h.Config.Network.ProxyPort, 80)}, errdefs.IsInvalidArgument, "network.proxy_port"},
		{"the forwarder's", []network.Port{udp("0.0.0.0", h.Config.Network.DNSPort, 80)}, errdefs.IsInvalidArgument, "network.dns_port"},
	} {
		_, err := h.Open(ctx, request("b", tc.ports...))
		if !tc.is(err) || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", tc.name, err)
		}
		if _, err := h.Get(ctx, "default-b"); !errdefs.IsNotFound(err) {
			t.Errorf("%s: left: %v", tc.name, err)
		}
	}
	if served, err := ports.List(ctx, h.Config.ControlSocket(), ""); err != nil || len(served) != 3 {
		t.Errorf("served %v, %v", served, err)
	}
	// What is another protocol's or address's is free, and what was another's is when that has it no more.
	b := start(t, h, "b", tcp("127.0.0.2", 8080, 80), udp("0.0.0.0", 8080, 80), tcp("127.0.0.1", 7070, 80))
	a.stop(t, h)
	c := start(t, h, "c", a.Ports...)
	c.serve(t, 80, echo("c: "))
	dial(t, "127.0.0.1:8080", "c: ").Close()

	// Without a daemon none is had, and what doesn't take it is done.
	stop(true)
	if _, err := h.Open(ctx, request("d", tcp("127.0.0.1", 1000, 80))); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "cube up") {
		t.Errorf("without a daemon: %v", err)
	}
	testnet.Must(t, check(ctx, h, c))
	if o, err := h.Overview(ctx); err != nil || !strings.Contains(fmt.Sprint(o.Findings), "cube up") {
		t.Errorf("overview %+v, %v", o, err)
	}
	b.stop(t, h)
	c.stop(t, h)
	start(t, h, "d").stop(t, h)
	expectNone(t, h)
}

// TestRestart: connections end with the daemon, ports are there again with the next one, and what it can't have is had when
// that changes.
func TestRestart(t *testing.T) {
	h := testnet.New(t)
	stop := h.Daemon()
	ctx := t.Context()
	a := start(t, h, "a", tcp("127.0.0.1", 8080, 80), tcp("127.0.0.1", 8081, 80))
	b := start(t, h, "b", tcp("127.0.0.1", 9090, 80), udp("127.0.0.1", 9090, 80))
	a.serve(t, 80, echo("a: "))
	b.serve(t, 80, echo("b: "))
	b.serveUDP(t, 80, "b: ")
	c := dial(t, "127.0.0.1:8080", "a: ")
	stop(true)
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a connection goes on without the daemon")
	}
	for _, p := range append(a.Ports, b.Ports...) {
		free(t, p)
	}
	taken, err := net.Listen("tcp4", "127.0.0.1:8080")
	testnet.Must(t, err)
	stop = h.Daemon()
	served, err := ports.List(ctx, h.Config.ControlSocket(), a.Key) // when all have been tried
	if err != nil || len(served) != 2 || !strings.Contains(served[0].Reason, "another process's") || served[1].Reason != "" {
		t.Errorf("served %+v, %v", served, err)
	}
	dial(t, "127.0.0.1:8081", "a: ").Close()
	dial(t, "127.0.0.1:9090", "b: ").Close()
	if got := ask(t, "127.0.0.1:9090", []byte("x")); got != "b: x" {
		t.Errorf("the answer is %q", got)
	}
	if err := check(ctx, h, a); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "127.0.0.1:8080/tcp") {
		t.Errorf("checked: %v", err)
	}
	testnet.Must(t, check(ctx, h, b))
	o, err := h.Overview(ctx)
	testnet.Must(t, err)
	if o.Ports != 4 || !strings.Contains(fmt.Sprint(o.Findings), "port 127.0.0.1:8080/tcp of the host doesn't lead to container default-a: ") {
		t.Errorf("overview %+v", o)
	}
	// The end of another sandbox is a change.
	testnet.Must(t, taken.Close())
	b.stop(t, h)
	for end := time.Now().Add(wait); check(ctx, h, a) != nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("checked: %v", check(ctx, h, a))
		}
	}
	dial(t, "127.0.0.1:8080", "a: ").Close()

	// What has been closed without a daemon isn't there with the next one.
	stop(false)
	a.stop(t, h)
	h.Daemon()
	expectNone(t, h)
	for _, p := range a.Ports {
		free(t, p)
	}
}

// TestManySandboxes: ports come and go with their sandboxes, and each leads to its own.
func TestManySandboxes(t *testing.T) {
	h := testnet.New(t)
	h.Daemon()
	for round := range 3 {
		var all []*sandbox
		for i := range 4 {
			id := fmt.Sprint("s", i)
			s := start(t, h, id, tcp("127.0.0.1", uint16(8000+(i+round)%4), 80))
			s.serve(t, 80, echo(id))
			all = append(all, s)
		}
		for i, s := range all {
			dial(t, fmt.Sprintf("127.0.0.1:%d", 8000+(i+round)%4), fmt.Sprint("s", i)).Close()
			testnet.Must(t, check(t.Context(), h, s))
		}
		for _, s := range all {
			s.stop(t, h)
		}
		expectNone(t, h)
	}
}
