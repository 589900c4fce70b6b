package leftover

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
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

// TestPlaceOfADeadPod: with a pod whose shim is gone its place goes, and the pod's record not before.
func TestPlaceOfADeadPod(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	t.Setenv(config.FileEnv, h.Write())
	s := &search{cfg: h.Config}
	box := network.Pod{Namespace: "ns", ID: "box"}
	_, err := h.Claim(t.Context(), box)
	testnet.Must(t, err)
	_, err = h.Open(t.Context(), (&network.Settings{}).Request(box))
	testnet.Must(t, err)
	dead := shimrecord.Pod(filepath.Join(s.cfg.PodDir(), "0123"))
	unlock, err := dead.Make(t.Context())
	testnet.Must(t, err)
	unlock()
	testnet.Must(t, dead.SaveState(shimrecord.PodState{ID: "box", Namespace: "ns", MachineDir: filepath.Join(s.cfg.VMDir(), "box")}))
	age(t, string(dead))
	found := mustFind(t, s, "pod", string(dead))

	record := h.Path("attachments", "ns-box", "state.json")
	good, err := os.ReadFile(record)
	testnet.Must(t, err)
	testnet.Must(t, os.WriteFile(record, nil, 0o600))
	if err := found[0].remove(t.Context()); err == nil {
		t.Error("removed, with a place that can't be given back")
	}
	if st, err := dead.State(); err != nil || st.Undone {
		t.Errorf("record %+v, %v", st, err)
	}
	testnet.Must(t, os.WriteFile(record, good, 0o600))
	age(t, string(dead))
	mustGo(t, s, mustFind(t, s, "pod", string(dead)))
	if a, err := h.Get(t.Context(), "ns-box"); !errdefs.IsNotFound(err) {
		t.Errorf("its place: %+v, %v", a, err)
	}
}
