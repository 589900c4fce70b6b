package network_test

import (
	"os"
	"testing"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
)

// TestClear: whatever there is goes, damaged or in use, and the network stays up for what comes.
func TestClear(t *testing.T) {
	h := testnet.New(t)
	testnet.Must(t, h.Clear(t.Context())) // that there is no network is fine
	h.Up()
	ctx := t.Context()
	_, err := h.Claim(ctx, pod)
	testnet.Must(t, err)
	tap, err := h.OpenTap(ctx, pod)
	testnet.Must(t, err)
	defer tap.Close()
	for _, id := range []string{"default-box", "other", "damaged"} {
		_, err := h.Open(ctx, request(id))
		testnet.Must(t, err)
	}
	_, err = h.Claim(ctx, network.Pod{Namespace: "default", ID: "closed"})
	testnet.Must(t, err)
	_, err = h.Refill(ctx)
	testnet.Must(t, err)
	testnet.Must(t, os.WriteFile(h.Path("attachments", "damaged", "state.json"), []byte("{"), 0o600))

	testnet.Must(t, h.Clear(ctx))
	if left := h.Left(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	testnet.Must(t, h.Status(ctx))
	a, err := h.Open(ctx, request("default-box"))
	testnet.Must(t, err)
	if a.Pod != nil {
		t.Errorf("it is %v's", a.Pod)
	}
}
