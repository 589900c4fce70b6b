package ports_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/internal/testnet"
)

// TestLease: where the file has gone nothing is reached any more, though nobody has told the server.
func TestLease(t *testing.T) {
	f := serve(t, 1)
	l := listen(t, "127.0.1.1:80", echo("a: "))
	p, u := tcp("127.0.0.1", 8080, 80), udp("127.0.0.1", 8080, 80)
	testnet.Must(t, f.give("a", "127.0.1.1", p, u))
	open := dial(t, "127.0.0.1:8080", "a: ")
	first, err := net.ListenPacket("udp4", "127.0.1.1:80")
	testnet.Must(t, err)
	defer first.Close()
	client, err := net.Dial("udp4", "127.0.0.1:8080")
	testnet.Must(t, err)
	defer client.Close()
	b := make([]byte, 100)
	testnet.Must(t, first.SetDeadline(time.Now().Add(wait)))
	_, err = client.Write([]byte("to the first"))
	testnet.Must(t, err)
	if n, _, err := first.ReadFrom(b); err != nil || string(b[:n]) != "to the first" {
		t.Fatalf("%q, %v", b[:n], err)
	}

	f.take("a")
	testnet.Must(t, l.Close())
	testnet.Must(t, first.Close())
	// Its address is another's at once.
	var reached atomic.Int32
	listen(t, "127.0.1.1:80", func(c *net.TCPConn) {
		reached.Add(1)
	})
	second, err := net.ListenPacket("udp4", "127.0.1.1:80")
	testnet.Must(t, err)
	defer second.Close()
	for range 20 {
		_, _ = client.Write([]byte("to the second"))
		if c, err := net.Dial("tcp4", "127.0.0.1:8080"); err == nil {
			_, _ = io.Copy(io.Discard, c)
			c.Close()
		}
	}
	until(t, "the port is free", func() bool { return isFree("127.0.0.1:8080") })
	if _, err := io.Copy(io.Discard, open); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ends with %v", err)
	}
	testnet.Must(t, second.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	if n, _, err := second.ReadFrom(b); err == nil {
		t.Errorf("who has the address next gets %q", b[:n])
	}
	if n := reached.Load(); n > 0 {
		t.Errorf("who has the address next is reached %d times", n)
	}

	// And the port is the next one's, for whom the address was never the former's.
	listen(t, "127.0.1.2:80", echo("b: "))
	testnet.Must(t, f.give("b", "127.0.1.2", p))
	dial(t, "127.0.0.1:8080", "b: ").Close()
	f.take("b")
	listen(t, "127.0.1.3:80", echo("b again: "))
	testnet.Must(t, f.give("b", "127.0.1.3", p))
	dial(t, "127.0.0.1:8080", "b again: ").Close()
}

// TestConnections: there are so many at a time.
func TestConnections(t *testing.T) {
	f := serve(t, 1)
	listen(t, "127.0.1.1:80", echo("!"))
	testnet.Must(t, f.give("a", "127.0.1.1", tcp("127.0.0.1", 8080, 80)))
	var all []net.Conn
	for range 512 {
		all = append(all, dial(t, "127.0.0.1:8080", "!"))
	}
	refused := func() bool { return readAll("127.0.0.1:8080", 1) != nil }
	if !refused() {
		t.Error("one more connection is let in")
	}
	testnet.Must(t, all[7].Close())
	until(t, "a place is free", func() bool { return !refused() })
}

// TestClients: there are so many at a time, by UDP, and those who are silent are forgotten.
func TestClients(t *testing.T) {
	t.Run("so many", func(t *testing.T) {
		f := serve(t, 1)
		guest := listenUDP(t, f)
		first, err := net.Dial("udp4", "127.0.0.1:8080")
		testnet.Must(t, err)
		defer first.Close()
		exchange(t, first)
		knock(t)
		exchange(t, first) // all before have been looked at
		if n := guest.clients(); n < 2 || n > 256 {
			t.Errorf("the guest has %d clients", n)
		}
	})
	t.Run("and others when they are forgotten", func(t *testing.T) {
		f := serve(t, 200) // after 0.6 s
		listenUDP(t, f)
		knock(t)
		if got := ask(t, "127.0.0.1:8080", []byte("?")); got != "!" {
			t.Errorf("the answer is %q", got)
		}
	})
}

// udpGuest is a sandbox that answers, and remembers whom.
type udpGuest struct {
	mu   sync.Mutex
	seen map[string]bool
}

func (g *udpGuest) clients() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.seen)
}

func listenUDP(t *testing.T, f *fixture) *udpGuest {
	t.Helper()
	testnet.Must(t, f.give("a", "127.0.1.1", udp("127.0.0.1", 8080, 80)))
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 1, 1), Port: 80})
	testnet.Must(t, err)
	t.Cleanup(func() { c.Close() })
	g := &udpGuest{seen: map[string]bool{}}
	go func() {
		b := make([]byte, 100)
		for {
			_, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			g.mu.Lock()
			g.seen[from.String()] = true
			g.mu.Unlock()
			_, _ = c.WriteToUDPAddrPort([]byte("!"), from)
		}
	}()
	return g
}

// knock is 400 clients that ask once.
func knock(t *testing.T) {
	t.Helper()
	for range 400 {
		c, err := net.Dial("udp4", "127.0.0.1:8080")
		testnet.Must(t, err)
		_, err = c.Write([]byte("?"))
		testnet.Must(t, err)
		c.Close()
	}
}

// exchange asks until there is an answer, as datagrams may be lost.
func exchange(t *testing.T, c net.Conn) {
	t.Helper()
	for end := time.Now().Add(wait); time.Now().Before(end); {
		_, err := c.Write([]byte("?"))
		testnet.Must(t, err)
		testnet.Must(t, c.SetReadDeadline(time.Now().Add(wait/100)))
		if _, err := c.Read(make([]byte, 10)); err == nil {
			return
		} else if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
	}
	t.Fatal("a client isn't answered")
}

// TestEnds: each side's end and reset is the other's.
func TestEnds(t *testing.T) {
	f := serve(t, 1)
	ended := make(chan error, 1)
	listen(t, "127.0.1.1:80", func(c *net.TCPConn) {
		b, err := io.ReadAll(c)
		if err == nil {
			_, err = fmt.Fprintf(c, "%d bytes", len(b))
		}
		ended <- err
	})
	listen(t, "127.0.1.1:81", func(c *net.TCPConn) { _ = c.SetLinger(0) })
	testnet.Must(t, f.give("a", "127.0.1.1", tcp("127.0.0.1", 8080, 80), tcp("127.0.0.1", 8081, 81), tcp("127.0.0.1", 8082, 82)))
	c := dial(t, "127.0.0.1:8080", "")
	_, err := c.Write(make([]byte, 1000))
	testnet.Must(t, err)
	testnet.Must(t, c.CloseWrite())
	if b, err := io.ReadAll(c); err != nil || string(b) != "1000 bytes" {
		t.Errorf("%q, %v", b, err)
	}
	testnet.Must(t, <-ended)
	c = dial(t, "127.0.0.1:8080", "")
	testnet.Must(t, c.SetLinger(0))
	testnet.Must(t, c.Close())
	if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the guest sees %v", err)
	}
	for _, at := range []string{"127.0.0.1:8081", "127.0.0.1:8082"} { // nobody listens at the latter
		if err := readAll(at, 1<<20); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: the client sees %v", at, err)
		}
	}
}

// TestDevice: a sandbox's address that leads elsewhere isn't dialled there.
func TestDevice(t *testing.T) {
	f := serveBy(t, "veth-test0", 20)
	testnet.Must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "veth-test0"}, PeerName: "veth-test1"}))
	l, err := netlink.LinkByName("veth-test0")
	testnet.Must(t, err)
	defer func() { testnet.Must(t, netlink.LinkDel(l)) }()
	testnet.Must(t, netlink.LinkSetUp(l))
	var reached atomic.Int32
	listen(t, "127.0.1.1:80", func(*net.TCPConn) { reached.Add(1) })
	testnet.Must(t, f.give("a", "127.0.1.1", tcp("127.0.0.1", 8080, 80)))
	if err := readAll("127.0.0.1:8080", 1); !errors.Is(err, syscall.ECONNRESET) || reached.Load() > 0 {
		t.Errorf("connected: %v; reached %d times", err, reached.Load())
	}
}

// TestChanged: what can't be bound is, when it can.
func TestChanged(t *testing.T) {
	f := serve(t, 1)
	listen(t, "127.0.1.1:80", echo("a: "))
	if err := f.give("a", "127.0.1.1", tcp("10.9.8.7", 8080, 80)); err == nil {
		t.Error("an address that isn't there is bound")
	}
	lo, err := netlink.LinkByName("lo")
	testnet.Must(t, err)
	addr, err := netlink.ParseAddr("10.9.8.7/32")
	testnet.Must(t, err)
	testnet.Must(t, netlink.AddrAdd(lo, addr))
	defer func() { testnet.Must(t, netlink.AddrDel(lo, addr)) }()
	f.Changed()
	until(t, "the port is bound", func() bool {
		c, err := net.Dial("tcp4", "10.9.8.7:8080")
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	dial(t, "10.9.8.7:8080", "a: ").Close()
}

// TestTakenDown: the end of all leases is the server's, and the next one may begin.
func TestTakenDown(t *testing.T) {
	f := serve(t, 1)
	listen(t, "127.0.1.1:80", echo("a: "))
	testnet.Must(t, f.give("a", "127.0.1.1", tcp("127.0.0.1", 8080, 80)))
	dial(t, "127.0.0.1:8080", "a: ").Close()
	testnet.Must(t, os.RemoveAll(f.dir))
	err := <-f.ended
	if !errdefs.IsUnavailable(err) {
		t.Errorf("Run ends with %v", err)
	}
	if !isFree("127.0.0.1:8080") {
		t.Error("the port isn't free")
	}
	testnet.Must(t, os.Mkdir(f.dir, 0o700))
	f.has = map[string]target{}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { f.ended <- f.Run(ctx) }()
	testnet.Must(t, f.give("a", "127.0.1.1", tcp("127.0.0.1", 8080, 80)))
	dial(t, "127.0.0.1:8080", "a: ").Close()
	cancel()
	testnet.Must(t, <-f.ended)
	f.ended <- nil // for the fixture's end
}
