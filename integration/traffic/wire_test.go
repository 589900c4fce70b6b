package traffic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/testhost"
)

// packet is what a watch judges by.
type packet struct {
	kind         uint16 // EtherType
	proto        uint8
	source, dest netip.AddrPort // without ports where there are none
}

func (p packet) String() string {
	if p.kind != unix.ETH_P_IP {
		return fmt.Sprintf("EtherType %04x", p.kind)
	}
	return fmt.Sprintf("protocol %d from %v to %v", p.proto, p.source, p.dest)
}

// watch sees all that a device sends, or all that it gets, and remembers what isn't allowed.
type watch struct {
	name    string
	f       *os.File
	allowed func(packet) bool

	mu    sync.Mutex
	seen  int
	wrong map[string]int
}

// watchDevice watches until the test ends. sent is for what the host sends to the device, or else for what comes from it.
func watchDevice(t *testing.T, name string, in *testhost.Namespace, device int, sent bool, allowed func(packet) bool) *watch {
	t.Helper()
	w := &watch{name: name, allowed: allowed, wrong: map[string]int{}}
	all := binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})
	must(t, in.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(all))
		if err != nil {
			return err
		}
		w.f = os.NewFile(uintptr(fd), "packets")
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: device})
	}))
	ended := make(chan struct{})
	t.Cleanup(func() {
		_ = w.f.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		if err := w.run(sent); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}()
	return w
}

// run ends without an error when the socket is closed.
func (w *watch) run(sent bool) error {
	conn, err := w.f.SyscallConn()
	if err != nil {
		return err
	}
	b := make([]byte, 128<<10)
	for {
		var n int
		var from unix.Sockaddr
		var err error
		if e := conn.Read(func(fd uintptr) bool {
			n, from, err = unix.Recvfrom(int(fd), b, 0)
			return !errors.Is(err, unix.EAGAIN)
		}); e != nil {
			return nil
		}
		if err != nil {
			return err
		}
		if l, ok := from.(*unix.SockaddrLinklayer); ok && (l.Pkttype == unix.PACKET_OUTGOING) == sent {
			w.note(read(b[:n]))
		}
	}
}

func (w *watch) note(p packet) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen++
	if !w.allowed(p) {
		w.wrong[p.String()]++
	}
}

// read takes a frame apart.
func read(f []byte) (p packet) {
	const ethernet, ipv4 = 14, 20
	if len(f) < ethernet {
		return p
	}
	if p.kind = binary.BigEndian.Uint16(f[12:]); p.kind != unix.ETH_P_IP || len(f) < ethernet+ipv4 {
		return p
	}
	ip := f[ethernet:]
	p.proto = ip[9]
	var ports [2]uint16
	if l4 := int(ip[0]&15) * 4; (p.proto == unix.IPPROTO_TCP || p.proto == unix.IPPROTO_UDP) && len(ip) >= l4+4 {
		ports[0], ports[1] = binary.BigEndian.Uint16(ip[l4:]), binary.BigEndian.Uint16(ip[l4+2:])
	}
	p.source = netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[12:])), ports[0])
	p.dest = netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[16:])), ports[1])
	return p
}

// look fails the test for what wasn't allowed, and for a watch that has seen nothing.
func (w *watch) look(t *testing.T, when string) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for p, n := range w.wrong {
		t.Errorf("%s: %s: %d times %s", when, w.name, n, p)
	}
	if w.seen == 0 {
		t.Errorf("%s: %s: nothing was seen at all", when, w.name)
	}
	w.seen, w.wrong = 0, map[string]int{}
}

// allowedOut is what may be on the wire: a talk and datagrams, of the host's address.
func allowedOut(p packet) bool {
	return p.kind == unix.ETH_P_ARP || p.source.Addr() == testhost.Uplink &&
		(p.proto == unix.IPPROTO_TCP && p.dest == netip.AddrPortFrom(testhost.Server, talkPort) ||
			p.proto == unix.IPPROTO_UDP && p.dest == netip.AddrPortFrom(testhost.Server, testhost.EchoPort))
}

// allowedIn is what a box may get: what it has asked for, and what the host has.
func allowedIn(p packet) bool {
	switch {
	case p.kind == unix.ETH_P_ARP:
		return true
	case p.proto == unix.IPPROTO_TCP:
		return p.source == netip.AddrPortFrom(testhost.Server, talkPort) || p.source.Addr() == s.Config.Network.Gateway() && p.dest.Port() == boxPort
	}
	return p.proto == unix.IPPROTO_UDP && p.source == netip.AddrPortFrom(testhost.Server, testhost.EchoPort)
}
