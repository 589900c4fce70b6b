package pod

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/shim/hooks"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/rootfs"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/shim/stdio"
	"github.com/cubesandbox/cube/vmm"
)

// run acquires things, one after the other or side by side, and gives them all back if any can't be had.
func (n *creation) run(ctx context.Context) (_ *container, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, n.release())
		}
		if n.root != nil {
			n.root.Close() // QEMU has its own duplicates
		}
	}()
	for _, step := range []func(context.Context) error{n.claimDirs, n.openRoot, n.launch, n.equip} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	return n.createInGuest(ctx)
}

// claimDirs writes down what will be there, before any of it is.
func (n *creation) claimDirs(ctx context.Context) error {
	n.state = record.State{ID: n.ID, Namespace: n.env.Namespace, ConfigFile: n.ConfigFile, Poststop: n.plan.Hooks.Poststop}
	if err := n.env.Dir.Join(n.ID, n.records); err != nil {
		return err
	}
	if err := n.records.SaveState(n.state); err != nil {
		return err
	}
	if n.making == nil {
		return nil
	}
	if err := n.making.claim(ctx); err != nil {
		return err
	}
	n.undo.Push(n.making.release)
	return nil
}

// release undoes what there is. The record goes on saying what is left if there is anything.
func (n *creation) release() error {
	if err := n.undo.Release(); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	n.state.Undone = true
	return errors.Join(n.records.SaveState(n.state), n.env.Dir.Leave(n.ID))
}

// openRoot opens the disks of the root. Those of a container that was saved come with the machine.
func (n *creation) openRoot(ctx context.Context) (err error) {
	if n.saved != nil {
		n.root, n.disks = &rootfs.Root{}, n.saved.Disks
		return nil
	}
	if n.cold != "" {
		if err := n.coldRoot(ctx); err != nil {
			return err
		}
	}
	n.root, err = rootfs.Open(ctx, rootfs.Source{
		Owner:      n.ID,
		Plugged:    n.making == nil,
		Mounts:     n.Rootfs,
		Dir:        n.plan.Root,
		Scratch:    filepath.Join(n.cfg.StoreDir(), "packed"),
		ImageSize:  int64(n.cfg.Store.DiskSize),
		MountPoint: filepath.Join(n.Bundle, "rootfs"),
	})
	if err != nil {
		return err
	}
	for _, d := range n.root.Guest.Disks {
		n.disks = append(n.disks, d.Serial)
	}
	if n.root.Packed {
		n.log.Info("the root was packed into an image: changes to it end with the container; the cube snapshotter keeps them")
	}
	n.stage("root")
	return nil
}

// launch gets the machine, and the host's ends of stdio.
func (n *creation) launch(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return n.getMachine(gctx) })
	g.Go(func() (err error) {
		n.host, err = stdio.Open(gctx, n.Stdio, stdio.Owner{ID: n.ID, Namespace: n.env.Namespace, Log: n.log, Timeout: n.cfg.Timeout})
		return err
	})
	err := g.Wait()
	if n.host != nil {
		n.undo.Push(func() error { n.host.Close(); return nil })
	}
	n.stage("machine")
	return err
}

// getMachine launches the machine, or waits for it.
func (n *creation) getMachine(ctx context.Context) (err error) {
	if n.making != nil {
		root := n.root.Take()
		if root != nil {
			defer root.Close()
		}
		return n.making.launch(ctx, root)
	}
	if n.vm, err = n.await(ctx, n.claim.machine); err != nil {
		return err
	}
	return spec.MemoryFits(n.plan.Guest.Linux.Resources, n.vm.machine.Shape())
}

// running is the machine, which the first container has before it has an agent.
func (n *creation) running() vmm.Machine {
	if n.making != nil {
		return n.making.machine
	}
	return n.vm.machine
}

// equip brings together what the container needs beside the machine, and the agent, before any of the workload runs.
func (n *creation) equip(ctx context.Context) error {
	n.state.PID = n.running().PID()
	n.state.Created = true // from here on hooks may have run
	if err := n.records.SaveState(n.state); err != nil {
		return err
	}
	n.undo.Push(func() error { return runPoststop(n.plan.Hooks, n.ID, n.Bundle) })
	if n.making == nil {
		n.undo.Push(func() error { return n.vm.takeOut(n.ID, n.disks) })
	}
	// Before the guest is asked to undo: it may be waiting for the helper.
	n.undo.Push(func() error { return n.shares.close() })
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return n.serveShares(ctx) })
	g.Go(func() error { return n.hostHooks(ctx) })
	g.Go(func() error { return n.plugIn(ctx) })
	if n.making != nil {
		g.Go(func() (err error) {
			n.vm, err = n.making.identify(ctx)
			return err
		})
	}
	err := g.Wait()
	n.stage("guest")
	return err
}

// hostHooks runs the hooks that come before the container.
func (n *creation) hostHooks(ctx context.Context) error {
	h := n.plan.Hooks
	state := specs.State{ID: n.ID, Status: specs.StateCreating, Pid: n.running().PID(), Bundle: n.Bundle}
	//lint:ignore SA1019 docker and nvidia still use it
	if err := hooks.Run(ctx, "prestart", h.Prestart, state); err != nil {
		return err
	}
	return hooks.Run(ctx, "createRuntime", h.CreateRuntime, state)
}

// plugIn gives the machine the root's disks that it doesn't have from its start. The guest sees them while it is being
// identified.
func (n *creation) plugIn(ctx context.Context) error {
	for _, d := range n.root.Disks {
		if err := n.running().AddDisk(ctx, d); err != nil {
			return fmt.Errorf("plug in root disk %s: %w", d.File.Name(), err)
		}
	}
	return nil
}

// stage notes how long a part took.
func (n *creation) stage(name string) {
	var sum time.Duration
	for _, v := range n.stages {
		if d, ok := v.(time.Duration); ok {
			sum += d
		}
	}
	n.stages = append(n.stages, name, time.Since(n.began)-sum)
}
