package network_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/internal/testnet"
)

const wait = time.Minute

// TestFollow: what is open follows the host's MTU and addresses, the configuration, and policies that are replaced.
func TestFollow(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	_, err := h.Claim(ctx, pod)
	testnet.Must(t, err)
	a, err := h.Open(ctx, request("default-box"))
	testnet.Must(t, err)
	if a.MTU != 1500 {
		t.Errorf("MTU %d", a.MTU)
	}
	tap, err := h.OpenTap(ctx, pod)
	testnet.Must(t, err)
	defer tap.Close()
	if r := send(t, h, tap, a.Sandbox); r != bpf.TX {
		t.Errorf("counted as %s", r)
	}
	up, err := netlink.LinkByName("up0")
	testnet.Must(t, err)
	addr, err := netlink.ParseAddr(remote.Addr().String() + "/32")
	testnet.Must(t, err)
	testnet.Must(t, netlink.AddrAdd(up, addr))
	testnet.Must(t, netlink.LinkSetMTU(up, 1400))
	h.Up() // has the gateway's MTU follow
	testnet.Must(t, h.Refresh(ctx))
	if r := send(t, h, tap, a.Sandbox); r != bpf.HardDeny {
		t.Errorf("the host's address: counted as %s", r)
	}
	l, err := netlink.LinkByName(a.Tap)
	testnet.Must(t, err)
	if l.Attrs().MTU != 1400 {
		t.Errorf("MTU %d", l.Attrs().MTU)
	}
	testnet.Must(t, netlink.AddrDel(up, addr))
	before := h.Config.Network.MaxFlows
	h.Config.Network.MaxFlows = 0
	_, err = h.Datapath.Reap(bpf.Timeouts{})
	testnet.Must(t, err)
	testnet.Must(t, h.Refresh(ctx))
	if r := send(t, h, tap, a.Sandbox); r != bpf.FlowQuota {
		t.Errorf("another configuration: counted as %s", r)
	}
	h.Config.Network.MaxFlows = before
	testnet.Must(t, h.Refresh(ctx))
	testnet.Must(t, h.SetPolicy(ctx, "default-box", &policy.Policy{Default: policy.Deny, Rules: []policy.Rule{{Action: policy.Direct, To: "1.2.3.4", Protocol: "tcp"}}}))
	if r := send(t, h, tap, a.Sandbox); r != bpf.Policy {
		t.Errorf("a policy for TCP: counted as %s", r)
	}
	testnet.Must(t, h.SetPolicy(ctx, "default-box", all))
	if r := send(t, h, tap, a.Sandbox); r != bpf.TX {
		t.Errorf("counted as %s", r)
	}
	testnet.Must(t, h.Check(ctx, "default-box", "cube", "eth0", []netip.Addr{a.Address}))
}

// TestKeepWarm: taps are made again as they are taken, and it ends with the network.
func TestKeepWarm(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		err := h.Enter()
		if err == nil {
			err = h.KeepWarm(ctx)
		}
		done <- err
	}()
	ready := func() {
		t.Helper()
		for end := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
			free, err := os.ReadDir(h.Path("free"))
			testnet.Must(t, err)
			if len(free) == h.Config.Network.WarmTaps {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%d taps are ready", len(free))
			}
		}
	}
	ready()
	for i := range 5 {
		a, err := h.Open(t.Context(), request(fmt.Sprint("box", i)))
		testnet.Must(t, err)
		testnet.Must(t, h.Check(t.Context(), fmt.Sprint("box", i), "cube", "eth0", []netip.Addr{a.Address}))
		ready()
	}
	cancel()
	select {
	case err := <-done:
		testnet.Must(t, err)
	case <-time.After(wait):
		t.Error("it doesn't end")
	}
}
