package leftover

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
	shimrecord "github.com/cubesandbox/cube/shim/record"
)

// TestAttachments: a place is nobody's when its pod is, and nobody is left to close it.
func TestAttachments(t *testing.T) {
	h := testnet.New(t)
	s := &search{cfg: h.Config}
	mustFind(t, s, "network attachment") // there is no network
	h.Up()
	ctx := t.Context()
	netns := write(t, filepath.Join(h.Config.RunDir, "netns"), "")
	old := func(key string) string {
		age(t, h.Path("attachments", key, "state.json"))
		return key
	}
	claim := func(id string) string {
		_, err := h.Claim(ctx, network.Pod{Namespace: "ns", ID: id})
		testnet.Must(t, err)
		return old("ns-" + id)
	}
	open := func(id, name, netns string) string {
		_, err := h.Open(ctx, network.Request{ID: id, Network: name, IfName: "eth0", NetNS: netns})
		testnet.Must(t, err)
		return old(id)
	}
	gone := netns + "-gone"
	// Whose owners may be there.
	claim("live")
	open("ns-live", network.Own, "")
	live := shimrecord.Pod(filepath.Join(s.cfg.PodDir(), "0123"))
	unlock, err := live.Make(ctx)
	testnet.Must(t, err)
	unlock()
	testnet.Must(t, live.SaveState(shimrecord.PodState{ID: "live", Namespace: "ns"}))
	open("ns-cni", "net", netns)
	open("ns-unknown", "net", "")
	claim("between") // its pod is gone, and CNI's DEL to come
	open("ns-between", "net", netns)
	claim("young")
	testnet.Must(t, os.Chtimes(h.Path("attachments", "ns-young", "state.json"), time.Now(), time.Now()))
	// Whose are not.
	want := []string{claim("closed"), claim("own"), claim("runtime"), open("ns-waiting", "net", gone)}
	open("ns-own", network.Own, "")
	open("ns-runtime", "net", gone)

	found := mustFind(t, s, "network attachment", want...)
	if _, err := Attachments(ctx, s.cfg); err != nil {
		t.Error(err)
	}
	// One that somebody takes meanwhile stays.
	testnet.Must(t, live.SaveState(shimrecord.PodState{ID: "closed", Namespace: "ns"}))
	testnet.Must(t, found[0].remove(ctx))
	if _, err := h.Get(ctx, "ns-closed"); err != nil {
		t.Errorf("the one that was claimed again: %v", err)
	}
	testnet.Must(t, live.SaveState(shimrecord.PodState{ID: "live", Namespace: "ns"}))
	old("ns-closed")
	for range 2 {
		for _, l := range found {
			testnet.Must(t, l.remove(ctx))
		}
	}
	mustFind(t, s, "network attachment")
	all, err := h.List(ctx)
	testnet.Must(t, err)
	if len(all) != 5 {
		t.Errorf("%d are there, not the 5 that have owners", len(all))
	}
}

// TestTaps: of what was being made or freed by who was killed nothing stays.
func TestTaps(t *testing.T) {
	h := testnet.New(t)
	s := &search{cfg: h.Config}
	h.Up()
	_, err := h.Refill(t.Context())
	testnet.Must(t, err)
	_, err = h.Claim(t.Context(), network.Pod{Namespace: "ns", ID: "live"})
	testnet.Must(t, err)
	mustFind(t, s, "tap")
	testnet.Must(t, os.Remove(h.Path("free", "2")))
	mustGo(t, s, mustFind(t, s, "tap", h.Config.Network.TapPrefix+"2"))
	if _, err := h.Get(t.Context(), "ns-live"); err != nil {
		t.Error(err)
	}
}
