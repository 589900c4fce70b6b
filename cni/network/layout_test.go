package network_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/testnet"
)

// TestLayout: a daemon whose maps have another layout than those in force takes over all the same: what is open goes on until
// the daemon comes and then is open by its policy, with flows that begin anew, and what is closed stays closed.
func TestLayout(t *testing.T) {
	h := testnet.New(t)
	h.Up()
	ctx := t.Context()
	closed := request("default-closed")
	closed.Policy = nil
	boxes := []struct {
		pod  network.Pod
		open *network.Request
		want bpf.Reason
		tap  *os.File
		id   bpf.ID
	}{
		{pod: network.Pod{Namespace: "default", ID: "open"}, open: new(request("default-open")), want: bpf.TX},
		{pod: network.Pod{Namespace: "default", ID: "closed"}, open: &closed, want: bpf.Policy},
		{pod: network.Pod{Namespace: "default", ID: "claimed"}, want: bpf.NoSandbox},
	}
	for i := range boxes {
		b := &boxes[i]
		_, err := h.Claim(ctx, b.pod)
		testnet.Must(t, err)
		if b.open != nil {
			a, err := h.Open(ctx, *b.open)
			testnet.Must(t, err)
			b.id = a.Sandbox
		}
		b.tap, err = h.OpenTap(ctx, b.pod)
		testnet.Must(t, err)
		defer b.tap.Close()
	}
	same := func(when string) {
		t.Helper()
		for _, b := range boxes {
			if r := send(t, h, b.tap, b.id); r != b.want {
				t.Errorf("%s: a packet of %s is counted as %s, not %s", when, b.pod.ID, r, b.want)
			}
		}
	}
	same("before")
	maps, err := filepath.Glob(h.Path("bpf", "maps-*"))
	testnet.Must(t, err)
	if len(maps) != 1 {
		t.Fatalf("maps are in %v", maps)
	}
	old := h.Path("bpf", "maps-v0")
	testnet.Must(t, os.Rename(maps[0], old))
	same("with the daemon gone")

	h.Up()
	if flows, err := h.Datapath.Flows(boxes[0].id); err != nil || len(flows) != 0 {
		t.Errorf("flows %v, %v", flows, err)
	}
	same("after the take-over")
	if _, err := os.Stat(old); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the old maps are left: %v", err)
	}
}
