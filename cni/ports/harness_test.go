package ports_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/cni/ports"
	"github.com/cubesandbox/cube/internal/testnet"
)

// wait bounds what happens.
const wait = time.Minute

func TestMain(m *testing.M) {
	if testnet.IsDaemon() {
		return
	}
	os.Exit(testnet.Main(m))
}

// sandbox is one that is open, with a guest.
type sandbox struct {
	*network.Attachment
	pod   network.Pod
	guest *testnet.Guest
	off   func() // switches the guest off
}

func pod(id string) network.Pod { return network.Pod{Namespace: "default", ID: id} }

// request is for the pod of that id. Ports are the only way to reach it or for it to reach anything.
func request(id string, all ...network.Port) network.Request {
	return network.Request{ID: "default-" + id, Network: "cube", IfName: "eth0", Policy: &policy.Policy{Default: policy.Deny}, Ports: all}
}

func start(t *testing.T, h *testnet.Host, id string, all ...network.Port) *sandbox {
	t.Helper()
	s := &sandbox{pod: pod(id)}
	_, err := h.Claim(t.Context(), s.pod)
	testnet.Must(t, err)
	s.Attachment, err = h.Open(t.Context(), request(id, all...))
	testnet.Must(t, err)
	s.guest, s.off = h.Guest(s.pod)
	return s
}

// stop ends a sandbox as its runtime and its shim do.
func (s *sandbox) stop(t *testing.T, h *testnet.Host) {
	t.Helper()
	testnet.Must(t, h.Close(t.Context(), s.Key, s.Network, s.IfName))
	s.off()
	testnet.Must(t, h.Release(t.Context(), s.pod))
}

// serve has the guest answer each connection to a port.
func (s *sandbox) serve(t *testing.T, port uint16, answer func(*net.TCPConn)) {
	t.Helper()
	s.guest.Do(t, func() error {
		l, err := net.Listen("tcp4", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					_ = c.SetDeadline(time.Now().Add(wait))
					answer(c.(*net.TCPConn))
				}()
			}
		}()
		return nil
	})
}

// echo sends back what comes, and says so first.
func echo(word string) func(*net.TCPConn) {
	return func(c *net.TCPConn) {
		_, _ = io.WriteString(c, word)
		_, _ = io.Copy(c, c)
	}
}

// serveUDP has the guest send datagrams back with a word before them, and with it alone to those that are too long.
func (s *sandbox) serveUDP(t *testing.T, port uint16, word string) {
	t.Helper()
	s.guest.Do(t, func() error {
		c, err := net.ListenUDP("udp4", &net.UDPAddr{Port: int(port)})
		if err != nil {
			return err
		}
		t.Cleanup(func() { c.Close() })
		go func() {
			b := make([]byte, 1<<16)
			for {
				n, from, err := c.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				answer := append([]byte(word), b[:n]...)
				if n > 1400 {
					answer = fmt.Appendf(nil, "%s%d bytes", word, n)
				}
				_, _ = c.WriteToUDPAddrPort(answer, from)
			}
		}()
		return nil
	})
}

// dial connects to a port of the host's and reads what the guest says first.
func dial(t *testing.T, at, word string) *net.TCPConn {
	t.Helper()
	d := net.Dialer{Timeout: wait}
	c, err := d.Dial("tcp4", at)
	testnet.Must(t, err)
	t.Cleanup(func() { c.Close() })
	testnet.Must(t, c.SetDeadline(time.Now().Add(wait)))
	b := make([]byte, len(word))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != word {
		t.Fatalf("%s says %q, %v; not %q", at, b, err, word)
	}
	return c.(*net.TCPConn)
}

// ask sends a datagram to a port of the host's until there is an answer, from that very address.
func ask(t *testing.T, at string, message []byte) string {
	t.Helper()
	c, err := net.Dial("udp4", at)
	testnet.Must(t, err)
	defer c.Close()
	b := make([]byte, 1<<16)
	for end := time.Now().Add(wait); time.Now().Before(end); {
		if _, err := c.Write(message); err != nil {
			t.Fatal(err)
		}
		testnet.Must(t, c.SetReadDeadline(time.Now().Add(wait/100)))
		if n, err := c.Read(b); err == nil {
			return string(b[:n])
		} else if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%s: %v", at, err)
		}
	}
	t.Fatalf("%s doesn't answer", at)
	return ""
}

// transfer sends bytes and then that they have ended, and compares what comes back.
func transfer(t *testing.T, c *net.TCPConn, size int64) {
	t.Helper()
	sent, sending := sha256.New(), make(chan error, 1)
	go func() {
		_, err := io.CopyN(io.MultiWriter(c, sent), rand.Reader, size)
		sending <- errors.Join(err, c.CloseWrite())
	}()
	got := sha256.New()
	n, err := io.Copy(got, c)
	if serr := <-sending; err != nil || serr != nil || n != size || string(got.Sum(nil)) != string(sent.Sum(nil)) {
		t.Errorf("%d bytes sent, %d came back: %v, %v", size, n, serr, err)
	}
}

// free expects that nobody listens at a port of the host's.
func free(t *testing.T, p network.Port) {
	t.Helper()
	at := netip.AddrPortFrom(p.HostIP, p.HostPort).String()
	var c io.Closer
	var err error
	if p.Protocol == ports.TCP {
		c, err = net.Listen("tcp4", at)
	} else {
		c, err = net.ListenPacket("udp4", at)
	}
	if err != nil {
		t.Errorf("port %s isn't free: %v", p, err)
		return
	}
	c.Close()
}

// expectNone expects that nothing is open or written down.
func expectNone(t *testing.T, h *testnet.Host) {
	t.Helper()
	for _, dir := range []string{"addresses", "ports", "attachments"} {
		left, err := os.ReadDir(h.Path(dir))
		testnet.Must(t, err)
		for _, e := range left {
			t.Errorf("left: %s/%s", dir, e.Name())
		}
	}
	served, err := ports.List(t.Context(), h.Config.ControlSocket(), "")
	if err == nil && len(served) > 0 {
		t.Errorf("served: %v", served)
	}
}

func tcp(at string, port, to uint16) network.Port {
	return network.Port{HostIP: netip.MustParseAddr(at), HostPort: port, ContainerPort: to, Protocol: ports.TCP}
}

func udp(at string, port, to uint16) network.Port {
	p := tcp(at, port, to)
	p.Protocol = ports.UDP
	return p
}

func check(ctx context.Context, h *testnet.Host, s *sandbox) error {
	return h.Check(ctx, s.Key, s.Network, s.IfName, []netip.Addr{s.Address})
}
