package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cubesandbox/cube/bpf"
	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
)

// networkBench measures the network without machines, in network namespaces of its own: the path's host is where Cube's
// network is up.
type networkBench struct {
	*network.Network
	cfg      *config.Config
	file     string // cfg, as a plugin reads it
	bin      string
	path     *path
	datapath *bpf.Datapath
	n        int
}

func networks(ctx context.Context, root string, n int) (err error) {
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()
	b := &networkBench{bin: filepath.Join(root, "bin"), n: n}
	if err := b.setUp(ctx, &u); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{b.throughput, b.attachments, b.policies} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// setUp has Cube's network up on the host of a path.
func (b *networkBench) setUp(ctx context.Context, u *undo.Stack) error {
	dir, err := os.MkdirTemp("", "cube-bench-")
	if err != nil {
		return err
	}
	u.Push(func() error { return os.RemoveAll(dir) })
	b.file = filepath.Join(dir, "config.toml")
	if err := os.WriteFile(b.file, fmt.Appendf(nil, "run_dir = %q\nstate_dir = %q\n[network]\nwarm_taps = %d\n", filepath.Join(dir, "run"), dir, b.n), 0o600); err != nil {
		return err
	}
	if b.cfg, err = config.Load(b.file); err != nil {
		return err
	}
	b.Network = network.New(b.cfg)
	if b.path, err = newPath(u, netip.Prefix{}); err != nil {
		return err
	}
	return b.path.host.Do(func() error {
		u.Push(func() error {
			return b.path.host.Do(func() error { // whatever has ended ctx
				return errors.Join(b.Down(context.WithoutCancel(ctx)), gateway.Down(context.WithoutCancel(ctx), b.cfg))
			})
		})
		g, err := gateway.Up(ctx, b.cfg)
		if err != nil {
			return err
		}
		if b.datapath, err = b.Up(ctx, g); err != nil {
			return errors.Join(err, g.Close())
		}
		u.Push(b.datapath.Close)
		return g.Close()
	})
}
