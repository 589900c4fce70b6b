package network_test

import (
	"errors"
	"net/netip"
	"os"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
)

// TestRepair: of what killed processes and others have left half done nothing stays, and what is whole goes on.
func TestRepair(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	keep := network.Pod{Namespace: "default", ID: "keep"}
	_, err := h.Claim(ctx, keep)
	testnet.Must(t, err)
	kept, err := h.Open(ctx, request("default-keep"))
	testnet.Must(t, err)
	tap, err := h.OpenTap(ctx, keep)
	testnet.Must(t, err)
	defer tap.Close()
	write := func(name, content string) error { return os.WriteFile(h.Path(name), []byte(content), 0o600) }
	whole := len(h.Left())

	for name, spoil := range map[string]func() error{
		"a number without a tap":      func() error { return write("taps/9", "") },
		"a free number without a tap": func() error { return errors.Join(write("taps/9", ""), write("free/9", "")) },
		"what is free is nothing":     func() error { return write("free/9", "") },
		"an address of nobody's":      func() error { return write("addresses/10.200.9.9", "") },
		"a port of nobody's":          func() error { return write("ports/tcp-0.0.0.0-80", "x") },
		"a port without an owner":     func() error { return write("ports/udp-127.0.0.1-53", "") },
		"an attachment without state": func() error { return os.Mkdir(h.Path("attachments", "x"), 0o700) },
		"a record of nobody's": func() error {
			_, err := h.Claim(ctx, network.Pod{Namespace: "default", ID: "x"})
			return errors.Join(err, write("attachments/default-x/state.json", `{"tap":2}`))
		},
		"a tap that nobody has": func() error {
			_, err := h.Refill(ctx)
			return errors.Join(err, os.RemoveAll(h.Path("free")), os.Mkdir(h.Path("free"), 0o700))
		},
		"taps that no file tells of": func() error {
			_, err := h.Refill(ctx)
			for _, name := range []string{"taps/2", "taps/3", "free/2", "free/3"} {
				err = errors.Join(err, os.Remove(h.Path(name)))
			}
			return err
		},
		"an open one whose record is gone": func() error {
			_, err := h.Open(ctx, request("x"))
			return errors.Join(err, os.Remove(h.Path("attachments", "x", "state.json")))
		},
		"an open one whose tap is gone": func() error {
			a, err := h.Open(ctx, request("x"))
			testnet.Must(t, err)
			l, err := netlink.LinkByName(a.Tap)
			return errors.Join(err, netlink.LinkDel(l))
		},
		"an open one that isn't in the datapath": func() error {
			a, err := h.Open(ctx, request("x"))
			testnet.Must(t, err)
			_, err = h.Datapath.RemoveSandbox(a.Sandbox)
			return err
		},
		"a free tap without its programs": func() error {
			_, err := h.Refill(ctx)
			return errors.Join(err, h.Datapath.DetachTap(indexOf(t, h.Config.Network.TapPrefix+"2")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			testnet.Must(t, h.Enter())
			testnet.Must(t, spoil())
			testnet.Must(t, h.GC(ctx, "cube", func(id, ifName string) bool { return id == "default-keep" && ifName == "eth0" }))
			// What was made ready and is whole may stay: empty the pool.
			for _, id := range []string{"y", "z"} {
				p := network.Pod{Namespace: "default", ID: id}
				_, err := h.Claim(ctx, p)
				testnet.Must(t, err)
				f, err := h.OpenTap(ctx, p)
				testnet.Must(t, err)
				testnet.Must(t, f.Close())
			}
			for _, id := range []string{"y", "z"} {
				testnet.Must(t, h.Release(ctx, network.Pod{Namespace: "default", ID: id}))
			}
			if left := h.Left(); len(left) != whole {
				t.Errorf("left: %v", left)
			}
			testnet.Must(t, h.Check(ctx, "default-keep", "cube", "eth0", []netip.Addr{kept.Address}))
			if r := send(t, h, tap, kept.Sandbox); r != bpf.TX {
				t.Errorf("what is whole: counted as %s", r)
			}
		})
	}
}

// TestReopen: a daemon that starts opens what was open and isn't in its datapath.
func TestReopen(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	a, err := h.Open(ctx, request("x"))
	testnet.Must(t, err)
	other, err := h.Open(ctx, request("y"))
	testnet.Must(t, err)
	for _, lost := range []*network.Attachment{a, other} {
		_, err = h.Datapath.RemoveSandbox(lost.Sandbox)
		testnet.Must(t, err)
	}
	if err := h.Check(ctx, "x", "cube", "eth0", []netip.Addr{a.Address}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("checked: %v", err)
	}
	// One that can't be opened again is in nobody else's way.
	tap, err := netlink.LinkByName(other.Tap)
	testnet.Must(t, err)
	testnet.Must(t, netlink.LinkSetDown(tap))
	h.Up()
	if err := h.Check(ctx, "y", "cube", "eth0", []netip.Addr{other.Address}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("checked: %v", err)
	}
	testnet.Must(t, h.Check(ctx, "x", "cube", "eth0", []netip.Addr{a.Address}))
	if err := h.Check(ctx, "x", "cube", "eth0", []netip.Addr{a.Address.Next()}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("another address: %v", err)
	}
	if err := h.Check(ctx, "x", "cube", "eth1", []netip.Addr{a.Address}); !errdefs.IsNotFound(err) {
		t.Errorf("another interface: %v", err)
	}
}

// TestDown: nothing is left, from any state, and the end of what isn't there any more is fine.
func TestDown(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	_, err := h.Claim(ctx, pod)
	testnet.Must(t, err)
	_, err = h.Open(ctx, request("default-box"))
	testnet.Must(t, err)
	tap, err := h.OpenTap(ctx, pod)
	testnet.Must(t, err)
	defer tap.Close()
	_, err = h.Refill(ctx)
	testnet.Must(t, err)
	testnet.Must(t, h.Down(ctx))
	if err := h.Status(ctx); !errdefs.IsUnavailable(err) {
		t.Errorf("status %v", err)
	}
	testnet.Must(t, gateway.Down(ctx, h.Config))
	testnet.Must(t, h.Down(ctx))
	testnet.Must(t, h.Close(ctx, "default-box", "cube", "eth0"))
	testnet.Must(t, h.Release(ctx, pod))
	if _, err := os.Stat(h.Config.NetworkDir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is left: %v", err)
	}
	links, err := netlink.LinkList()
	testnet.Must(t, err)
	if len(links) != 3 { // lo and the uplink
		t.Errorf("devices %v", links)
	}
}
