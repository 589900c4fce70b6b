package qemu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/process"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/cgroup"
	"github.com/cubesandbox/cube/vmm/jail"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/qmp"
	"github.com/cubesandbox/cube/vmm/record"
)

const (
	// startTimeout is how long QEMU may take to its first word, restoring included.
	startTimeout = 15 * time.Second
	// commandTimeout is how long QEMU may take for a command that nobody outside waits for.
	commandTimeout = 5 * time.Second
)

// Spec is one machine. Its files stay the caller's, who may close them after Start.
type Spec struct {
	ID  string
	Dir string // see vmm.Request
	// QEMU is the artefact directory to run it from.
	QEMU     string
	Shape    vmm.Shape
	CPULimit float64
	NetNS    string
	Tap      *os.File // see vmm.Request
	Accel    accel.Kind
	// Memory is a file of the shape's size: a sealed one, of which the machine has a copy of its own as it writes, or with
	// Share one that becomes the machine's own (memory.Scratch), until its QEMU has ended.
	Memory *os.File
	Share  bool
	// Modules is the image of the guest's kernel modules, opened for reading.
	Modules *os.File
	// Root is the image of the first disk, or nil.
	Root *os.File
	// NoRoot says that the machine was saved after its first disk had been removed.
	NoRoot bool
	// Plugged are the disks that were plugged in when it was saved.
	Plugged []Plugged
	// Boot starts the guest from its kernel, State (opened for reading) restores it: one of them is set.
	Boot  *Boot
	State *os.File
	// Platform and Base are for the machine's Save. Without Base, which goes with a Memory that isn't shared, it can't be
	// saved.
	Platform vmm.Platform
	Base     *Base
}

// Base is what a machine's memory was before the machine had it.
type Base struct {
	// File is Memory as a file of the store, for clones of it, opened for reading.
	File *os.File
	// Digests are File's.
	Digests memory.Digests
	// Snapshot is the id of the snapshot that the file is of, "" for a base snapshot.
	Snapshot string
}

// Plugged is a disk that a restored machine has had since before it was saved.
type Plugged struct {
	vmm.Disk
	LUN int
}

// disk is that of the i-th in the machine.
func (p *Plugged) disk(i int) Disk {
	return Disk{Serial: p.Serial, FDSet: firstFDSet + 1 + i, Bus: scsiBus, LUN: p.LUN, ReadOnly: p.ReadOnly}
}

// Driver starts machines.
type Driver struct {
	cfg  *config.Config
	log  *slog.Logger
	uids *jail.UIDs
}

// NewDriver returns the driver of this host.
func NewDriver(cfg *config.Config, log *slog.Logger) *Driver {
	return &Driver{cfg: cfg, log: log, uids: jail.NewUIDs(cfg)}
}

// Start returns a machine that runs: its guest is booting, or goes on from where it was saved. On error nothing is left,
// s.Dir included.
func (d *Driver) Start(ctx context.Context, s *Spec) (_ *Machine, err error) {
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return os.RemoveAll(s.Dir) })
	began := time.Now()

	if s.Tap != nil {
		if err := validTap(s.Tap); err != nil {
			return nil, err
		}
	}
	rec, err := record.New(ctx, s.Dir, s.ID)
	if err != nil {
		return nil, err
	}
	uid, err := d.uids.Take(s.Dir, func(uid uint32) error {
		return rec.Update(func(r *record.State) { r.UID, r.Cgroup = uid, record.CgroupName(d.cfg, s.Dir, s.ID) })
	})
	if err != nil {
		return nil, err
	}
	u.Push(func() error { return d.uids.Release(uid, s.Dir) })
	limits, err := limits(s)
	if err != nil {
		return nil, err
	}
	group, err := cgroup.Create(ctx, record.CgroupName(d.cfg, s.Dir, s.ID), limits, d.log)
	if err != nil {
		return nil, err
	}
	u.Push(func() error { return d.removeGroup(group) })

	ch, err := openChannels()
	if err != nil {
		return nil, err
	}
	u.Push(ch.closeHost)
	cmd := &jail.Command{
		Launcher: d.cfg.Bin("cube-jail"),
		Name:     s.ID,
		Output:   ch.output,
		UID:      uid,
		Cgroup:   group,
		NetNS:    s.NetNS,
		KVM:      s.Accel == accel.KVM,
		Tap:      s.Tap == nil,
	}
	// The directory behind the name "current": the machine keeps to it whatever set-up publishes meanwhile.
	if cmd.Root, err = filepath.EvalSymlinks(s.QEMU); err != nil {
		return nil, errors.Join(fmt.Errorf("QEMU is missing: %w; run the set-up (make run)", err), ch.closeGuest())
	}
	images, err := s.openImages()
	if err != nil {
		return nil, errors.Join(err, ch.closeGuest())
	}
	defer images.close()
	files, err := s.keep()
	if err != nil {
		return nil, errors.Join(err, ch.closeGuest())
	}
	u.Push(files.close)
	if cmd.Argv, err = s.descriptors(cmd, ch, images); err != nil {
		return nil, errors.Join(err, ch.closeGuest())
	}
	prepared := time.Now()
	var id process.ID
	proc, err := cmd.Start(func(pid int) (err error) {
		if id, err = process.Of(pid); err != nil {
			return err
		}
		return rec.Update(func(r *record.State) { r.QEMU = id })
	})
	if err := errors.Join(err, ch.closeGuest()); err != nil {
		return nil, &vmm.BootError{Stage: "start", Err: err}
	}
	m := newMachine(d, s, group, proc, id, ch, files)
	if s.Tap != nil {
		m.tapFD = cmd.TapFD() - 1 // the last that was handed over
	}
	m.release.Push(m.closeImages)
	m.release.Push(func() error { return os.RemoveAll(s.Dir) })
	m.release.Push(func() error { return d.uids.Release(uid, s.Dir) })
	m.release.Push(func() error { return d.removeGroup(group) })
	u.Push(m.end) // ahead of the releases: nothing can be freed under a running process

	spawned := time.Now()
	if err := m.awaitRunning(ctx); err != nil {
		return nil, err
	}
	m.log.Debug("the machine runs", "pid", proc.PID(), "prepared", prepared.Sub(began), "spawned", spawned.Sub(prepared),
		"running", time.Since(spawned))
	return m, nil
}

// descriptors hands files over to the jail and returns the command line that names them.
func (s *Spec) descriptors(cmd *jail.Command, ch *channels, i *images) ([]string, error) {
	add := func(f *os.File) int {
		cmd.Files = append(cmd.Files, f)
		return cmd.TapFD() - 1
	}
	f := fds{qmp: add(ch.qmp), agent: add(ch.agent), console: add(ch.console), memory: add(i.memory), modules: add(s.Modules)}
	if s.Boot != nil {
		f.kernel, f.initrd = add(s.Boot.Kernel), add(s.Boot.Initrd)
	}
	if s.State != nil {
		f.state = add(s.State)
	}
	if i.root != nil {
		f.root = add(i.root)
	}
	for _, p := range i.plugged {
		f.plugged = append(f.plugged, add(p))
	}
	if s.Tap != nil {
		f.tap = add(s.Tap)
	} else {
		f.tap = cmd.TapFD()
	}
	c := layout(s, f)
	var err error
	if c.Memory.Reserve, err = mustReserve(); err != nil {
		return nil, err
	}
	return c.Argv()
}

// mustReserve tells whether the host commits to all memory beforehand, whatever it is asked (overcommit_memory 2 in
// Documentation/mm/overcommit-accounting). Else a guest may be larger than the host's memory, of which it has what it uses.
func mustReserve() (bool, error) {
	b, err := os.ReadFile("/proc/sys/vm/overcommit_memory")
	return strings.TrimSpace(string(b)) == "2", err
}

func (d *Driver) removeGroup(g *cgroup.Group) error {
	ctx, cancel := context.WithTimeout(context.Background(), d.cfg.Timeout(commandTimeout))
	defer cancel()
	return g.Remove(ctx)
}

// awaitRunning waits for QMP and for the state, if there is one, to be loaded.
func (m *Machine) awaitRunning(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.driver.cfg.Timeout(startTimeout))
	defer cancel()
	stage := "start"
	if m.restored {
		stage = "restore"
	}
	resumed := m.qmp.Subscribe("RESUME")
	defer resumed.Close()
	err := m.qmp.Open(ctx)
	if err == nil {
		var status struct {
			Status string `json:"status"`
		}
		err = m.qmp.Do(ctx, "query-status", nil, &status)
		if err == nil && status.Status == "inmigrate" {
			select {
			case _, ok := <-resumed.C():
				if !ok {
					err = qmp.ErrClosed
				}
			case <-ctx.Done():
				err = fmt.Errorf("the state has not been loaded: %w", ctx.Err())
			}
		} else if err == nil && status.Status != "running" {
			err = fmt.Errorf("QEMU is in state %q", status.Status)
		}
	}
	if err == nil {
		return nil
	}
	if errors.Is(err, qmp.ErrClosed) { // QEMU is ending: its exit says more
		select {
		case <-m.done:
			err = errors.New("QEMU ended: " + m.proc.Status())
		case <-ctx.Done():
		}
	}
	return &vmm.BootError{Stage: stage, Console: m.Tail(), Err: err}
}
