// Package qemu makes virtual machines with a stock QEMU: its command line (Config and the devices, in the shape that
// readers of govmm know), and the driver behind vmm.Machine. It knows nothing of base snapshots, of the agent's protocol
// or of containers.
//
// A QEMU process is as untrusted as its guest: it runs in package jail, gets all it needs as descriptors, and what it
// says over QMP, the console or the agent channel is read with limits.
package qemu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/cubesandbox/cube/internal/process"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/cgroup"
	"github.com/cubesandbox/cube/vmm/jail"
	"github.com/cubesandbox/cube/vmm/qmp"
)

// Machine is a running QEMU.
type Machine struct {
	driver   *Driver
	log      *slog.Logger
	dir      string // with its record
	shape    vmm.Shape
	group    *cgroup.Group
	restored bool
	proc     *jail.Process
	qmp      *qmp.Client
	agent    net.Conn
	console  *ring
	output   *ring
	drained  []<-chan struct{} // closed when all output has been read

	id          process.ID // QEMU's
	platform    vmm.Platform
	memory      *os.File // that QEMU maps; for reading only, as base.File
	base        *Base    // nil: the memory is the machine's own
	placeholder bool     // the root is one
	tapFD       int      // QEMU's descriptor of the tap that it was given; 0 for none

	changes *semaphore.Weighted // see change
	paused  atomic.Bool         // by Pause; not by QEMU, for want of space
	still   atomic.Bool         // a save has left it so
	waiting atomic.Bool         // for space
	full    atomic.Bool         // it is told that the machine waits
	stopped atomic.Bool         // Stop was called

	mu       sync.Mutex
	disks    map[string]*disk
	nextSet  int
	shutdown string // reason of the SHUTDOWN event
	broken   string // why this side ended the machine

	ending  sync.Once
	release undo.Stack // what Stop frees
	freed   error      // outcome of that
	err     error      // set before done is closed
	done    chan struct{}
}

var _ vmm.Machine = (*Machine)(nil)

// newMachine takes over what it is given, files included.
func newMachine(d *Driver, s *Spec, group *cgroup.Group, proc *jail.Process, id process.ID, ch *channels, files *kept) *Machine {
	m := &Machine{
		driver:   d,
		log:      d.log.With("machine", s.ID),
		dir:      s.Dir,
		shape:    s.Shape,
		group:    group,
		restored: s.State != nil,
		proc:     proc,
		agent:    ch.agentConn,
		console:  newRing(consoleSize),
		output:   newRing(outputSize),
		disks:    make(map[string]*disk),
		nextSet:  firstFDSet + len(s.Plugged),
		done:     make(chan struct{}),

		id:          id,
		platform:    s.Platform,
		memory:      files.memory,
		base:        files.base,
		placeholder: s.Root == nil && !s.NoRoot,
		changes:     semaphore.NewWeighted(allChanges),
	}
	if s.Root != nil {
		d := rootDisk(0)
		d.Placeholder, d.FDSet = 0, rootFDSet
		m.disks[d.Serial] = &disk{Disk: d, image: files.root, ready: true, deleted: make(chan struct{})}
	}
	for i, p := range s.Plugged {
		m.disks[p.Serial] = &disk{Disk: p.disk(i), image: files.plugged[i], ready: true, deleted: make(chan struct{})}
	}
	m.drained = []<-chan struct{}{m.console.follow(ch.consoleConn), m.output.follow(ch.outputRead)}
	m.qmp = qmp.New(ch.qmpConn)
	events := m.qmp.Subscribe("SHUTDOWN", "DEVICE_DELETED", "BLOCK_IO_ERROR")
	eventsDone := make(chan struct{})
	go func() {
		defer close(eventsDone)
		for e := range events.C() {
			m.handle(e)
		}
	}()
	go m.watch(eventsDone)
	return m
}

// Shape is what the machine really has.
func (m *Machine) Shape() vmm.Shape { return m.shape }

// PID is QEMU's.
func (m *Machine) PID() int { return m.proc.PID() }

// Agent is the host's end of the agent channel.
func (m *Machine) Agent() net.Conn { return m.agent }

// Console is the tail of the guest's console.
func (m *Machine) Console() []byte { return m.console.Bytes() }

// Tail is one line with the last lines of the console and of QEMU's own output.
func (m *Machine) Tail() string {
	console, output := tail(m.console.Bytes()), tail(m.output.Bytes())
	switch {
	case output == "":
		return console
	case console == "":
		return output
	}
	return console + " | " + output
}

// Done is closed when the machine has ended.
func (m *Machine) Done() <-chan struct{} { return m.done }

// Err says why the machine ended.
func (m *Machine) Err() error {
	select {
	case <-m.done:
		return m.err
	default:
		return nil
	}
}

// allChanges is what Save takes of Machine.changes.
const allChanges = 1 << 20

// change is for whoever plugs a disk, or stops or starts the vCPUs: all of these may happen at once, but not during a save.
func (m *Machine) change(ctx context.Context) (release func(), err error) {
	if err := m.changes.Acquire(ctx, 1); err != nil {
		return nil, fmt.Errorf("the machine is being saved: %w", err)
	}
	return func() { m.changes.Release(1) }, nil
}

// Pause stops the vCPUs.
func (m *Machine) Pause(ctx context.Context) error {
	release, err := m.change(ctx)
	if err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	defer release()
	m.paused.Store(true)
	return m.do(ctx, "pause", "stop", nil)
}

// Resume lets the vCPUs go on.
func (m *Machine) Resume(ctx context.Context) error {
	release, err := m.change(ctx)
	if err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	defer release()
	m.paused.Store(false)
	return m.do(ctx, "resume", "cont", nil)
}

// SetCPULimit changes the host CPU time of the machine.
func (m *Machine) SetCPULimit(_ context.Context, cpus float64) error {
	err := m.group.SetCPUs(hostCPUs(cpus, m.shape))
	select {
	case <-m.done: // the group may be gone, too
		return fmt.Errorf("set the CPU limit: %w", vmm.ErrGone)
	default:
		return err
	}
}

// do executes a QMP command on behalf of an operation.
func (m *Machine) do(ctx context.Context, operation, command string, args any, files ...*os.File) error {
	err := m.qmp.Do(ctx, command, args, nil, files...)
	if err == nil {
		return nil
	}
	if errors.Is(err, qmp.ErrClosed) || errors.Is(err, qmp.ErrProtocol) {
		err = vmm.ErrGone
	}
	return fmt.Errorf("%s: %w", operation, err)
}

// doWithin is do with a deadline, which is scaled.
func (m *Machine) doWithin(ctx context.Context, limit time.Duration, operation, command string, args any, files ...*os.File) error {
	ctx, cancel := context.WithTimeout(ctx, m.driver.cfg.Timeout(limit))
	defer cancel()
	return m.do(ctx, operation, command, args, files...)
}

// newSet returns a number for a descriptor set of its own.
func (m *Machine) newSet() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.nextSet++
	return m.nextSet
}

func fdset(n int) string { return fmt.Sprintf("/dev/fdset/%d", n) }
