package pod

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/rootfs"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/shim/stdio"
)

// CreateRequest asks for a container.
type CreateRequest struct {
	ID, Bundle string
	Rootfs     []*types.Mount
	Stdio      stdio.Config
	// ConfigFile is the configuration to use, or else Config, which is one itself. Without either it is the default one.
	ConfigFile string
	Config     []byte
	// Checkpoint is the directory of a checkpoint that the container is made from, "" for a fresh one. Its root is the saved
	// one then, not Rootfs, and what runs in it what was saved.
	Checkpoint string
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
	specSum string
	from    *origin          // nil for a fresh container, as is saved
	saved   *saved.Container // what it goes on as
	// cold is why it begins anew with the disk of a snapshot, coldFrom; "" if it doesn't.
	cold     string
	coldFrom *origin
	undo     undo.Stack

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
	if err := n.orCold(ctx); err != nil {
		return 0, err
	}
	if err := n.room(ctx); err != nil {
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
		Pid:         uint32(c.vm().PID()),
	})
	p.created(c)
	c.created()
	go c.watch()
	return c.vm().PID(), nil
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
	common := n.Pod.reserved()
	if common != nil {
		spec.Join(s, n.env.ID)
	}
	if n.plan, err = spec.Transform(s, n.cfg); err != nil {
		return err
	}
	if common != nil {
		if err := n.plan.Inherit(*common); err != nil {
			return err
		}
	}
	n.plan.Guest.Process.Terminal = n.Stdio.Terminal // what containerd's stdio is made for decides
	if err := n.checkpointed(); err != nil {
		return err
	}
	for _, what := range n.plan.Dropped {
		n.log.Info("left out what only means something on the host", "what", what)
	}
	n.stage("spec")
	return nil
}

// room refuses what would fill the store. A paused container can go on: it takes no more than it has, and may be what frees
// some of it.
func (n *creation) room(ctx context.Context) error {
	if from := cmp.Or(n.from, n.coldFrom); from != nil && from.pod.Purpose == saved.ForPause {
		return nil
	}
	if err := n.env.Launcher(n.cfg).Room(ctx); err != nil {
		return fmt.Errorf("create container %s: %w", n.ID, err)
	}
	return nil
}

// claimed is run with a claim on the machine, which the container takes over.
func (n *creation) claimed(ctx context.Context) (c *container, err error) {
	claim, leads, err := n.use(n.ID, n.plan.Sandbox)
	if err != nil {
		return nil, err
	}
	n.claim = claim
	if !leads && (n.from != nil || n.cold != "") {
		claim.end()
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("restore container %s: its pod has a virtual machine already", n.ID))
	}
	if !leads {
		if c, err = n.run(ctx); err != nil && claim.end() && n.vm != nil {
			err = errors.Join(err, n.vm.stop())
		}
		return c, err
	}
	n.making = n.newMaking(n.cfg, n.ConfigFile, n.plan.Machine, n.plan.NetNS)
	if name := n.plan.Guest.Hostname; name != "" {
		n.making.hostname = name
	}
	if n.from != nil {
		n.making.goOn(n.from)
	}
	if n.cold != "" {
		n.making.cold, n.making.snapshot = n.cold, n.coldFrom.info.ID
		n.making.ownDisks()
	}
	if c, err = n.run(ctx); err != nil {
		n.hasNot(claim.machine, err)
		return nil, err
	}
	n.has(claim.machine, n.vm)
	return c, nil
}
