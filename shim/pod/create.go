package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/hooks"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/rootfs"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/shim/stdio"
	"github.com/cubesandbox/cube/vmm"
)

// CreateRequest asks for a container.
type CreateRequest struct {
	ID, Bundle string
	Rootfs     []*types.Mount
	Stdio      stdio.Config
	// ConfigFile is the configuration to use, or else Config, which is one itself. Without either it is the default one.
	ConfigFile string
	Config     []byte
}

// creation is a Create under way: what it has so far.
type creation struct {
	*Pod
	CreateRequest
	cfg     *config.Config
	log     *slog.Logger
	plan    *spec.Plan
	records record.Bundle
	state   record.State
	root    *rootfs.Root
	host    *stdio.IO
	shares  *shares

	claim  *claim
	making *making // the machine's; nil for all but the first container
	vm     *vm
	disks  []string // serials

	began  time.Time
	stages []any // of the log line: name, duration, …
}

// Create makes the container, which then waits for Start, and returns the machine's pid. The first one makes the machine,
// too; the others wait for that. After an error nothing is left.
func (p *Pod) Create(ctx context.Context, r CreateRequest) (pid int, err error) {
	if err := p.reserve(r.ID); err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			p.forget(r.ID)
		}
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()

	n := &creation{Pod: p, CreateRequest: r, log: p.env.Log.With("id", r.ID), records: record.Bundle(r.Bundle), began: time.Now()}
	if err := n.prepare(); err != nil {
		return 0, err
	}
	c, err := n.claimed(ctx)
	if err != nil {
		return 0, err
	}
	p.env.Events.Send(&eventsapi.TaskCreate{
		ContainerID: r.ID,
		Bundle:      r.Bundle,
		Rootfs:      r.Rootfs,
		IO:          &eventsapi.TaskIO{Stdin: r.Stdio.Stdin, Stdout: r.Stdio.Stdout, Stderr: r.Stdio.Stderr, Terminal: r.Stdio.Terminal},
		Pid:         uint32(c.vm.PID()),
	})
	p.created(c)
	c.created()
	go c.watch()
	return c.vm.PID(), nil
}

// prepare checks all that can be checked without acquiring anything.
func (n *creation) prepare() (err error) {
	if n.ConfigFile == "" && len(n.Config) > 0 {
		if n.ConfigFile, err = n.env.Dir.SaveConfig(n.ID, n.Config); err != nil {
			return err
		}
	}
	if n.cfg, err = config.Load(n.ConfigFile); err != nil {
		return errdefs.ErrInvalidArgument.WithMessage(err.Error())
	}
	s, err := spec.Load(n.Bundle)
	if err != nil {
		return err
	}
	if n.plan, err = spec.Transform(s, n.cfg); err != nil {
		return err
	}
	n.plan.Guest.Process.Terminal = n.Stdio.Terminal // what containerd's stdio is made for decides
	for _, what := range n.plan.Dropped {
		n.log.Info("left out what only means something on the host", "what", what)
	}
	n.stage("spec")
	return nil
}

// claimed is run with a claim on the machine, which the container takes over.
func (n *creation) claimed(ctx context.Context) (c *container, err error) {
	claim, leads, err := n.use(n.ID, n.plan.Sandbox)
	if err != nil {
		return nil, err
	}
	n.claim = claim
	if !leads {
		if c, err = n.run(ctx); err != nil && claim.end() && n.vm != nil {
			err = errors.Join(err, n.vm.stop())
		}
		return c, err
	}
	n.making = n.newMaking(n.cfg, n.ConfigFile, n.plan.Shape)
	n.making.request.CPULimit, n.making.request.NetNS = n.plan.CPULimit, n.plan.NetNS
	if name := n.plan.Guest.Hostname; name != "" {
		n.making.hostname = name
	}
	if c, err = n.run(ctx); err != nil {
		n.hasNot(claim.machine, err)
		return nil, err
	}
	n.has(claim.machine, n.vm)
	return c, nil
}

// run acquires things, one after the other or side by side, and gives them all back if any can't be had.
func (n *creation) run(ctx context.Context) (_ *container, err error) {
	var u undo.Stack
	defer func() {
		if err != nil {
			err = errors.Join(err, n.release(u.Release()))
		}
	}()
	if err := n.record(); err != nil {
		return nil, err
	}
	if n.making != nil {
		if err := n.making.claim(); err != nil {
			return nil, err
		}
		u.Push(n.making.release)
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
		return nil, err
	}
	defer n.root.Close() // QEMU has its own duplicates
	for _, d := range n.root.Guest.Disks {
		n.disks = append(n.disks, d.Serial)
	}
	n.stage("root")

	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return n.machine(gctx) })
	g.Go(func() (err error) {
		n.host, err = stdio.Open(gctx, n.Stdio, stdio.Owner{ID: n.ID, Namespace: n.env.Namespace, Log: n.log, Timeout: n.cfg.Timeout})
		return err
	})
	err = g.Wait()
	if n.host != nil {
		u.Push(func() error { n.host.Close(); return nil })
	}
	if err != nil {
		return nil, err
	}
	n.stage("machine")
	if n.root.Packed {
		n.log.Info("the root was packed into an image: changes to it end with the container; the cube snapshotter keeps them")
	}

	if err := n.recordPID(); err != nil {
		return nil, err
	}
	u.Push(func() error { return runPoststop(n.plan.Hooks, n.ID, n.Bundle) })
	u.Push(func() error { return n.shares.close() })
	if n.making == nil {
		u.Push(func() error { return n.vm.takeOut(n.ID, n.disks) })
	}
	g, gctx = errgroup.WithContext(ctx)
	g.Go(func() error { return n.serveShares(gctx) })
	g.Go(func() error { return n.hostHooks(gctx) })
	g.Go(func() error { return n.plugIn(gctx) })
	if n.making != nil {
		g.Go(func() (err error) {
			n.vm, err = n.making.identify(gctx)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	n.stage("guest")
	return n.createInGuest(ctx)
}

// record writes down that something will be there.
func (n *creation) record() error {
	n.state = record.State{ID: n.ID, Namespace: n.env.Namespace, ConfigFile: n.ConfigFile, Poststop: n.plan.Hooks.Poststop}
	if err := n.env.Dir.Join(n.ID, n.records); err != nil {
		return err
	}
	return n.records.SaveState(n.state)
}

// release is what a failed run says of its undoing. The record goes on saying what is left if there is anything.
func (n *creation) release(err error) error {
	if err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	n.state.Undone = true
	return errors.Join(n.records.SaveState(n.state), n.env.Dir.Leave(n.ID))
}

// machine launches the machine, or waits for it.
func (n *creation) machine(ctx context.Context) (err error) {
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

func (n *creation) recordPID() error {
	n.state.PID = n.running().PID()
	n.state.Created = true // from here on hooks may have run
	return n.records.SaveState(n.state)
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
