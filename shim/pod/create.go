package pod

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/shim/hooks"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/rootfs"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/shim/stdio"
	"github.com/cubesandbox/cube/vmm"
)

// identifyLimit bounds the greeting of the agent in a machine that has already answered once.
const identifyLimit = 10 * time.Second

// CreateRequest asks for a container.
type CreateRequest struct {
	ID, Bundle string
	Rootfs     []*types.Mount
	Stdio      stdio.Config
	// ConfigFile is the configuration to use, "" for the default one.
	ConfigFile string
}

// creation is a Create under way: what it has so far.
type creation struct {
	*Pod
	CreateRequest
	cfg     *config.Config
	log     *slog.Logger
	plan    *spec.Plan
	dir     string // the machine's
	state   record.State
	records record.Dir

	machine vmm.Machine
	guest   *guest.Guest
	root    *rootfs.Root
	host    *stdio.IO

	began  time.Time
	stages []any // of the log line: name, duration, …
}

// Create makes the machine and the container in it, which then waits for Start, and returns the machine's pid. After an
// error nothing is left.
func (p *Pod) Create(ctx context.Context, r CreateRequest) (pid int, err error) {
	if err := p.reserve(r.ID); err != nil {
		return 0, err
	}
	var c *container
	defer func() { p.settled(c) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()

	n := &creation{Pod: p, CreateRequest: r, log: p.env.Log.With("id", r.ID), records: record.Dir(r.Bundle), began: time.Now()}
	if err := n.prepare(); err != nil {
		return 0, err
	}
	made, err := n.run(ctx)
	if err != nil {
		return 0, err
	}
	c = made
	p.env.Events.Send(&eventsapi.TaskCreate{
		ContainerID: r.ID,
		Bundle:      r.Bundle,
		Rootfs:      r.Rootfs,
		IO:          &eventsapi.TaskIO{Stdin: r.Stdio.Stdin, Stdout: r.Stdio.Stdout, Stderr: r.Stdio.Stderr, Terminal: r.Stdio.Terminal},
		Pid:         uint32(c.vm.PID()),
	})
	go c.follow()
	return c.vm.PID(), nil
}

// prepare checks all that can be checked without acquiring anything.
func (n *creation) prepare() (err error) {
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

// run acquires things, one after the other or side by side, and gives them all back if any can't be had.
func (n *creation) run(ctx context.Context) (_ *container, err error) {
	var u undo.Stack
	defer func() {
		if err != nil {
			err = errors.Join(err, n.release(u.Release()))
		}
	}()
	if err := n.claim(); err != nil {
		return nil, err
	}
	u.Push(func() error { return n.env.Cleanup(n.cfg, n.dir) })

	n.root, err = rootfs.Open(ctx, rootfs.Source{
		Owner:      n.ID,
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
	n.stage("root")
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return n.launch(gctx) })
	g.Go(func() (err error) {
		n.host, err = stdio.Open(gctx, n.Stdio, stdio.Owner{ID: n.ID, Namespace: n.env.Namespace, Log: n.log, Timeout: n.cfg.Timeout})
		return err
	})
	err = g.Wait()
	if n.machine != nil {
		u.Push(n.stopMachine)
	}
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

	if err := n.recordMachine(); err != nil {
		return nil, err
	}
	u.Push(func() error { return runPoststop(n.plan.Hooks, n.ID, n.Bundle) })
	g, gctx = errgroup.WithContext(ctx)
	g.Go(func() error { return n.hostHooks(gctx) })
	g.Go(func() error { return n.identify(gctx) })
	g.Go(func() error { return n.plugIn(gctx) })
	if err := g.Wait(); err != nil {
		return nil, err
	}
	n.stage("guest")
	return n.createInGuest(ctx)
}

// release is what a failed run says of its undoing. The record goes on saying what is left if there is anything.
func (n *creation) release(err error) error {
	if err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	n.state.Undone = true
	return n.records.SaveState(n.state)
}

// claim makes the machine's directory, after having written down that it will be there.
func (n *creation) claim() error {
	n.dir = machineDir(n.cfg, n.ID, n.Bundle)
	n.state = record.State{ID: n.ID, Namespace: n.env.Namespace, MachineDir: n.dir, ConfigFile: n.ConfigFile, Poststop: n.plan.Hooks.Poststop}
	if err := n.records.SaveState(n.state); err != nil {
		return err
	}
	if _, err := os.Lstat(n.dir); !errors.Is(err, fs.ErrNotExist) {
		// The bundle's lock is ours and the name stands for the bundle, so nobody alive owns it.
		n.log.Warn("clean up what an earlier shim of this container has left", "dir", n.dir)
		if err := n.env.Cleanup(n.cfg, n.dir); err != nil {
			return fmt.Errorf("clean up what an earlier shim has left in %s: %w", n.dir, err)
		}
	}
	if err := os.MkdirAll(n.dir, 0o700); err != nil {
		return fmt.Errorf("make the machine's directory: %w", err)
	}
	return nil
}

// machineDir is named after the container, for people, and after its bundle: two containerds on one host may both have
// a container of that id.
func machineDir(cfg *config.Config, id, bundle string) string {
	sum := sha256.Sum256([]byte(bundle))
	return filepath.Join(cfg.VMDir(), fmt.Sprintf("%s-%x", id, sum[:4]))
}

// launch makes the machine.
func (n *creation) launch(ctx context.Context) error {
	began := time.Now()
	root := n.root.Take()
	if root != nil {
		defer root.Close()
	}
	m, err := n.env.Launcher(n.cfg).Launch(ctx, vmm.Request{
		ID:       n.ID,
		Dir:      n.dir,
		Shape:    n.plan.Shape,
		CPULimit: n.plan.CPULimit,
		NetNS:    n.plan.NetNS,
		Root:     root,
	})
	if err != nil {
		return err
	}
	n.machine = m
	n.log.Debug("machine launched", "took", time.Since(began), "pid", m.PID(), "shape", m.Shape())
	return nil
}

// identify greets the agent and gives the guest its identity, before which nothing of a workload runs in it.
func (n *creation) identify(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.Timeout(identifyLimit))
	defer cancel()
	if n.guest, err = guest.Connect(ctx, n.machine.Agent(), n.cfg.Timeout); err != nil {
		return n.deathOf(err)
	}
	if _, err = n.guest.Identify(ctx, hostname(n.plan.Guest.Hostname, n.ID), n.ID); err != nil {
		return n.deathOf(err)
	}
	return nil
}

// plugIn gives the machine the root's other disks. The guest sees them while it is being identified.
func (n *creation) plugIn(ctx context.Context) error {
	for _, d := range n.root.Disks {
		if err := n.machine.AddDisk(ctx, d); err != nil {
			return fmt.Errorf("plug in root disk %s: %w", d.File.Name(), err)
		}
	}
	return nil
}

// deathOf prefers the machine's own reason to that of a call that failed because of it. The channel ends a little before
// the machine.
func (n *creation) deathOf(err error) error {
	if n.guest != nil {
		select {
		case <-n.guest.Done():
		default:
			return err
		}
	}
	timer := time.NewTimer(n.cfg.Timeout(panicGrace))
	defer timer.Stop()
	select {
	case <-n.machine.Done():
		if death := n.machine.Err(); death != nil {
			return death
		}
	case <-timer.C:
	}
	return err
}

// hostname is the machine's where the container has none: its id, as far as it is a host name.
func hostname(wanted, id string) string {
	if wanted != "" {
		return wanted
	}
	const longest = 63 // of a label, RFC 1123
	return strings.Trim(id[:min(len(id), longest)], "._-")
}

// stopMachine undoes launch. The container never ran, so nothing in the guest is worth waiting for.
func (n *creation) stopMachine() error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err := n.machine.Stop(ctx)
	if n.guest != nil {
		n.guest.Close() // always nil
	}
	return err
}

func (n *creation) recordMachine() error {
	n.state.PID = n.machine.PID()
	n.state.Created = true // from here on hooks may have run
	return n.records.SaveState(n.state)
}

// hostHooks runs the hooks that come before the container.
func (n *creation) hostHooks(ctx context.Context) error {
	h := n.plan.Hooks
	state := specs.State{ID: n.ID, Status: specs.StateCreating, Pid: n.machine.PID(), Bundle: n.Bundle}
	//lint:ignore SA1019 docker and nvidia still use it
	if err := hooks.Run(ctx, "prestart", h.Prestart, state); err != nil {
		return err
	}
	return hooks.Run(ctx, "createRuntime", h.CreateRuntime, state)
}

// createInGuest has the agent make the container.
func (n *creation) createInGuest(ctx context.Context) (*container, error) {
	c := &container{
		id:      n.ID,
		bundle:  n.Bundle,
		events:  n.env.Events,
		log:     n.log,
		timeout: n.cfg.Timeout,
		records: n.records,
		state:   n.state,
		hooks:   n.plan.Hooks,
		execs:   map[string]*process{},
	}
	c.init = newProcess(c, "", n.Stdio)
	names, err := c.init.attach(n.host, n.guest)
	if err != nil {
		return nil, fmt.Errorf("open stdio in the guest: %w", err)
	}
	b, err := json.Marshal(n.plan.Guest)
	if err != nil {
		return nil, err
	}
	_, err = n.guest.CreateContainer(ctx, &api.CreateContainerRequest{
		Id:                n.ID,
		Spec:              b,
		Rootfs:            n.root.Guest,
		Stdio:             names,
		PrivilegedDevices: n.plan.PrivilegedDevices,
	})
	if err != nil {
		return nil, n.deathOf(err)
	}
	n.stage("container")
	n.log.Debug("container created", append(n.stages, "all", time.Since(n.began))...)
	c.vm = newVM(n.machine, n.guest, n.log, n.cfg.Timeout)
	return c, nil
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
