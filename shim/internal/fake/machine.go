// Package fake has a machine and an agent that live in the test's own process, behind the same interfaces and the same
// multiplexed channel as the real ones. Programs in it are a handful of made-up commands; see program.go.
package fake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm"
)

// Launcher makes machines in this process.
type Launcher struct {
	// Fail, if set, is what Launch returns.
	Fail error
	// Full, if set, is what Room returns.
	Full error
	// Unfit, if set, is what Restorable returns.
	Unfit error
	// Before, if set, is called before a machine is made.
	Before func(ctx context.Context)
	// Hostile, if set, is the mode of an agent that has been taken over; see internal/hostile. Machine.Guest then hears
	// of nothing.
	Hostile string
	// Disks, if set, is called for each disk that is plugged in, or there from the start.
	Disks func(vmm.Disk) error
	// Snapshots is the directory of the store of saved machines.
	Snapshots string
	// RootImage, if set, is what is on the root disk of a machine that is saved. Otherwise it has none that is kept.
	RootImage []byte
	// Saving, if set, is called while a machine stands still for a save, which it is to return with ctx.
	Saving func(ctx context.Context)

	mu       sync.Mutex
	machines []*Machine
	saved    []*sleeper
}

// Room implements vmm.Launcher.
func (l *Launcher) Room(context.Context) error { return l.Full }

// Restorable implements vmm.Launcher.
func (l *Launcher) Restorable(context.Context, string) error { return l.Unfit }

// Launch implements vmm.Launcher.
func (l *Launcher) Launch(ctx context.Context, r vmm.Request) (vmm.Machine, error) {
	if l.Fail != nil {
		os.RemoveAll(r.Dir)
		return nil, l.Fail
	}
	if l.Before != nil {
		l.Before(ctx)
	}
	if err := ctx.Err(); err != nil {
		os.RemoveAll(r.Dir)
		return nil, err
	}
	host, guest, err := pair()
	if err != nil {
		return nil, err
	}
	m := &Machine{Request: r, launcher: l, conn: host, far: guest, done: make(chan struct{}), serials: map[string]bool{}}
	m.Guest = newAgent(m)
	if r.Snapshot != "" {
		if err := l.restore(m); err != nil {
			return nil, errors.Join(err, host.Close(), guest.Close(), os.RemoveAll(r.Dir))
		}
	}
	if l.Hostile != "" {
		go m.serveHostile(guest, l.Hostile)
	} else {
		go m.Guest.serve(guest)
	}
	l.mu.Lock()
	l.machines = append(l.machines, m)
	l.mu.Unlock()
	if r.Root != nil {
		if err := m.AddDisk(ctx, vmm.Disk{Serial: vmm.RootSerial, File: r.Root}); err != nil {
			return nil, errors.Join(err, m.Stop(ctx))
		}
	}
	return m, nil
}

// pair is a connection with both its ends.
func pair() (a, b net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	conns := make([]net.Conn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "agent channel")
		defer f.Close()
		if conns[i], err = net.FileConn(f); err != nil {
			return nil, nil, err
		}
	}
	return conns[0], conns[1], nil
}

// Last is the machine made last.
func (l *Launcher) Last() *Machine {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.machines[len(l.machines)-1]
}

// All are the machines made so far.
func (l *Launcher) All() []*Machine {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]*Machine(nil), l.machines...)
}

// Machine is one.
type Machine struct {
	vmm.Request
	Guest    *Agent
	launcher *Launcher
	conn     net.Conn
	far      net.Conn
	once     sync.Once
	done     chan struct{}

	saves     sync.Mutex
	mu        sync.Mutex
	err       error
	serials   map[string]bool
	stops     int
	paused    bool
	cpuLimits []float64
}

var _ vmm.Machine = (*Machine)(nil)

// Shape implements vmm.Machine.
func (m *Machine) Shape() vmm.Shape { return m.Request.Shape }

// PID implements vmm.Machine: the test's own, which lives.
func (m *Machine) PID() int { return os.Getpid() }

// Agent implements vmm.Machine.
func (m *Machine) Agent() net.Conn { return m.conn }

// Tap implements vmm.Machine.
func (m *Machine) Tap() (*os.File, error) {
	if m.Request.Tap == nil {
		return nil, nil
	}
	return os.Open(os.DevNull)
}

// AddDisk implements vmm.Machine.
func (m *Machine) AddDisk(_ context.Context, d vmm.Disk) error {
	if m.launcher.Disks != nil {
		if err := m.launcher.Disks(d); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.serials[d.Serial] {
		return fmt.Errorf("disk %s is plugged in already", d.Serial)
	}
	m.serials[d.Serial] = true
	return nil
}

func (m *Machine) hasDisk(serial string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.serials[serial]
}

// RemoveDisk implements vmm.Machine.
func (m *Machine) RemoveDisk(_ context.Context, serial string) error {
	if m.Guest.mounts(serial) {
		return fmt.Errorf("disk %s is still mounted", serial)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.serials[serial] {
		return fmt.Errorf("disk %s: %w", serial, vmm.ErrNoDisk)
	}
	delete(m.serials, serial)
	return nil
}

// Serials are those of the disks that are plugged in, sorted.
func (m *Machine) Serials() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.serials))
}

// Pause implements vmm.Machine. What runs in it doesn't notice.
func (m *Machine) Pause(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused = true
	return nil
}

// Resume implements vmm.Machine.
func (m *Machine) Resume(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused = false
	return nil
}

// Paused tells whether it stands still.
func (m *Machine) Paused() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.paused
}

// SetCPULimit implements vmm.Machine.
func (m *Machine) SetCPULimit(_ context.Context, cpus float64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.done:
		return vmm.ErrGone
	default:
	}
	m.cpuLimits = append(m.cpuLimits, cpus)
	return nil
}

// CPULimits are those that were set, in order.
func (m *Machine) CPULimits() []float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.cpuLimits)
}

// Waiting implements vmm.Machine.
func (m *Machine) Waiting() bool { return false }

// Console implements vmm.Machine.
func (m *Machine) Console() []byte { return []byte("console") }

// Done implements vmm.Machine.
func (m *Machine) Done() <-chan struct{} { return m.done }

// Err implements vmm.Machine.
func (m *Machine) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// Crash ends the machine as if by itself.
func (m *Machine) Crash(reason string) {
	m.end(&vmm.DeathError{Reason: reason, Console: "last words", Killed: reason == "signal: killed"})
}

// Stop implements vmm.Machine.
func (m *Machine) Stop(context.Context) error {
	m.end(nil)
	m.mu.Lock()
	m.stops++
	m.mu.Unlock()
	return os.RemoveAll(m.Request.Dir)
}

// Stopped tells whether Stop was called.
func (m *Machine) Stopped() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stops > 0
}

func (m *Machine) end(err error) {
	m.once.Do(func() {
		m.mu.Lock()
		m.err = err
		m.mu.Unlock()
		far := m.far.(*net.UnixConn)
		far.CloseRead()  // for the ends to read EOF; serve closes it
		far.CloseWrite() // the same
		m.Guest.die()
		close(m.done)
	})
}

// HangUp ends the agent channel, but not the machine.
func (m *Machine) HangUp() {
	m.far.(*net.UnixConn).CloseWrite() // the host reads an end
}
