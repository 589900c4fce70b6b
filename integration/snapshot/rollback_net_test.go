package snapshot

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/oci"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/shim/spec"
)

// talker has a connection and a socket for datagrams, does with them what it is told by lines, and says what came of it. Its
// connection is one by which its kernel, too, sends something every second. At a port it sends back what comes.
const talker = `
import socket, sys, threading
def echo(c):
    while b := c.recv(4096):
        c.sendall(b)
def serve():
    while True:
        threading.Thread(target=echo, args=listener.accept()[:1], daemon=True).start()
listener = socket.create_server(("", 8080))
threading.Thread(target=serve, daemon=True).start()
c = u = None
for line in sys.stdin:
    what, *rest = line.split()
    try:
        if what == "open":
            c = socket.create_connection((rest[0], 7100), timeout=float(rest[1]))
            for option, value in (socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 100):
                c.setsockopt(socket.IPPROTO_TCP, option, value)
            c.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            said = "open"
        elif what == "say":
            c.settimeout(20)
            c.sendall(rest[0].encode())
            said = c.recv(4096).decode() or "the end"
        elif what == "ask":
            u = socket.socket(type=socket.SOCK_DGRAM)
            u.settimeout(20)
            u.connect((rest[0], 7100))
            u.send(b"hello")
            said = u.recv(4096).decode()
        elif what == "heard":
            u.setblocking(False)
            said = "nothing"
            try:
                while True:
                    said = u.recv(4096).decode()
            except BlockingIOError:
                pass
    except OSError as e:
        said = type(e).__name__
    print(said, flush=True)
`

// peer is a server on the internet, at port 7100: it sends back what comes by TCP, and answers a datagram with numbers
// for as long as it is let.
type peer struct {
	*testing.T
	conns chan net.Conn
	udp   net.PacketConn
}

const peerPort = 7100

func newPeer(t *testing.T) *peer {
	t.Helper()
	p := &peer{T: t, conns: make(chan net.Conn, 16)}
	l, err := s.Host.Internet.Listen("tcp4", fmt.Sprint(":", peerPort))
	must(t, err)
	t.Cleanup(func() { l.Close() })
	must(t, s.Host.Internet.Do(func() (err error) {
		p.udp, err = net.ListenPacket("udp4", netip.AddrPortFrom(testhost.Server, peerPort).String())
		return err
	}))
	t.Cleanup(func() { p.udp.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.conns <- c
		}
	}()
	return p
}

// accept returns the next connection.
func (p *peer) accept() net.Conn {
	p.Helper()
	select {
	case c := <-p.conns:
		p.Cleanup(func() { c.Close() })
		must(p, c.SetDeadline(time.Now().Add(s.Config.Timeout(time.Minute))))
		return c
	case <-time.After(s.Config.Timeout(30 * time.Second)):
		p.Fatal("nobody connects")
		return nil
	}
}

// echo sends back what comes, once.
func echo(c net.Conn) {
	b := make([]byte, 4096)
	if n, err := c.Read(b); err == nil {
		_, _ = c.Write(b[:n])
	}
}

// pour sends who has asked datagrams until it is stopped.
func (p *peer) pour() (stop func()) {
	p.Helper()
	_, to, err := p.udp.ReadFrom(make([]byte, 4096))
	must(p, err)
	_, err = p.udp.WriteTo([]byte("0"), to)
	must(p, err)
	ctx, cancel := context.WithCancel(context.Background())
	var pouring sync.WaitGroup
	pouring.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for i := 1; ctx.Err() == nil; i++ {
			_, _ = p.udp.WriteTo([]byte(strconv.Itoa(i)), to)
			<-tick.C
		}
	})
	stop = func() { cancel(); pouring.Wait() }
	p.Cleanup(stop)
	return stop
}

// does has a talker do something.
func (b *box) does(what string) string {
	b.Helper()
	_, err := io.WriteString(b.in, what+"\n")
	must(b, err)
	said := make(chan string, 1)
	go func() {
		line, err := b.out.ReadString('\n')
		if err != nil {
			line = err.Error()
		}
		said <- strings.TrimSpace(line)
	}()
	select {
	case line := <-said:
		return line
	case <-time.After(s.Config.Timeout(30 * time.Second)):
		b.Fatalf("%s doesn't do %q", b.id, what)
		return ""
	}
}

// expect has a talker do something of which that has to come.
func (b *box) expect(what, want string) {
	b.Helper()
	if got := b.does(what); got != want {
		b.Errorf("%s: %s: %q, want %q", b.id, what, got, want)
	}
}

// newTalker makes a container that reaches the server and nothing else, by a policy of its own.
func newTalker(t *testing.T, client *containerd.Client, ctx context.Context, name string, ports ...network.Port) *box {
	t.Helper()
	settings, err := json.Marshal(network.Settings{
		Policy: &policy.Policy{Rules: []policy.Rule{{Action: policy.Direct, To: testhost.Server.String()}}}, Ports: ports,
	})
	must(t, err)
	return newBox(t, client, ctx, name, oci.WithProcessArgs("python3", "-c", talker), oci.WithAnnotations(map[string]string{spec.NetworkKey: string(settings)}))
}

// place is its place in the network.
func (b *box) place(ctx context.Context) (a *network.Attachment) {
	b.Helper()
	must(b, s.Host.Do(func() (err error) {
		a, err = network.New(s.Config).Get(ctx, s.Config.Containerd.Namespace+"-"+b.id)
		return err
	}))
	return a
}

// TestRollbackNetwork: what was open in the life before is at an end for all who had it, nothing of it gets to the other one, and
// everything begins anew at once, by the same policy, address and ports.
func TestRollbackNetwork(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	p := newPeer(t)
	published := network.Port{HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 7200, ContainerPort: 8080, Protocol: "tcp"}
	b := newTalker(t, client, ctx, "talker", published).run(ctx, "")
	visit := func() net.Conn {
		t.Helper()
		var c net.Conn
		must(t, s.Host.Do(func() (err error) { c, err = net.Dial("tcp4", "127.0.0.1:7200"); return err }))
		t.Cleanup(func() { c.Close() })
		must(t, c.SetDeadline(time.Now().Add(s.Config.Timeout(time.Minute))))
		_, err := io.WriteString(c, "visitor\n")
		must(t, err)
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != "visitor\n" {
			t.Fatalf("the port of the host answers %q, %v", line, err)
		}
		return c
	}
	open := fmt.Sprintf("open %s 20", testhost.Server)
	b.expect(open, "open")
	server := p.accept()
	go echo(server)
	b.expect("say one", "one")
	var stop func()
	poured := make(chan struct{})
	go func() { defer close(poured); stop = p.pour() }()
	b.expect(fmt.Sprintf("ask %s", testhost.Server), "0")
	<-poured
	visitor := visit()
	shim := b.shim(ctx)
	name, err := shim.Save(ctx, "", "")
	must(t, err)
	before := b.place(ctx)
	go echo(server)
	b.expect("say two", "two") // what both ends know of the connection is more than what was saved
	heard := func() (n int) {
		t.Helper()
		if last := b.does("heard"); last != "nothing" {
			n, err = strconv.Atoi(last)
			must(t, err)
		}
		return n
	}
	known := heard() // as much as was in its memory when it was saved, or more
	s.Eventually(t, 30*time.Second, "datagrams after those", func() bool { return heard() > known })

	_, err = shim.Rollback(ctx, name)
	must(t, err)
	began := time.Now()
	b.expect("say three", "ConnectionAbortedError")
	if took := time.Since(began); took > s.Config.Timeout(5*time.Second) {
		t.Errorf("it hears of the connection's end after %v", took)
	}
	if _, err := visitor.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the port's connection: %v", err)
	}
	_, err = io.WriteString(server, "is anybody there?")
	must(t, err)
	if _, err := server.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the server's end of the connection: %v", err)
	}
	// What was in the guest's memory may be heard, once, and nothing that came after.
	if n := heard(); n > known {
		t.Errorf("it hears %d, the one before had heard %d", n, known)
	}
	b.expect("heard", "nothing")
	stop()

	b.expect(open, "open")
	server = p.accept()
	go echo(server)
	b.expect("say four", "four")
	visit()
	go func() { stop = p.pour(); stop() }()
	if got := b.does(fmt.Sprintf("ask %s", testhost.Server)); got != "0" {
		t.Errorf("datagrams: %q", got)
	}
	b.expect(fmt.Sprintf("open %s 1", testhost.Narrow), "TimeoutError")
	after := b.place(ctx)
	if after.Tap != before.Tap || after.Address != before.Address || len(after.Ports) != 1 || after.Ports[0] != published {
		t.Errorf("place %+v, before %+v", after, before)
	}
	b.end(ctx)
}

// TestFailedRollbackNetwork: the machine that goes on after all has its connections.
func TestFailedRollbackNetwork(t *testing.T) {
	st := store(t)
	client, ctx := connect(t)
	p := newPeer(t)
	b := newTalker(t, client, ctx, "stays").run(ctx, "")
	b.expect(fmt.Sprintf("open %s 20", testhost.Server), "open")
	server := p.accept()
	shim := b.shim(ctx)
	name, err := shim.Save(ctx, "", "")
	must(t, err)
	info, err := st.Inspect(name)
	must(t, err)
	must(t, os.Truncate(s.Config.SnapshotDir()+"/"+info.ID+"/state", 100))
	if _, err := shim.Rollback(ctx, name); err == nil {
		t.Error("rolled back to a snapshot that is damaged")
	}
	go echo(server)
	b.expect("say still", "still")
	_, err = st.Delete(name)
	must(t, err)
	b.end(ctx)
}

// TestCloneNetwork: the connection that was saved is the one's that goes on, and not a clone's. Of that nothing of it is seen on
// the wire, which its kernel tries to send by it all the time.
func TestCloneNetwork(t *testing.T) {
	store(t)
	client, ctx := connect(t)
	p := newPeer(t)
	strange := sniffStrangers(t)
	b := newTalker(t, client, ctx, "origin").run(ctx, "")
	b.expect(fmt.Sprintf("open %s 20", testhost.Server), "open")
	server := p.accept()
	dir := b.checkpoint(ctx, client)
	clone := newTalker(t, client, ctx, "clone").run(ctx, dir)
	clone.expect("say mine", "ConnectionAbortedError")
	go echo(server)
	b.expect("say parent", "parent")
	if a, o := clone.place(ctx), b.place(ctx); a.Address == o.Address || a.Tap == o.Tap {
		t.Errorf("places %+v and %+v", a, o)
	}
	clone.expect(fmt.Sprintf("open %s 20", testhost.Server), "open")
	go echo(p.accept())
	clone.expect("say own", "own")
	for _, seg := range strange() {
		t.Errorf("on the wire: %s", seg)
	}
	clone.end(ctx)
	b.end(ctx)
}

// sniffStrangers looks at what comes to the server: segments to the peer of connections of which it has not seen the beginning.
func sniffStrangers(t *testing.T) (strangers func() []string) {
	t.Helper()
	var f *os.File
	must(t, s.Host.Internet.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_IP))))
		if err != nil {
			return err
		}
		f = os.NewFile(uintptr(fd), "packets")
		return nil
	}))
	t.Cleanup(func() { f.Close() })
	var mu sync.Mutex
	var list []string
	known := map[uint16]bool{}
	go func() {
		b := make([]byte, 128<<10)
		for {
			n, err := f.Read(b)
			if err != nil {
				return
			}
			const ip, tcp = 20, 20
			if n < ip+tcp || b[9] != unix.IPPROTO_TCP || binary.BigEndian.Uint16(b[ip+2:]) != peerPort {
				continue
			}
			const syn = 2
			port := binary.BigEndian.Uint16(b[ip:])
			mu.Lock()
			if b[ip+13]&syn != 0 {
				known[port] = true
			} else if !known[port] {
				list = append(list, fmt.Sprintf("a segment from port %d, flags %#x", port, b[ip+13]))
			}
			mu.Unlock()
		}
	}()
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		if len(known) == 0 {
			t.Error("the sniffer has seen nothing")
		}
		return list
	}
}
