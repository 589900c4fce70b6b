package network

import (
	"crypto/sha256"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/vmm"
)

// published is a port of the host's that leads to a box.
const published = 18080

// TestGuests: two machines of the same MAC and IP address reach the internet, each for itself, and are reached from the host;
// they don't reach each other, nor anything else around them.
func TestGuests(t *testing.T) {
	nothingLeft(t)
	port := fmt.Sprintf("%d:%d", published, boxPort)
	a := newBox(t, "a", "-p", port, "-p", port+"/udp")
	b := newBox(t, "b")
	both := []*box{a, b}
	t.Run("the same card", func(t *testing.T) {
		const look = `cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu; tail -n +2 /proc/net/route; cat /etc/resolv.conf`
		card := a.sh(t, look)
		if other := b.sh(t, look); card != other || !strings.HasPrefix(card, vmm.MAC.String()+"\n1500\n") {
			t.Errorf("a has\n%s\nand b\n%s", card, other)
		}
		if a.place(t).Address == b.place(t).Address {
			t.Errorf("on the host both are %v", a.place(t).Address)
		}
	})
	t.Run("names", func(t *testing.T) {
		// The status 2 is that there is no such name. No name has an IPv6 address, which is known at once.
		const look = `
for n in server narrow; do getent ahostsv4 $n.test | sed -n "s/ *STREAM.*//p"; done
getent ahostsv6 server.test | grep -v ::ffff:
getent hosts nobody.test; echo $?`
		want := fmt.Sprintf("%s\n%s\n2", testhost.Server, testhost.Narrow)
		for _, x := range both {
			if got := x.sh(t, look); got != want {
				t.Errorf("%s gets %q, want %q", x.id, got, want)
			}
		}
	})
	t.Run("replies", func(t *testing.T) {
		for _, x := range both {
			got := x.sh(t, `ask server.test who; read -r line <&3; echo $line; exec 4<>/dev/udp/server.test/7001; echo datagram >&4; timeout 20 head -n 1 <&4`)
			if want := testhost.Uplink.String() + "\ndatagram"; got != want {
				t.Errorf("%s gets %q, want %q", x.id, got, want)
			}
		}
	})
	t.Run("much", func(t *testing.T) { much(t, a) })
	t.Run("errors", func(t *testing.T) {
		// Nobody listens there: by TCP the server says so, by UDP its ICMP error. Nothing leads to the other one, as the
		// router's says.
		got := a.sh(t, fmt.Sprintf(`
(exec 3<>/dev/tcp/%[1]s/9)
exec 3<>/dev/udp/%[1]s/9; echo x >&3; read -r -t 20 line <&3
(exec 3<>/dev/tcp/93.184.219.1/9)`, testhost.Server))
		if strings.Count(got, "Connection refused") < 2 || !strings.Contains(got, "unreachable") {
			t.Errorf("bash says %s", got)
		}
	})
	t.Run("path MTU", func(t *testing.T) {
		const size = 1 << 20
		got := a.sh(t, fmt.Sprintf(`ask %s "put %d"; head -c %[2]d /dev/zero >&3; read -r sum <&3; echo $sum; python3 -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect(("%[1]s", 9))
print(s.getsockopt(socket.IPPROTO_IP, 14)) # IP_MTU'`, testhost.Narrow, size))
		if want := fmt.Sprintf("%x\n%d", sha256.Sum256(make([]byte, size)), testhost.NarrowMTU); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
	t.Run("from the host", func(t *testing.T) {
		for _, x := range both {
			who := answers(t, netip.AddrPortFrom(x.place(t).Address, boxPort))
			if who != s.Config.Network.Gateway().String() {
				t.Errorf("%s hears %s", x.id, who)
			}
		}
	})
	t.Run("a published port", func(t *testing.T) {
		answers(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), published))
		if c, err := dial(t, "tcp4", netip.AddrPortFrom(testhost.Uplink, published)); err == nil {
			t.Errorf("it is at %v, too", c.RemoteAddr())
		}
	})
	t.Run("nothing else", func(t *testing.T) { walls(t, a, b) })
	t.Run("the uplink", func(t *testing.T) { uplink(t, a) })
}

// much sends a file in each direction, which large frames carry from end to end.
func much(t *testing.T, x *box) {
	size := int64(20 << 20)
	if os.Getenv("CUBE_TEST_LONG") != "" {
		size = 100 << 20
	}
	tap, up := device(t, x.place(t).Tap), device(t, testhost.UplinkDevice)
	atTap := sniff(t, s.Host.Namespace, tap.Attrs().Index, vmm.MAC)
	atUplink := sniff(t, s.Host.Namespace, up.Attrs().Index, up.Attrs().HardwareAddr)
	began := time.Now()
	if got := x.sh(t, fmt.Sprintf(`ask server.test "get %d"; head -c %[1]d <&3 | sha256sum`, size)); got != testhost.Digest(size)+"  -" {
		t.Errorf("digest %s, want %s", got, testhost.Digest(size))
	}
	t.Logf("%d MB to the guest in %v", size>>20, time.Since(began).Round(time.Millisecond))
	_, to := atTap.take()
	t.Log("to the guest: ", to)
	check(t, to, testhost.MTU, large)
	_, to = atUplink.take()
	to.others = 0 // where ARP is
	check(t, to, testhost.MTU, large)

	began = time.Now()
	zeros := sha256.New()
	for range size >> 20 {
		zeros.Write(make([]byte, 1<<20))
	}
	if got := x.sh(t, fmt.Sprintf(`ask server.test "put %d"; head -c %[1]d /dev/zero >&3; read -r sum <&3; echo $sum`, size)); got != fmt.Sprintf("%x", zeros.Sum(nil)) {
		t.Errorf("digest %s", got)
	}
	t.Logf("%d MB from the guest in %v", size>>20, time.Since(began).Round(time.Millisecond))
	from, _ := atTap.take()
	t.Log("from the guest: ", from)
	// How long they are is for the guest to say, by how fast it takes the way to be: two segments it always puts together.
	check(t, from, testhost.MTU, 3*testhost.MTU)
	longest := from.longest
	from, _ = atUplink.take()
	if from.longest != longest {
		t.Errorf("frames of %d bytes at the tap are %d at the uplink", longest, from.longest)
	}
	from.others = 0
	check(t, from, testhost.MTU, longest)
	if len(from.sources) != 1 || from.sources[testhost.Uplink] == 0 {
		t.Errorf("the wire has packets of %v", from.sources)
	}
}

// walls has a box try all that it must not reach, where somebody listens. The names are hosts'.
func walls(t *testing.T, x, other *box) {
	const port = 7777
	hear := func(what string, l net.Listener, err error) {
		t.Helper()
		must(t, err)
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				t.Errorf("%s is reached by %v", what, c.RemoteAddr())
				_ = c.Close()
			}
		}()
	}
	everywhere := fmt.Sprintf("0.0.0.0:%d", port)
	l, err := s.Host.Listen("tcp4", everywhere)
	hear("the host", l, err)
	l, err = s.Host.Neighbours.Listen("tcp4", everywhere)
	hear("a neighbour", l, err)
	l, err = s.Host.Router.Listen("tcp4", everywhere)
	hear("the router", l, err)

	before := drops(t, x)
	targets := []target{{"tcp", other.place(t).Address, boxPort}, {"udp", other.place(t).Address, boxPort}, {"tcp", x.place(t).Address, boxPort}}
	for _, a := range append([]netip.Addr{
		network.GuestGateway, s.Config.Network.Gateway(), testhost.Uplink, testhost.Router, netip.MustParseAddr("169.254.169.254"),
	}, testhost.Neighbours...) {
		targets = append(targets, target{"tcp", a, port})
	}
	if got := x.reaches(t, targets...); got != "" {
		t.Errorf("it reaches %s", got)
	}
	after := drops(t, x)
	if n := after[bpf.HardDeny].Packets - before[bpf.HardDeny].Packets; n < uint64(len(targets)) {
		t.Errorf("%d packets to %d places were counted as hard-denied: %v", n, len(targets), after)
	}
	// Nor is it reached by who knows the way to its address.
	must(t, s.Host.Neighbours.Do(func() error {
		return addRoute(s.Config.Network.Pool, testhost.Uplink)
	}))
	t.Cleanup(func() {
		must(t, s.Host.Neighbours.Do(func() error { return dropRoute(s.Config.Network.Pool) }))
	})
	must(t, s.Host.Neighbours.Do(func() error {
		for _, to := range []target{targets[0], targets[2]} {
			if c, err := net.DialTimeout("tcp4", netip.AddrPortFrom(to.address, to.port).String(), time.Second); err == nil {
				t.Errorf("a neighbour has reached %v", to)
				_ = c.Close()
			}
		}
		return nil
	}))
}

// drops is what was counted of a box's packets.
func drops(t *testing.T, x *box) bpf.Counters {
	t.Helper()
	c, err := onNetwork(func(n *network.Network) (bpf.Counters, error) { return n.Counters(t.Context(), x.place(t).Key) })
	must(t, err)
	return c
}
