package attach

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"google.golang.org/protobuf/proto"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/flock"
	"github.com/cubesandbox/cube/internal/testnet"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm"
)

var box = network.Pod{Namespace: "default", ID: "box"}

// TestMAC: what the datapath lets pass as the guest's is what machines have.
func TestMAC(t *testing.T) {
	if !bytes.Equal(network.GuestMAC, vmm.MAC) {
		t.Errorf("guests have %s, machines %s", network.GuestMAC, vmm.MAC)
	}
}

func attachTo(t *testing.T, h *testnet.Host, asked spec.Network) (*pod.Attachment, error) {
	t.Helper()
	a, err := Network{}.Attach(t.Context(), h.Config, box, asked, false, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil || a == nil {
		return nil, err
	}
	t.Cleanup(func() { _ = a.Tap.Close() })
	return a, a.Open(t.Context())
}

func openTo(p *policy.Policy) spec.Network {
	return spec.Network{Settings: &network.Settings{Policy: p}}
}

// TestNotUp: without a network a pod that doesn't insist on one has none, and a place isn't missing at the end.
func TestNotUp(t *testing.T) {
	h := testnet.New(t)
	for _, asked := range []spec.Network{{}, {None: true}} {
		if a, err := attachTo(t, h, asked); a != nil || err != nil {
			t.Errorf("%+v: %+v, %v", asked, a, err)
		}
	}
	if a, err := attachTo(t, h, openTo(nil)); a != nil || !errdefs.IsUnavailable(err) {
		t.Errorf("%+v, %v", a, err)
	}
	testnet.Must(t, Network{}.Release(t.Context(), h.Config, box))

	h.Up()
	if a, err := attachTo(t, h, spec.Network{None: true}); a != nil || err != nil {
		t.Errorf("%+v, %v", a, err)
	}
	// One that is up, but that somebody changes, isn't none.
	unlock, err := flock.LockDir(t.Context(), h.Config.NetworkDir(), false)
	testnet.Must(t, err)
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if a, err := (Network{}).Attach(ctx, h.Config, box, spec.Network{}, false, slog.Default()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%+v, %v", a, err)
	}
}

// TestForAPlugin: a place that nothing is said of is closed, and a plugin opens it, in either order.
func TestForAPlugin(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	request := network.Request{ID: "default-box", Network: "cube", IfName: "eth0", Policy: &policy.Policy{Default: policy.Direct}}
	for _, first := range []bool{true, false} {
		if first {
			_, err := h.Open(ctx, request)
			testnet.Must(t, err)
		}
		a, err := attachTo(t, h, spec.Network{})
		testnet.Must(t, err)
		want := &api.Network{Address: "169.254.68.6/30", Gateway: "169.254.68.5", GatewayMac: gateway.MAC, Mtu: 1500, Nameservers: []string{"169.254.68.5"}}
		if !proto.Equal(a.Guest, want) {
			t.Errorf("the guest is told %v", a.Guest)
		}
		place, err := h.Get(ctx, "default-box")
		testnet.Must(t, err)
		if place.Open != first || *place.Pod != box || place.Tap != a.Tap.Name() {
			t.Errorf("place %+v, tap %s", place, a.Tap.Name())
		}
		if !first {
			opened, err := h.Open(ctx, request)
			testnet.Must(t, err)
			if opened.Tap != place.Tap {
				t.Errorf("opened %s instead of %s", opened.Tap, place.Tap)
			}
		}
		testnet.Must(t, a.Tap.Close())
		testnet.Must(t, Network{}.Release(ctx, h.Config, box))
		if place, err = h.Get(ctx, "default-box"); err != nil || !place.Open || place.Pod != nil {
			t.Errorf("what the plugin has opened: %+v, %v", place, err)
		}
		testnet.Must(t, h.Close(ctx, "default-box", "cube", "eth0"))
		if left := h.Left(); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}

// TestOwn: settings are in force as long as there is a machine.
func TestOwn(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	settings := &network.Settings{Policy: &policy.Policy{Default: policy.Direct}, TX: bpf.Rate{PerSecond: 1 << 20, Burst: 1 << 18}}
	a, err := attachTo(t, h, spec.Network{Settings: settings})
	testnet.Must(t, err)
	place, err := h.Get(ctx, "default-box")
	testnet.Must(t, err)
	if !place.Open || place.Network != network.Own || !reflect.DeepEqual(place.Policy, settings.Policy) || place.TX != settings.TX {
		t.Errorf("place %+v", place)
	}
	if a, err := attachTo(t, h, spec.Network{Settings: settings}); err == nil {
		t.Errorf("a second machine: %+v", a)
	}
	testnet.Must(t, a.Tap.Close())
	testnet.Must(t, Network{}.Release(ctx, h.Config, box))
	if left := h.Left(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}

	bad := &policy.Policy{Default: policy.Deny, Rules: []policy.Rule{{Action: policy.Direct, To: "1.0.0.0/8"}, {Action: policy.Direct, To: "1.2.3.4/8"}}}
	if a, err := attachTo(t, h, openTo(bad)); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), `rule 2 (allow "1.2.3.4/8")`) {
		t.Errorf("a bad policy: %+v, %v", a, err)
	}
	testnet.Must(t, Network{}.Release(ctx, h.Config, box))
	for _, what := range h.Left() {
		if !strings.HasPrefix(what, "device") && !strings.HasPrefix(what, "hook") && !strings.HasPrefix(what, "taps") && !strings.HasPrefix(what, "free") {
			t.Errorf("left of a bad policy: %s", what)
		}
	}
}

// TestFollow: the guest is told each other MTU of its tap's, whatever happens to others', until the machine is down.
func TestFollow(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	a, err := attachTo(t, h, spec.Network{})
	testnet.Must(t, err)
	tap, err := netlink.LinkByName(a.Tap.Name())
	testnet.Must(t, err)
	uplink, err := netlink.LinkByName("up0")
	testnet.Must(t, err)
	// Before anybody follows.
	testnet.Must(t, netlink.LinkSetMTU(tap, 1400))
	told, done := make(chan uint32), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		if err := h.Enter(); err != nil {
			done <- err
			return
		}
		done <- a.Follow(ctx, func(mtu uint32) { told <- mtu })
	}()
	expect := func(want uint32) {
		t.Helper()
		select {
		case got := <-told:
			if got != want {
				t.Errorf("told %d, want %d", got, want)
			}
		case err := <-done:
			t.Fatalf("the end: %v", err)
		case <-time.After(30 * time.Second):
			t.Fatalf("not told %d", want)
		}
	}
	expect(1400)
	for _, mtu := range []int{1300, 1500} {
		testnet.Must(t, netlink.LinkSetMTU(uplink, mtu-100))
		testnet.Must(t, netlink.LinkSetAlias(tap, "cube tap")) // an event without another MTU
		testnet.Must(t, netlink.LinkSetMTU(tap, mtu))
		expect(uint32(mtu))
	}
	cancel()
	select {
	case err := <-done:
		testnet.Must(t, err)
	case <-time.After(30 * time.Second):
		t.Fatal("it goes on")
	}
}

// TestSubscription: of other devices' events the shim isn't told.
func TestSubscription(t *testing.T) {
	testnet.New(t)
	var links []netlink.Link
	for _, name := range []string{"up0", "up1"} {
		l, err := netlink.LinkByName(name)
		testnet.Must(t, err)
		links = append(links, l)
	}
	c, err := subscribe(links[1].Attrs().Index)
	testnet.Must(t, err)
	defer c.Close()
	testnet.Must(t, c.SetReadDeadline(time.Now().Add(30*time.Second)))
	for i := range 50 {
		testnet.Must(t, netlink.LinkSetMTU(links[0], 1400-i))
	}
	testnet.Must(t, netlink.LinkSetMTU(links[1], 1300))
	events, err := c.Receive()
	testnet.Must(t, err)
	for _, e := range events {
		l, err := netlink.LinkDeserialize(nil, e.Data)
		testnet.Must(t, err)
		if l.Attrs().Index != links[1].Attrs().Index || l.Attrs().MTU != 1300 {
			t.Errorf("told of %+v", l.Attrs())
		}
	}
}

// TestFollowsNothing: a tap that has gone ends it with a reason.
func TestFollowsNothing(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	a, err := attachTo(t, h, spec.Network{})
	testnet.Must(t, err)
	tap, err := netlink.LinkByName(a.Tap.Name())
	testnet.Must(t, err)
	testnet.Must(t, netlink.LinkDel(tap))
	if err := a.Follow(t.Context(), nil); err == nil || !strings.Contains(err.Error(), a.Tap.Name()) {
		t.Errorf("follow: %v", err)
	}
}

// TestHeld: of a machine that goes on from a snapshot nothing passes before it has its identity, whoever has opened the place.
func TestHeld(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	direct := &policy.Policy{Default: policy.Direct}
	for name, tc := range map[string]struct {
		asked  spec.Network
		plugin bool
	}{
		"its own": {asked: openTo(direct)},
		"plugin":  {plugin: true},
	} {
		t.Run(name, func(t *testing.T) {
			testnet.Must(t, h.Enter())
			request := network.Request{ID: "default-box", Network: "cube", IfName: "eth0", Policy: direct}
			if tc.plugin {
				_, err := h.Open(ctx, request)
				testnet.Must(t, err)
			}
			a, err := Network{}.Attach(ctx, h.Config, box, tc.asked, true, slog.Default())
			testnet.Must(t, err)
			place, err := h.Get(ctx, "default-box")
			testnet.Must(t, err)
			passed := func() uint64 {
				t.Helper()
				_, err := a.Tap.Write(append(make([]byte, testnet.VnetHeader), testnet.UDP(netip.MustParseAddrPort("1.2.3.4:443"), "hello")...))
				testnet.Must(t, err)
				c, err := h.Datapath.Counters(place.Sandbox)
				if !errdefs.IsNotFound(err) {
					testnet.Must(t, err)
				}
				return c[bpf.TX].Packets
			}
			if n := passed(); n > 0 {
				t.Errorf("%d frames passed before", n)
			}
			testnet.Must(t, a.Open(ctx))
			if n := passed(); n != 1 {
				t.Errorf("%d frames passed then", n)
			}
			testnet.Must(t, a.Hold(ctx, a.Tap))
			if n := passed(); n != 1 {
				t.Errorf("%d frames passed while it is held", n)
			}
			testnet.Must(t, a.Resume(ctx))
			if n := passed(); n != 2 {
				t.Errorf("%d frames passed after all", n)
			}
			testnet.Must(t, a.Tap.Close())
			testnet.Must(t, Network{}.Release(ctx, h.Config, box))
			if tc.plugin {
				testnet.Must(t, h.Close(ctx, "default-box", "cube", "eth0"))
			}
		})
	}
}
