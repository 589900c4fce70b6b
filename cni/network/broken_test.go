package network_test

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/control"
	"github.com/cubesandbox/cube/internal/testnet"
)

// TestBrokenClose: where the end of a place breaks off half way, others may have its tap's number and its address, and neither
// the next daemon nor a further end takes them for the first one's.
func TestBrokenClose(t *testing.T) {
	h := testnet.New(t)
	h.Config.Network.Pool = netip.MustParsePrefix("10.201.7.0/24")
	h.Up()
	ctx := t.Context()
	leaveOne := func() {
		for i := 2; i < 254; i++ {
			testnet.Must(t, os.WriteFile(h.Path("addresses", fmt.Sprintf("10.201.7.%d", i)), nil, 0o600))
		}
	}
	leaveOne()
	_, err := h.Claim(ctx, pod)
	testnet.Must(t, err)
	a, err := h.Open(ctx, request("default-box"))
	testnet.Must(t, err)
	tap, err := h.OpenTap(ctx, pod)
	testnet.Must(t, err)
	testnet.Must(t, tap.Close())
	testnet.Must(t, h.Release(ctx, pod))

	number := h.Path("taps", fmt.Sprint(a.Sandbox))
	testnet.Must(t, os.Remove(number))
	testnet.Must(t, os.MkdirAll(number+"/x", 0o700))
	if err := h.Close(ctx, "default-box", "cube", "eth0"); err == nil {
		t.Fatal("the tap's number can't be freed, and nobody says so")
	}
	testnet.Must(t, os.RemoveAll(number)) // as it would have been freed

	next := network.Pod{Namespace: "default", ID: "next"}
	b, err := h.Claim(ctx, next)
	testnet.Must(t, err)
	c, err := h.Open(ctx, request("other"))
	testnet.Must(t, err)
	if b.Sandbox != a.Sandbox || c.Address != a.Address {
		t.Fatalf("%+v and %+v after %+v: nothing is shown", b, c, a)
	}
	for range 2 {
		h.Up()
		tap, err := h.OpenTap(ctx, next)
		testnet.Must(t, err)
		if r := send(t, h, tap, b.Sandbox); r != bpf.NoSandbox {
			t.Errorf("by the tap that nobody has opened a packet is counted as %s", r)
		}
		testnet.Must(t, tap.Close())
		testnet.Must(t, h.Check(ctx, "other", "cube", "eth0", []netip.Addr{c.Address}))
		leaveOne()
		if _, err := h.Open(ctx, request("third")); !errdefs.IsResourceExhausted(err) {
			t.Errorf("the address of two: %v", err)
		}
		testnet.Must(t, h.Close(ctx, "default-box", "cube", "eth0"))
	}
}

// TestBrokenOpen: what couldn't be opened, and can't be closed either, is nobody else's until it is.
func TestBrokenOpen(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	file := h.Path("ports", "tcp-127.0.0.1-8080")
	l, err := net.Listen("unix", h.Config.ControlSocket())
	testnet.Must(t, err)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, err := os.ReadFile(file)
		if err == nil {
			_ = os.Remove(file)
			_ = os.Mkdir(file, 0o700) // nobody can read whose it is
		}
		control.Answer(w, nil, errdefs.ErrConflict)
	})}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	r := request("box")
	r.Ports = []network.Port{{HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 8080, ContainerPort: 80, Protocol: "tcp"}}
	if _, err := h.Open(ctx, r); !errdefs.IsConflict(err) {
		t.Fatalf("opened: %v", err)
	}
	next := network.Pod{Namespace: "default", ID: "next"}
	a, err := h.Claim(ctx, next)
	testnet.Must(t, err)
	tap, err := h.OpenTap(ctx, next)
	testnet.Must(t, err)
	if r := send(t, h, tap, a.Sandbox); r != bpf.NoSandbox {
		t.Errorf("by the next one's tap a packet is counted as %s", r)
	}
	testnet.Must(t, tap.Close())
	testnet.Must(t, os.Remove(file))
	testnet.Must(t, h.Close(ctx, "box", "cube", "eth0"))
	testnet.Must(t, h.Release(ctx, next))
	if left := h.Left(); len(left) > 4 { // a tap that is ready
		t.Errorf("left: %v", left)
	}
}
