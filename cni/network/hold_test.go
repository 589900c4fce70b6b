package network_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
)

// TestHold: a place that is held is closed, whoever opens it and whenever, until it is let go.
func TestHold(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	for _, tc := range []struct{ steps, passes string }{
		{"open claim tap hold renew", "nnyny"},
		{"open claim tap hold hold resume", "nnynny"},
		{"claim hold tap open renew", "nnnny"},
		{"claim hold tap open up resume", "nnnnny"},
		{"claim hold renew tap open", "nnnny"},
		{"open claim hold release claim tap", "nnnnny"},
	} {
		t.Run(tc.steps, func(t *testing.T) {
			testnet.Must(t, h.Enter())
			var tap *os.File
			for i, step := range strings.Fields(tc.steps) {
				var err error
				switch step {
				case "claim":
					_, err = h.Claim(ctx, pod)
				case "open":
					_, err = h.Open(ctx, request("default-box"))
				case "tap":
					tap, err = h.OpenTap(ctx, pod)
				case "hold":
					err = h.Hold(ctx, pod)
				case "resume":
					err = h.Resume(ctx, pod)
				case "renew":
					err = h.Renew(ctx, pod)
				case "release":
					err = h.Release(ctx, pod)
				case "up":
					h.Up()
				}
				testnet.Must(t, err)
				if tap == nil {
					continue
				}
				a, err := h.Get(ctx, "default-box")
				testnet.Must(t, err)
				if r := send(t, h, tap, a.Sandbox); (r == bpf.TX) != (tc.passes[i] == 'y') {
					t.Errorf("after %s, step %d: %s", step, i+1, r)
				}
			}
			testnet.Must(t, tap.Close())
			testnet.Must(t, errors.Join(h.Close(ctx, "default-box", "cube", "eth0"), h.Release(ctx, pod)))
		})
	}
}

// ends are a connection's: the host's in the test's namespace, the guest's in the guest's.
type ends struct {
	host, guest net.Conn
}

// connect has the host connect to a guest that listens.
func connect(t *testing.T, l net.Listener, to netip.AddrPort) ends {
	t.Helper()
	host, err := net.DialTimeout("tcp4", to.String(), 10*time.Second)
	testnet.Must(t, err)
	t.Cleanup(func() { _ = host.Close() })
	guest, err := l.Accept()
	testnet.Must(t, err)
	t.Cleanup(func() { _ = guest.Close() })
	for _, c := range []net.Conn{host, guest} {
		testnet.Must(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	}
	return ends{host, guest}
}

// says has one end say something, which the other has to hear.
func says(t *testing.T, from, to net.Conn, what string) {
	t.Helper()
	_, err := io.WriteString(from, what)
	testnet.Must(t, err)
	b := make([]byte, len(what))
	if _, err := io.ReadFull(to, b); err != nil || string(b) != what {
		t.Fatalf("%q is heard as %q, %v", what, b, err)
	}
}

// TestRenew: connections outlast a Hold, and none of them outlasts Renew; others are as before.
func TestRenew(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	other := network.Pod{Namespace: "default", ID: "other"}
	conns, at, listeners := map[network.Pod]ends{}, map[network.Pod]netip.AddrPort{}, map[network.Pod]net.Listener{}
	for _, p := range []network.Pod{pod, other} {
		_, err := h.Claim(ctx, p)
		testnet.Must(t, err)
		a, err := h.Open(ctx, request("default-"+p.ID))
		testnet.Must(t, err)
		at[p] = netip.AddrPortFrom(a.Address, 80)
		g, _ := h.Guest(p)
		g.Do(t, func() (err error) { listeners[p], err = net.Listen("tcp4", "0.0.0.0:80"); return err })
		defer listeners[p].Close()
		conns[p] = connect(t, listeners[p], at[p])
		says(t, conns[p].host, conns[p].guest, "before")
	}
	before, err := h.Get(ctx, "default-box")
	testnet.Must(t, err)

	testnet.Must(t, h.Hold(ctx, pod))
	says(t, conns[other].guest, conns[other].host, "others aren't held")
	c := conns[pod]
	heard := make(chan error, 1)
	go func() {
		b := make([]byte, 5)
		_, err := io.ReadFull(c.guest, b)
		heard <- errors.Join(err, mustBe(string(b), "later"))
	}()
	_, err = io.WriteString(c.host, "later")
	testnet.Must(t, err)
	select {
	case err := <-heard:
		t.Fatalf("heard while it is held: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	testnet.Must(t, h.Resume(ctx, pod))
	testnet.Must(t, <-heard)

	_, epoch, err := h.Sandbox(ctx, "default-box")
	testnet.Must(t, err)
	testnet.Must(t, h.Hold(ctx, pod))
	testnet.Must(t, h.Renew(ctx, pod))
	if _, now, err := h.Sandbox(ctx, "default-box"); err != nil || now == epoch {
		t.Errorf("epoch %d, before %d, %v", now, epoch, err)
	}
	if flows, err := h.Flows(ctx, "default-box"); err != nil || len(flows) > 0 {
		t.Errorf("flows %v, %v", flows, err)
	}
	if _, err := c.host.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNABORTED) {
		t.Errorf("the host reads %v", err)
	}
	// It doesn't know yet, so it is the answer to what it sends that tells it.
	_, err = io.WriteString(c.guest, "by the connection of the other life")
	testnet.Must(t, err)
	if _, err := c.guest.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the guest reads %v", err)
	}
	after, err := h.Get(ctx, "default-box")
	testnet.Must(t, err)
	if before.Address != after.Address || before.Tap != after.Tap || after.Policy == nil {
		t.Errorf("%+v, before %+v", after, before)
	}
	c = connect(t, listeners[pod], at[pod])
	says(t, c.host, c.guest, "anew")
	says(t, conns[other].host, conns[other].guest, "to another")
	if err := h.Renew(ctx, pod); err == nil {
		t.Error("renewed what isn't held")
	}
}

func mustBe(got, want string) error {
	if got != want {
		return errors.New("it is " + got + " and not " + want)
	}
	return nil
}

// TestDrain: what is in the tap's queue isn't the next machine's.
func TestDrain(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	_, err := h.Claim(ctx, pod)
	testnet.Must(t, err)
	a, err := h.Open(ctx, request("default-box"))
	testnet.Must(t, err)
	tap, err := h.OpenTap(ctx, pod)
	testnet.Must(t, err)
	defer tap.Close()
	host, err := net.Dial("udp4", netip.AddrPortFrom(a.Address, 80).String())
	testnet.Must(t, err)
	defer host.Close()
	for range 20 {
		_, err := io.WriteString(host, "of the other life")
		testnet.Must(t, err)
	}
	testnet.Must(t, h.Hold(ctx, pod))
	_, err = io.WriteString(host, "while it is held") // goes nowhere
	testnet.Must(t, err)
	testnet.Must(t, network.Drain(tap))
	testnet.Must(t, h.Renew(ctx, pod))
	if _, err := io.WriteString(host, "by the old socket"); err == nil {
		t.Error("a socket of the host's outlasts it")
	}
	fresh, err := net.Dial("udp4", netip.AddrPortFrom(a.Address, 80).String())
	testnet.Must(t, err)
	defer fresh.Close()
	_, err = io.WriteString(fresh, "of this life")
	testnet.Must(t, err)
	b := make([]byte, 1<<12)
	testnet.Must(t, tap.SetReadDeadline(time.Now().Add(10*time.Second)))
	n, err := tap.Read(b)
	if err != nil || !bytes.HasSuffix(b[:n], []byte("of this life")) {
		t.Errorf("the first frame is %q, %v", b[:n], err)
	}
}
