package network_test

import (
	"os"
	"slices"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
)

func TestFind(t *testing.T) {
	h := testnet.New(t)
	ctx := t.Context()
	if _, err := h.Find(ctx, "default", "box"); !errdefs.IsUnavailable(err) {
		t.Errorf("of a network that isn't up: %v", err)
	}
	h.Up()
	for _, id := range []string{"default-box", "other-box", "0123abcd", "other-default-box"} {
		_, err := h.Open(ctx, request(id))
		testnet.Must(t, err)
	}
	for _, tc := range []struct{ namespace, name, key string }{
		{"default", "box", "default-box"},
		{"other", "box", "other-box"},
		{"default", "other/box", "other-box"},
		{"default", "other-box", "other-box"},
		{"default", "k8s.io/0123abcd", "0123abcd"},
		{"k8s.io", "0123abcd", "0123abcd"},
		{"default", "0123abcd", "0123abcd"},
		// What a container is called in the namespace comes before what CNI plugins call another.
		{"other", "default-box", "other-default-box"},
	} {
		if a, err := h.Find(ctx, tc.namespace, tc.name); err != nil || a.Key != tc.key {
			t.Errorf("%s in %s: %+v, %v", tc.name, tc.namespace, a, err)
		}
	}
	for _, name := range []string{"none", "default/none", "none/box"} {
		if _, err := h.Find(ctx, "default", name); !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"", "a b", "../box", "default/../box"} {
		if _, err := h.Find(ctx, "default", name); !errdefs.IsInvalidArgument(err) && !errdefs.IsNotFound(err) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// TestInspect: what is looked at is the container's, while it is open.
func TestInspect(t *testing.T) {
	h := testnet.New(t)
	ctx := t.Context()
	if _, err := h.Overview(ctx); !errdefs.IsUnavailable(err) {
		t.Errorf("of a network that isn't up: %v", err)
	}
	h.Up()
	_, err := h.Refill(ctx)
	testnet.Must(t, err)
	look := func() error {
		_, flows := h.Flows(ctx, "default-box")
		_, counters := h.Counters(ctx, "default-box")
		_, decide := h.Decide(ctx, "default-box", remote.Addr(), policy.UDP, remote.Port())
		tap := h.CheckTap(ctx, "default-box")
		for _, err := range []error{counters, decide, tap} {
			if errdefs.IsNotFound(err) != errdefs.IsNotFound(flows) {
				t.Errorf("one says %v, another one %v", flows, err)
			}
		}
		return flows
	}
	if err := look(); !errdefs.IsNotFound(err) {
		t.Errorf("of none: %v", err)
	}
	a, err := h.Claim(ctx, pod)
	testnet.Must(t, err)
	if err := look(); !errdefs.IsNotFound(err) {
		t.Errorf("of a closed one: %v", err)
	}
	tap, err := h.OpenTap(ctx, pod)
	testnet.Must(t, err)
	defer func() { _ = tap.Close() }()
	_, err = h.Open(ctx, request("default-box"))
	testnet.Must(t, err)
	_, err = h.Open(ctx, request("default-other"))
	testnet.Must(t, err)
	if r := send(t, h, tap, a.Sandbox); r != bpf.TX {
		t.Errorf("counted as %s", r)
	}
	testnet.Must(t, look())
	flows, err := h.Flows(ctx, "default-box")
	if err != nil || len(flows) != 1 || flows[0].Remote != remote.Addr() || flows[0].RemotePort != remote.Port() {
		t.Errorf("flows %+v, %v", flows, err)
	}
	if flows, err := h.Flows(ctx, "default-other"); err != nil || len(flows) != 0 {
		t.Errorf("another one's flows: %+v, %v", flows, err)
	}
	if c, err := h.Counters(ctx, "default-box"); err != nil || c[bpf.TX].Packets != 1 {
		t.Errorf("counters %v, %v", c, err)
	}
	if d, err := h.Decide(ctx, "default-box", remote.Addr(), policy.UDP, remote.Port()); err != nil || d.Action != policy.Direct {
		t.Errorf("%+v, %v", d, err)
	}

	_, err = h.Claim(ctx, network.Pod{Namespace: "default", ID: "closed"})
	testnet.Must(t, err)
	o, err := h.Overview(ctx)
	testnet.Must(t, err)
	if o.Open != 2 || o.Closed != 1 || o.Warm != 0 || o.MTU != 1500 || o.Pool != h.Config.Network.Pool || o.Hook == "" || len(o.Findings) != 0 {
		t.Errorf("%+v", o)
	}
	if !slices.Equal(o.Uplink, []string{"up0"}) {
		t.Errorf("uplink %v", o.Uplink)
	}
	testnet.Must(t, os.WriteFile(h.Path("attachments", "default-other", "state.json"), []byte("{"), 0o600))
	device, err := netlink.LinkByName(h.Config.Network.Device)
	testnet.Must(t, err)
	testnet.Must(t, netlink.LinkSetMTU(device, 1400))
	o, err = h.Overview(ctx)
	testnet.Must(t, err)
	if len(o.Findings) != 2 || o.Findings[0].Level != gateway.Broken || o.Findings[1].Level != gateway.Broken || o.Open != 1 {
		t.Errorf("%+v", o)
	}
	testnet.Must(t, os.RemoveAll(h.Path("attachments", "default-other")))
}
