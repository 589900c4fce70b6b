package bypass

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
)

// eye is where frames are seen: a descriptor that never blocks.
type eye struct {
	name string
	fd   int
	skip int  // bytes before the frame
	ip   bool // it sees packets without Ethernet's header
}

// watch opens the eyes: on the wire, at the container, at the other sandbox and at the attacker's own tap, and at all that
// is delivered to the host itself, whatever listens there.
func (w *world) watch() {
	w.in(w.outside, func() { w.wire = w.packets("wire") })
	w.in(w.beside, func() { w.packets("box") })
	for _, proto := range []int{unix.IPPROTO_ICMP, unix.IPPROTO_IGMP, unix.IPPROTO_IPIP, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_IPV6, unix.IPPROTO_GRE, unix.IPPROTO_ESP, unix.IPPROTO_SCTP} {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto)
		must(w.t, err)
		w.eye(&eye{name: "host", fd: fd, ip: true}, true)
	}
	w.eye(&eye{name: "b", fd: w.b.tap, skip: vnetLen}, false)
	w.eye(&eye{name: "a", fd: w.a.tap, skip: vnetLen}, false)
}

func (w *world) eye(e *eye, own bool) *eye {
	w.eyes = append(w.eyes, e)
	if own {
		w.t.Cleanup(func() { _ = unix.Close(e.fd) })
		must(w.t, unix.SetsockoptInt(e.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20))
	}
	return e
}

// packets sees all that comes into the thread's namespace.
func (w *world) packets(name string) *eye {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})))
	must(w.t, err)
	return w.eye(&eye{name: name, fd: fd}, true)
}

// see returns the frames that came since.
func (w *world) see(e *eye) (frames [][]byte) {
	for b := make([]byte, 1<<17); ; {
		var n int
		var err error
		if e.skip > 0 {
			n, err = unix.Read(e.fd, b)
		} else {
			var from unix.Sockaddr
			n, from, err = unix.Recvfrom(e.fd, b, 0)
			if ll, is := from.(*unix.SockaddrLinklayer); is && (ll.Pkttype == unix.PACKET_OUTGOING || ll.Ifindex == 1) {
				continue
			}
		}
		if errors.Is(err, unix.EAGAIN) {
			return frames
		}
		must(w.t, err)
		f := b[e.skip:n]
		if e.ip {
			f = fromGuest(f)
		}
		frames = append(frames, slices.Clone(f))
	}
}

// barrierPort is what barriers go to, and nothing listens at.
const barrierPort = 1

// isBarrier tells of a barrier's segment or its answer.
func isBarrier(f []byte) bool {
	if len(f) < l4+20 || f[12] != 8 || f[13] != 0 || f[ethLen+9] != unix.IPPROTO_TCP {
		return false
	}
	src, dst := netip.AddrFrom4([4]byte(f[26:30])), netip.AddrFrom4([4]byte(f[30:34]))
	return dst == peer && binary.BigEndian.Uint16(f[l4+2:]) == barrierPort || src == peer && binary.BigEndian.Uint16(f[l4:]) == barrierPort
}

// barrier has a sandbox ask for a connection that the internet refuses. When the refusal is back, all that was sent before
// has got to where it gets. It returns what the sandbox's tap had before.
func (w *world) barrier(s *sandbox) (before [][]byte) {
	w.t.Helper()
	w.barriers++
	w.send(s, vnet{}, fromGuest(tcp(at(guestIP, 9), at(peer, barrierPort), syn, w.barriers, 0, "")))
	for end := time.Now().Add(wait); ; {
		for _, f := range w.see(&eye{fd: s.tap, skip: vnetLen}) {
			if !isBarrier(f) {
				before = append(before, f)
			} else if f[l4+13]&rst != 0 && binary.BigEndian.Uint32(f[l4+8:]) == w.barriers+1 {
				return before
			}
		}
		left := time.Until(end)
		if left <= 0 {
			w.t.Fatalf("sandbox %s has no connection", s.pod.ID)
		}
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(s.tap), Events: unix.POLLIN}}, int(left.Milliseconds())+1); err != nil && !errors.Is(err, unix.EINTR) {
			w.t.Fatal(err)
		}
	}
}

// send has a sandbox's machine send a frame. An error is the kernel's refusal.
func (w *world) send(s *sandbox, v vnet, f []byte) error {
	_, err := unix.Write(s.tap, append(v.bytes(), f...))
	return err
}

// seen is all that was seen anywhere since, in words, after a barrier.
func (w *world) seen() (seen []string) {
	w.t.Helper()
	own := w.barrier(w.a)
	for _, e := range w.eyes {
		frames := w.see(e)
		if e.fd == w.a.tap {
			frames = append(own, frames...)
		}
		for _, f := range frames {
			if !isBarrier(f) {
				seen = append(seen, e.name+": "+w.describe(f))
			}
		}
	}
	return seen
}

// describe is what a frame is, and who from and to: with the port of it that isn't a sandbox's.
func (w *world) describe(f []byte) string {
	if len(f) < ethLen+20 {
		return fmt.Sprintf("%d bytes", len(f))
	}
	switch kind := binary.BigEndian.Uint16(f[12:]); kind {
	case unix.ETH_P_IP:
	case unix.ETH_P_ARP:
		if len(f) < ethLen+28 {
			return "arp, cut"
		}
		return fmt.Sprintf("arp %d %s > %s", f[21], w.name(netip.AddrFrom4([4]byte(f[28:32]))), w.name(netip.AddrFrom4([4]byte(f[38:42]))))
	default:
		return fmt.Sprintf("ethertype %04x", kind)
	}
	src, dst := netip.AddrFrom4([4]byte(f[26:30])), netip.AddrFrom4([4]byte(f[30:34]))
	sport, dport, what := "", "", fmt.Sprintf("protocol %d", f[ethLen+9])
	if offset := binary.BigEndian.Uint16(f[ethLen+6:]) & 0x1fff; offset != 0 {
		return fmt.Sprintf("fragment %s > %s", w.name(src), w.name(dst))
	}
	if len(f) >= l4+8 {
		switch f[ethLen+9] {
		case unix.IPPROTO_UDP, unix.IPPROTO_TCP:
			what = map[byte]string{unix.IPPROTO_UDP: "udp", unix.IPPROTO_TCP: "tcp"}[f[ethLen+9]]
			if dst == guestIP {
				sport = fmt.Sprint(":", binary.BigEndian.Uint16(f[l4:]))
			} else {
				dport = fmt.Sprint(":", binary.BigEndian.Uint16(f[l4+2:]))
			}
		case unix.IPPROTO_ICMP:
			what = fmt.Sprintf("icmp %d/%d", f[l4], f[l4+1])
		}
		if f[ethLen+9] == unix.IPPROTO_TCP && len(f) >= l4+14 {
			what += " " + flagNames(f[l4+13])
		}
	}
	return fmt.Sprintf("%s %s%s > %s%s", what, w.name(src), sport, w.name(dst), dport)
}

func flagNames(flags byte) string {
	var s strings.Builder
	for i, n := range []string{"fin", "syn", "rst", "psh", "ack"} {
		if flags&(1<<i) != 0 {
			s.WriteString(n)
		}
	}
	return s.String()
}

// counts are a sandbox's counters, and those of nobody's frames.
func (w *world) counts(s *sandbox) map[bpf.Reason]int {
	w.t.Helper()
	counts := map[bpf.Reason]int{}
	for _, id := range []bpf.ID{0, s.at.Sandbox} {
		c, err := w.datapath.Counters(id)
		must(w.t, err)
		for r, n := range c {
			counts[r] += int(n.Packets)
		}
	}
	return counts
}

// sender returns what sends packets by a device of a namespace.
func (w *world) sender(ns netns.NsHandle, dev string, to, from net.HardwareAddr) func(packet []byte) {
	w.t.Helper()
	var fd int
	w.in(ns, func() {
		var err error
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		must(w.t, err)
		w.t.Cleanup(func() { _ = unix.Close(fd) })
	})
	index := w.index(ns, dev)
	return func(packet []byte) {
		w.t.Helper()
		must(w.t, unix.Sendto(fd, ether(to, from, unix.ETH_P_IP, packet), 0, &unix.SockaddrLinklayer{Ifindex: index}))
	}
}

func (w *world) index(ns netns.NsHandle, dev string) (index int) {
	w.in(ns, func() {
		l, err := netlink.LinkByName(dev)
		must(w.t, err)
		index = l.Attrs().Index
	})
	return index
}
