package network

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/integration/testhost"
	"github.com/cubesandbox/cube/vmm"
)

const (
	copies = 8        // of busybox, to be sent: 15 MB
	large  = 60 << 10 // what testhost.LargeSegments asks for
	// header is what is not data in a segment: IP, TCP, its time stamps.
	header = 20 + 20 + 12
)

// TestNIC drives a machine's network card: the real launcher, Debian's kernel in a restored and jailed QEMU, the agent, and
// a tap in a network namespace that stands for the host's.
func TestNIC(t *testing.T) {
	nothingLeft(t)
	cfg, h := s.Config, newHost(t)
	sniffer := sniff(t, h.Namespace, h.dev, vmm.MAC)
	s := newSandbox(t, cfg, h.tap, card(1500))
	l := h.listen(t, cfg.Timeout(3*time.Minute))
	_, port, err := net.SplitHostPort(l.Addr().String())
	must(t, err)
	connect := fmt.Sprintf("nc %s %s", gateway, port)

	t.Run("configured", func(t *testing.T) {
		arp := s.sh(t, "cat /proc/net/arp")
		if n := strings.Count(arp, "\n"); n != 1 || !strings.Contains(arp, gatewayMAC.String()) || !strings.Contains(arp, " 0x6 ") {
			t.Errorf("neighbours, want the gateway for good:\n%s", arp)
		}
		if got := s.sh(t, "ip addr show eth0"); !strings.Contains(got, "inet "+guestIP.String()) || strings.Contains(got, "inet6") || !strings.Contains(got, "mtu 1500") {
			t.Errorf("the card has\n%s", got)
		}
		if got := s.sh(t, "ip route show default"); !strings.HasPrefix(got, fmt.Sprintf("default via %s dev eth0", gateway)) {
			t.Errorf("route %q", got)
		}
	})
	t.Run("names", func(t *testing.T) {
		if got := s.sh(t, "cat /etc/resolv.conf"); got != "nameserver "+gateway.String() {
			t.Errorf("resolv.conf %q", got)
		}
		h.serveDNS(t)
		if got := s.sh(t, "nslookup -type=a cube.test"); !strings.Contains(got, "Name:\tcube.test\nAddress: "+gateway.String()) {
			t.Errorf("nslookup says %q", got)
		}
	})
	data := bytes.Repeat(s.busybox, copies)
	must(t, h.Do(testhost.LargeSegments))
	s.sh(t, fmt.Sprintf("echo %s >/proc/sys/net/%s", testhost.LargeSegmentsValue, testhost.LargeSegmentsKey))
	sniffer.take()
	t.Run("to the host", func(t *testing.T) {
		began := time.Now()
		out := s.start(t, connect+" -e cat"+strings.Repeat(" /bin/busybox", copies))
		if got := l.receive(t); !bytes.Equal(got, data) {
			t.Errorf("%d bytes of %d came, or not these", len(got), len(data))
		}
		out.Close()
		from, to := sniffer.take()
		t.Logf("%d MB in %v; from the guest %v; to it %v", len(data)>>20, time.Since(began).Round(time.Millisecond), from, to)
		check(t, from, 1500, large)
	})
	t.Run("to the guest", func(t *testing.T) {
		began := time.Now()
		out := s.start(t, connect+" </dev/null | sha256sum")
		l.send(t, data)
		var got string
		_, err := fmt.Fscan(out, &got)
		if want := fmt.Sprintf("%x", sha256.Sum256(data)); got != want || err != nil {
			t.Errorf("digest %s, want %s, %v", got, want, err)
		}
		from, to := sniffer.take()
		t.Logf("%d MB in %v; from the guest %v; to it %v", len(data)>>20, time.Since(began).Round(time.Millisecond), from, to)
		check(t, to, 1500, large)
	})
	t.Run("another MTU", func(t *testing.T) {
		open := s.start(t, connect+" </dev/null")
		c := l.accept(t)
		must(t, exchange(c, open, "before"))
		s.configure(t, card(1300))
		must(t, exchange(c, open, "after"))
		sniffer.take()
		out := s.start(t, connect+" -e cat /bin/busybox")
		if got := l.receive(t); !bytes.Equal(got, s.busybox) {
			t.Errorf("%d bytes of %d came, or not these", len(got), len(s.busybox))
		}
		out.Close()
		out = s.start(t, connect+" </dev/null | sha256sum")
		l.send(t, s.busybox)
		var got string
		if _, err := fmt.Fscan(out, &got); got != fmt.Sprintf("%x", sha256.Sum256(s.busybox)) || err != nil {
			t.Errorf("digest %s, %v", got, err)
		}
		from, to := sniffer.take()
		check(t, from, 1300, large/2)
		check(t, to, 1300, large/2)
	})
	t.Run("no network", func(t *testing.T) {
		s.configure(t, nil)
		if got := s.sh(t, connect+" </dev/null"); !strings.Contains(got, "unreachable") {
			t.Errorf("nc says %q", got)
		}
		s.remove(t, "box")
		s.run(t, "box", false)
		if got := s.sh(t, "cat /etc/resolv.conf"); strings.Contains(got, "nameserver") {
			t.Errorf("resolv.conf of a guest without a network: %q", got)
		}
	})
	t.Run("the end", func(t *testing.T) {
		s.configure(t, card(1500))
		_, err := s.guest.Shutdown(t.Context(), &emptypb.Empty{})
		must(t, err)
		must(t, s.guest.Close())
		select {
		case <-s.machine.Done():
		case <-time.After(cfg.Timeout(30 * time.Second)):
			t.Fatal("the machine doesn't end")
		}
		var death *vmm.DeathError
		if err := s.machine.Err(); !errors.As(err, &death) || death.Reason != "guest reset itself" {
			t.Errorf("the machine's end: %v", err)
		}
	})
}

// check looks at the frames of a direction in which data has been sent; with little of it they don't get as long.
func check(t *testing.T, s seen, mtu, longest int) {
	t.Helper()
	if s.longest < longest {
		t.Errorf("the longest frame has %d bytes: no large ones get through", s.longest)
	}
	if s.segment != mtu-header {
		t.Errorf("segments of %d bytes, want %d for an MTU of %d", s.segment, mtu-header, mtu)
	}
	if s.partial == 0 {
		t.Error("all checksums are made in software")
	}
	if s.others != 0 {
		t.Errorf("%d frames aren't IPv4", s.others)
	}
}

// exchange sends a word to the guest, which prints it.
func exchange(c net.Conn, printed io.Reader, word string) error {
	if _, err := fmt.Fprintln(c, word); err != nil {
		return err
	}
	var got string
	if _, err := fmt.Fscanln(printed, &got); err != nil || got != word {
		return fmt.Errorf("the guest prints %q, want %q: %w", got, word, err)
	}
	return nil
}
