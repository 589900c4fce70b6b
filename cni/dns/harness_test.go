package dns

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
)

// wait bounds what happens.
const wait = 30 * time.Second

var (
	pool    = netip.MustParsePrefix("10.200.0.0/16")
	gateway = netip.MustParseAddr("10.200.255.254")
)

// TestMain runs the tests in a network namespace of their own, which has the addresses of a gateway and of sandboxes.
func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	const isolated = "CUBE_TEST_ISOLATED"
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "SKIPPED: network namespaces take root")
		return 0
	}
	if os.Getenv(isolated) == "" {
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.Env = append(os.Environ(), isolated+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		if err := cmd.Run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	for _, a := range []string{gateway.String(), "10.200.0.1", "10.200.0.2", "192.0.2.1"} {
		if addr, perr := netlink.ParseAddr(a + "/32"); err == nil {
			err = perr
			if err == nil {
				err = netlink.AddrAdd(lo, addr)
			}
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// server serves until the test ends.
func server(t *testing.T, set func(*Config)) *Server {
	t.Helper()
	cfg := Config{
		Listen: netip.AddrPortFrom(gateway, 0), Clients: pool, Log: slog.New(slog.DiscardHandler),
		Timeout: func(d time.Duration) time.Duration { return d },
	}
	// UDP and TCP have to have the same port.
	l, err := net.Listen("tcp4", cfg.Listen.String())
	must(t, err)
	cfg.Listen = l.Addr().(*net.TCPAddr).AddrPort()
	must(t, l.Close())
	set(&cfg)
	s, err := New(t.Context(), cfg)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(wait):
			t.Error("Serve doesn't end")
		}
	})
	return s
}

// upstream is a name server that answers as it is told to, at an address.
func upstream(t *testing.T, at string, answer func(network string, q *dns.Msg) *dns.Msg) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp4", at)
	must(t, err)
	p, err := net.ListenPacket("udp4", l.Addr().String())
	must(t, err)
	for _, s := range []*dns.Server{{Listener: l}, {PacketConn: p}} {
		network := "udp"
		if s.Listener != nil {
			network = "tcp"
		}
		s.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			if a := answer(network, q); a != nil {
				_ = w.WriteMsg(a)
			}
		})
		ended := make(chan struct{})
		go func() { defer close(ended); _ = s.ActivateAndServe() }()
		t.Cleanup(func() { _ = s.Shutdown(); <-ended })
	}
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// records answers every question with these.
func records(rr ...string) func(string, *dns.Msg) *dns.Msg {
	return func(_ string, q *dns.Msg) *dns.Msg {
		a := new(dns.Msg).SetReply(q)
		for _, s := range rr {
			r, err := dns.NewRR(s)
			if err != nil {
				panic(err)
			}
			a.Answer = append(a.Answer, r)
		}
		return a
	}
}

// ask asks as a sandbox. nil is no answer within the timeout.
func ask(t *testing.T, s *Server, network, from string, q *dns.Msg, timeout time.Duration) *dns.Msg {
	t.Helper()
	var local net.Addr = &net.UDPAddr{IP: net.ParseIP(from)}
	if network == "tcp" {
		local = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	c := dns.Client{Net: network, Timeout: timeout, Dialer: &net.Dialer{LocalAddr: local, Timeout: timeout}, UDPSize: maxUDP}
	a, _, err := c.Exchange(q, s.Addr().String())
	if err != nil {
		return nil
	}
	return a
}

func question(name string, kind uint16) *dns.Msg { return new(dns.Msg).SetQuestion(name, kind) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
