package testhost

import (
	"bufio"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

func newHost(t *testing.T) *Host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: network namespaces take root")
	}
	h, err := New()
	must(t, err)
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

// TestInternet: a host reaches all of it.
func TestInternet(t *testing.T) {
	h := newHost(t)
	r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return inside(h, func() (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, netip.AddrPortFrom(Resolver, 53).String())
		})
	}}
	for name, want := range names {
		if got, err := r.LookupNetIP(t.Context(), "ip4", name); err != nil || len(got) != 1 || got[0] != want {
			t.Errorf("%s is %v, %v; want %v", name, got, err, want)
		}
	}
	const size = 1 << 20
	for _, server := range []netip.Addr{Server, Narrow} {
		c := dial(t, h, "tcp4", netip.AddrPortFrom(server, DataPort))
		in := bufio.NewReader(c)
		ask := func(request string) string {
			t.Helper()
			_, err := io.WriteString(c, request)
			must(t, err)
			line, err := in.ReadString('\n')
			must(t, err)
			return strings.TrimSpace(line)
		}
		if got := ask("who\n"); got != Uplink.String() {
			t.Errorf("%v sees %s", server, got)
		}
		if got := ask("hello\n"); got != "hello" {
			t.Errorf("%v repeats %q", server, got)
		}
		data, err := io.ReadAll(Data(size))
		must(t, err)
		if got := ask(fmt.Sprintf("put %d\n%s", size, data)); got != Digest(size) {
			t.Errorf("%v got %s", server, got)
		}
		_, err = fmt.Fprintf(c, "get %d\n", size)
		must(t, err)
		sum := sha256.New()
		_, err = io.CopyN(sum, in, size)
		must(t, err)
		if got := fmt.Sprintf("%x", sum.Sum(nil)); got != Digest(size) {
			t.Errorf("%v sent %s", server, got)
		}
	}
	for _, n := range Neighbours {
		if _, err := dialAt(h, "tcp4", netip.AddrPortFrom(n, 1)); err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("neighbour %v: %v", n, err)
		}
	}
	echo := dial(t, h, "udp4", netip.AddrPortFrom(Server, EchoPort))
	_, err := echo.Write([]byte("hello"))
	must(t, err)
	b := make([]byte, 64)
	if n, err := echo.Read(b); err != nil || string(b[:n]) != "hello" {
		t.Errorf("echo %q, %v", b[:n], err)
	}
}

// TestLeft: a command runs on the host, and what it leaves is found.
func TestLeft(t *testing.T) {
	h := newHost(t)
	wants := func(want ...string) {
		t.Helper()
		left, err := h.Left()
		if err != nil || strings.Join(left, "\n") != strings.Join(want, "\n") {
			t.Errorf("left %q, %v; want %q", left, err, want)
		}
	}
	wants()
	out, err := h.Command("readlink", "/proc/self/ns/net").CombinedOutput()
	must(t, err)
	here, err := exec.Command("readlink", "/proc/self/ns/net").CombinedOutput()
	must(t, err)
	if string(out) == string(here) {
		t.Errorf("the command is in %s", out)
	}
	must(t, h.Do(func() error { return Sysctl("ipv4/ip_forward", "1") }))
	if left, err := h.Left(); err != nil || len(left) == 0 {
		t.Errorf("left %q, %v", left, err)
	}
	must(t, h.Do(func() error { return Sysctl("ipv4/ip_forward", "0") }))
	wants()
	must(t, h.Do(func() error { return netlink.RuleAdd(rule()) }))
	wants("rule 77")
	must(t, h.Do(func() error { return netlink.RuleDel(rule()) }))
	wants()
}

func rule() *netlink.Rule {
	r := netlink.NewRule()
	r.Priority, r.Table = 77, 77
	return r
}

func inside(h *Host, f func() (net.Conn, error)) (c net.Conn, err error) {
	err = h.Do(func() (err error) {
		c, err = f()
		return err
	})
	return c, err
}

func dialAt(h *Host, network string, to netip.AddrPort) (net.Conn, error) {
	return inside(h, func() (net.Conn, error) { return net.DialTimeout(network, to.String(), 10*time.Second) })
}

func dial(t *testing.T, h *Host, network string, to netip.AddrPort) net.Conn {
	t.Helper()
	c, err := dialAt(h, network, to)
	must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	must(t, c.SetDeadline(time.Now().Add(time.Minute)))
	return c
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
