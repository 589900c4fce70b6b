package task

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/spec"
)

// tap is a file in the place of a tap, which knows whether it is open.
func (h *harness) tap() *os.File {
	h.Helper()
	f, err := os.Open(os.DevNull)
	h.must(err)
	h.Cleanup(func() { f.Close() })
	return f
}

func closed(f *os.File) bool {
	_, err := f.Stat()
	return errors.Is(err, os.ErrClosed)
}

// The machine gets the tap, the guest its address, and the shim keeps nothing.
func TestNetwork(t *testing.T) {
	h := newHarness(t)
	want := &pod.Attachment{Tap: h.tap(), Guest: &api.Network{Address: "192.0.2.2/30", Gateway: "192.0.2.1", Mtu: 1400}}
	asked := 0
	h.attach = func(ctx context.Context) (*pod.Attachment, error) {
		if _, ok := ctx.Deadline(); !ok {
			t.Error("no deadline")
		}
		asked++
		return want, nil
	}
	h.launcher.Before = func() {
		if closed(want.Tap) {
			t.Error("the tap is closed before the machine has it")
		}
	}
	h.must(h.pod.Reserve(spec.Common{}))
	if _, err := h.pod.StartMachine(t.Context(), small); err != nil {
		t.Fatal(err)
	}
	m := h.launcher.Last()
	if m.Tap != want.Tap || !closed(want.Tap) {
		t.Errorf("the machine's tap is %v, want %v, closed by the shim", m.Tap, want.Tap)
	}
	if !proto.Equal(m.Guest.Identity.Network, want.Guest) {
		t.Errorf("the guest's network is %v, want %v", m.Guest.Identity.Network, want.Guest)
	}
	app := h.member("app", nil, "exit", "0").run()
	app.wait("")
	app.delete()
	if asked != 1 {
		t.Errorf("asked %d times for one machine", asked)
	}
}

// A pod without a network has a machine without one.
func TestNoNetwork(t *testing.T) {
	h := newHarness(t)
	h.must(h.pod.Reserve(spec.Common{}))
	if _, err := h.pod.StartMachine(t.Context(), small); err != nil {
		t.Fatal(err)
	}
	if m := h.launcher.Last(); m.Tap != nil || m.Guest.Identity.Network != nil {
		t.Errorf("tap %v, network %v", m.Tap, m.Guest.Identity.Network)
	}
}

// A machine isn't made without the network that it was to have, and a tap not kept for one that couldn't be made.
func TestNetworkFails(t *testing.T) {
	h := newHarness(t)
	ctx := t.Context()
	h.attach = func(context.Context) (*pod.Attachment, error) { return nil, errors.New("no tap is left") }
	h.must(h.pod.Reserve(spec.Common{}))
	_, err := h.pod.StartMachine(ctx, small)
	if err == nil || !strings.Contains(err.Error(), "attach the pod to the network: no tap is left") || len(h.launcher.All()) != 0 {
		t.Errorf("%d machines, %v", len(h.launcher.All()), err)
	}
	tap := h.tap()
	h.attach = func(context.Context) (*pod.Attachment, error) { return &pod.Attachment{Tap: tap}, nil }
	h.launcher.Fail = errors.New("no memory")
	if _, err := h.pod.StartMachine(ctx, small); err == nil || !closed(tap) {
		t.Errorf("the tap's closed: %v; %v", closed(tap), err)
	}
	if !h.podState().Undone {
		t.Errorf("record %+v", h.podState())
	}
}
