package stack

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/netstate"
	"github.com/cubesandbox/cube/internal/testnet"
)

// TestPurge: Down leaves the network and no sandbox in it, and of a purged one nothing stays, whatever there was of it.
func TestPurge(t *testing.T) {
	for name, spoil := range map[string]func(*testing.T, *testnet.Host){
		"whole": func(*testing.T, *testnet.Host) {},
		"without its device": func(t *testing.T, h *testnet.Host) {
			l, err := netlink.LinkByName("cube-gw")
			testnet.Must(t, err)
			testnet.Must(t, netlink.LinkDel(l))
		},
		"a damaged record": func(t *testing.T, h *testnet.Host) {
			testnet.Must(t, os.WriteFile(h.Path("attachments", "default-box", "state.json"), []byte("{"), 0o600))
		},
		"half a datapath":    func(t *testing.T, h *testnet.Host) { testnet.Must(t, os.RemoveAll(h.Path("bpf", "maps-v1"))) },
		"without a datapath": func(t *testing.T, h *testnet.Host) { testnet.Must(t, network.New(h.Config).Down(t.Context())) },
		"the gateway only": func(t *testing.T, h *testnet.Host) {
			testnet.Must(t, errors.Join(network.New(h.Config).Down(t.Context()), os.RemoveAll(h.Path("bpf"))))
		},
	} {
		for _, plain := range []bool{true, false} { // whether without --purge before
			if plain && name != "whole" && name != "a damaged record" {
				continue
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel() // each has a host of its own, and waits for the kernel most of the time
				h := testnet.New(t)
				h.Config.StateDir = t.TempDir()
				before, err := netstate.Take("up0", "up1")
				testnet.Must(t, err)
				h.Up()
				pod := network.Pod{Namespace: "default", ID: "box"}
				_, err = h.Claim(t.Context(), pod)
				testnet.Must(t, err)
				_, err = h.Open(t.Context(), network.Request{ID: "default-box", Network: "test", IfName: "eth0"})
				testnet.Must(t, err)
				_, err = h.Refill(t.Context())
				testnet.Must(t, err)
				spoil(t, h)
				down := func(purge bool) {
					t.Helper()
					o := Options{Log: slog.New(slog.DiscardHandler), Progress: func(string) func() { return func() {} }}
					testnet.Must(t, Down(context.WithoutCancel(t.Context()), h.Config, 0, purge, o))
				}
				if plain {
					down(false)
					if err := h.Status(t.Context()); name == "whole" && err != nil {
						t.Errorf("the network is down: %v", err)
					}
					for _, dir := range []string{"attachments", "addresses", "taps", "free", "ports"} {
						if entries, err := os.ReadDir(h.Path(dir)); !errors.Is(err, fs.ErrNotExist) && (err != nil || len(entries) > 0) {
							t.Errorf("%s has %v, %v", dir, entries, err)
						}
					}
				}
				for range 2 {
					down(true)
				}
				after, err := netstate.Take("up0", "up1")
				testnet.Must(t, err)
				for _, d := range netstate.Diff(before, after) {
					t.Error(d)
				}
				if entries, err := os.ReadDir(h.Config.RunDir); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("the run directory has %v, %v", entries, err)
				}
			})
		}
	}
}
