package network

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/integration/stack"
)

// patience is for what happens.
const patience = 30 * time.Second

// box is a container of the stack's, whose process answers at a port.
type box struct{ id string }

// boxPort is where a box sends back what it gets, line by line by TCP, whole by UDP, after it has said who it hears.
const boxPort = 8080

// answering is the process of a box.
const answering = `
import socket, threading
def tcp(c, who):
    f = c.makefile("rwb", 0)
    f.write((who[0] + "\n").encode())
    for line in f:
        f.write(line)
def udp():
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    u.bind(("", 8080))
    while True:
        b, who = u.recvfrom(65536)
        u.sendto(b, who)
threading.Thread(target=udp, daemon=True).start()
s = socket.create_server(("", 8080))
while True:
    threading.Thread(target=tcp, args=s.accept(), daemon=True).start()
`

// newBox runs one with flags of cube run.
func newBox(t *testing.T, name string, flags ...string) *box {
	t.Helper()
	b := &box{id: s.ID(t, name)}
	args := append([]string{"run", "-d", "--name", b.id}, flags...)
	cube(t, append(args, stack.Image, "python3", "-c", answering)...)
	t.Cleanup(func() { cube(t, "rm", "-f", b.id) })
	return b
}

// cube runs cube, which must succeed.
func cube(t *testing.T, args ...string) string {
	t.Helper()
	r := s.Cube(args...)
	if r.Err != nil {
		t.Fatalf("cube %s: %v", strings.Join(args, " "), r.Err)
	}
	return r.Stdout
}

// sh is what a shell in the box prints, whatever becomes of it. In the shell, ask SERVER REQUEST has the test's server
// answer, and its connection is descriptor 3.
func (b *box) sh(t *testing.T, script string) string {
	t.Helper()
	const ask = `exec 2>&1; ask() { exec 3<>/dev/tcp/$1/7000 && echo "$2" >&3; }; `
	return strings.TrimSpace(s.Cube("exec", b.id, "bash", "-c", ask+script).Stdout)
}

// target is where a box tries to connect to, with tcp or udp.
type target struct {
	protocol string
	address  netip.Addr
	port     uint16
}

func (to target) String() string { return fmt.Sprintf("%s:%d/%s", to.address, to.port, to.protocol) }

// reachAll connects to many at once, and tells who has answered after a while, in their order.
const reachAll = `
import select, socket, time
waiting, reached, end = {}, [], time.monotonic() + 3
for protocol, *to in targets:
    s = socket.socket(type=socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM)
    s.setblocking(False)
    s.connect_ex(tuple(to))
    if protocol == "udp":
        s.send(b"hello")
    waiting[s] = protocol, *to
while waiting and time.monotonic() < end:
    tcp = [s for s in waiting if waiting[s][0] == "tcp"]
    ready = select.select([s for s in waiting if s not in tcp], tcp, [], max(0, end - time.monotonic()))
    for s in ready[0] + ready[1]:
        to = waiting.pop(s)
        if s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            reached.append(to)
print(*["%s:%d/%s" % (to[1], to[2], to[0]) for to in targets if to in reached])`

// reaches tells which of the targets it reaches.
func (b *box) reaches(t *testing.T, targets ...target) string {
	t.Helper()
	var list strings.Builder
	for _, to := range targets {
		fmt.Fprintf(&list, "(%q, %q, %d), ", to.protocol, to.address, to.port)
	}
	return b.sh(t, "python3 -c 'targets = ["+list.String()+"]"+reachAll+"'")
}

// nothingLeft checks at the end of a test that no container has left anything.
func nothingLeft(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		s.Eventually(t, patience, "nothing left", func() bool { return len(s.VMLeaks()) == 0 })
	})
}

// place is the box's in the network.
func (b *box) place(t *testing.T) *network.Attachment {
	t.Helper()
	a, err := onNetwork(func(n *network.Network) (*network.Attachment, error) { return n.Find(t.Context(), "default", b.id) })
	must(t, err)
	return a
}

// onNetwork calls f with the stack's network.
func onNetwork[T any](f func(*network.Network) (T, error)) (v T, err error) {
	err = s.Host.Do(func() (err error) {
		v, err = f(network.New(s.Config))
		return err
	})
	return v, err
}

// dial connects from the host.
func dial(t *testing.T, proto string, to netip.AddrPort) (net.Conn, error) {
	t.Helper()
	var c net.Conn
	err := s.Host.Do(func() (err error) {
		c, err = net.DialTimeout(proto, to.String(), s.Config.Timeout(patience))
		return err
	})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = c.Close() })
	must(t, c.SetDeadline(time.Now().Add(s.Config.Timeout(patience))))
	return c, nil
}

// answers checks that a box answers at an address of the host's network, and returns who it thinks that asks. A box that
// has only just been started may not listen yet.
func answers(t *testing.T, to netip.AddrPort) (who string) {
	t.Helper()
	s.Eventually(t, patience, "an answer from "+to.String(), func() bool {
		c, err := dial(t, "tcp4", to)
		if err != nil {
			return false
		}
		in := bufio.NewReader(c)
		if who, err = in.ReadString('\n'); err != nil {
			return false // the host's forwarder has taken it, and nobody was there
		}
		if got, err := echo(c, in, "hello\n"); err != nil || got != "hello\n" {
			t.Errorf("%v answers %q, %v", to, got, err)
		}
		return true
	})
	c, err := dial(t, "udp4", to)
	must(t, err)
	if got, err := echo(c, bufio.NewReader(c), "hello\n"); err != nil || got != "hello\n" {
		t.Errorf("%v answers %q by UDP, %v", to, got, err)
	}
	return strings.TrimSpace(who)
}

func echo(c io.Writer, in *bufio.Reader, line string) (string, error) {
	if _, err := io.WriteString(c, line); err != nil {
		return "", err
	}
	return in.ReadString('\n')
}

// conversation is a box's connection to the test's server, which sends back what it gets.
type conversation struct {
	in    io.WriteCloser
	lines chan string // closed at the end
}

// converse opens one. It ends with the test.
func (b *box) converse(t *testing.T, server netip.Addr) *conversation {
	t.Helper()
	cmd := s.Command("cube", "exec", "-i", b.id, "bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/7000 && { cat <&0 >&3 & exec cat <&3; }", server))
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	cmd.Stderr = os.Stderr
	must(t, cmd.Start())
	c := &conversation{in: in, lines: make(chan string, 16)}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(func() {
		cancel()
		_ = in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	go func() {
		defer close(c.lines)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			select {
			case c.lines <- lines.Text():
			case <-ctx.Done():
				return
			}
		}
	}()
	return c
}

func (c *conversation) say(t *testing.T, word string) {
	t.Helper()
	_, err := fmt.Fprintln(c.in, word)
	must(t, err)
}

// hears waits for a word.
func (c *conversation) hears(t *testing.T, word string) {
	t.Helper()
	select {
	case got, ok := <-c.lines:
		if got != word || !ok {
			t.Fatalf("the server answers %q (%v), want %q", got, ok, word)
		}
	case <-time.After(s.Config.Timeout(patience)):
		t.Fatalf("no answer to %q", word)
	}
}

// silent is long enough for an answer, and short enough for a connection to go on soon after.
const silent = 1500 * time.Millisecond

// hearsNothing sees that no answer comes.
func (c *conversation) hearsNothing(t *testing.T) {
	t.Helper()
	select {
	case got, ok := <-c.lines:
		t.Fatalf("the server answers %q (%v), want nothing", got, ok)
	case <-time.After(silent):
	}
}

// device is one of the host's.
func device(t *testing.T, name string) netlink.Link {
	t.Helper()
	var l netlink.Link
	must(t, s.Host.Do(func() (err error) {
		l, err = netlink.LinkByName(name)
		return err
	}))
	return l
}
