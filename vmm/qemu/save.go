package qemu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/reflink"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/memory"
)

const (
	// freezeTimeout is how long a guest may take to come to rest: its agent answers in milliseconds.
	freezeTimeout = 5 * time.Second
	// stopTimeout is how long QEMU may take to stop the guest, which ends what it is writing to the disks, or to write its
	// state.
	stopTimeout = 10 * time.Second
	// maxState bounds the state of a machine's devices; it has about 16 KiB.
	maxState = 16 << 20
)

// killpoint is where tests kill the machine. It does nothing otherwise.
var killpoint = func(string, *Machine) {}

// saving is a save under way: everything that can be made before the guest stands still. Of one of the disks alone, the disks.
type saving struct {
	files    undo.Stack
	private  *memory.Private
	underlay *memory.Underlay
	state    *os.File // that QEMU writes to: not the snapshot's, which would stay open to it
	stateSet int
	disks    []savedDisk
}

type savedDisk struct {
	vmm.SavedDisk
	from, to *os.File // nil for a placeholder
}

// Save writes the machine into a directory.
func (m *Machine) Save(ctx context.Context, r vmm.SaveRequest) (_ *vmm.Saved, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("save the machine: %w", err)
		}
	}()
	if m.base == nil {
		return nil, errors.New("its memory is of no snapshot")
	}
	if err := m.changes.Acquire(ctx, allChanges); err != nil {
		return nil, fmt.Errorf("it is being changed or saved: %w", err)
	}
	defer m.changes.Release(allChanges)
	if m.paused.Load() {
		return nil, errors.New("it is paused: resume it first")
	}
	s, err := m.prepare(ctx, r)
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.files.Release() }()
	killpoint("prepared", m)

	saved := &vmm.Saved{Platform: m.platform, Shape: m.shape, Parent: m.base.Snapshot, Inherited: m.base.Digests}
	for _, d := range s.disks {
		saved.Disks = append(saved.Disks, d.SavedDisk)
	}
	goOn := func() error {
		err := m.goOn()
		m.thaw(r.Quiesce)
		if s.state == nil {
			return err
		}
		return unlessGone(err, m.discard(s.stateSet))
	}
	defer func() {
		if err != nil || !r.Still {
			err = unlessGone(err, goOn())
		}
	}()
	if saved.Frozen, err = m.freeze(ctx, r.Quiesce); err != nil {
		return nil, err
	}
	// What is written back before the guest stands still, needs no time while it does.
	for _, d := range s.disks {
		if d.from != nil && !d.ReadOnly {
			if err := unix.Fdatasync(int(d.from.Fd())); err != nil {
				return nil, fmt.Errorf("flush disk %s: %w", d.Serial, err)
			}
		}
	}
	killpoint("frozen", m)
	if saved.Memory, saved.Stopped, err = m.capture(ctx, s, r.Still); err != nil {
		return nil, err
	}
	killpoint("captured", m)
	if r.Still {
		saved.GoOn = goOn
	}
	if s.state == nil {
		return saved, nil
	}
	return saved, writeState(filepath.Join(r.Dir, vmm.StateFile), s.state)
}

// goOn has the guest go on if a save has left it still. Otherwise it goes on already.
func (m *Machine) goOn() error {
	if !m.still.Swap(false) {
		return nil
	}
	m.paused.Store(false)
	return m.cont()
}

func (m *Machine) cont() error {
	return m.doWithin(context.Background(), commandTimeout, "have the guest go on", "cont", nil)
}

// prepare makes all files, and in them what the guest can't change any more.
func (m *Machine) prepare(ctx context.Context, r vmm.SaveRequest) (_ *saving, err error) {
	s := &saving{}
	defer func() {
		if err != nil {
			_ = s.files.Release()
		}
	}()
	if !r.DisksOnly {
		if err := m.prepareMemory(ctx, s, r.Dir); err != nil {
			return nil, err
		}
	}
	if err := m.prepareDisks(ctx, s, r.Dir); err != nil {
		return nil, err
	}
	if r.DisksOnly {
		return s, nil
	}
	return s, m.prepareState(ctx, s)
}

func (m *Machine) prepareMemory(ctx context.Context, s *saving, dir string) (err error) {
	proc := fmt.Sprintf("/proc/%d", m.id.PID)
	size := int64(m.shape.MemoryMiB) << 20
	if s.private, err = memory.OpenPrivate(proc, m.memory, size); err != nil {
		return err
	}
	s.files.Push(s.private.Close)
	if !m.id.Alive() { // looked at after the open: what is open is QEMU's
		return vmm.ErrGone
	}
	to, err := s.create(dir, vmm.MemoryFile)
	if err != nil {
		return err
	}
	if _, err := reflink.Clone(ctx, to, m.base.File); err != nil {
		return err
	}
	s.underlay, err = memory.NewUnderlay(to, size)
	return err
}

// prepareState gives QEMU a file for the state. It takes a descriptor to write that to only if it can do nothing else with it.
func (m *Machine) prepareState(ctx context.Context, s *saving) (err error) {
	if s.state, err = memory.Scratch(0); err != nil {
		return err
	}
	s.files.Push(s.state.Close)
	w, err := os.OpenFile(procFD(int(s.state.Fd())), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer w.Close()
	s.stateSet = m.newSet()
	return m.doWithin(ctx, commandTimeout, "hand over the state's file", "add-fd", map[string]any{"fdset-id": s.stateSet}, w)
}

func (m *Machine) prepareDisks(ctx context.Context, s *saving, dir string) error {
	if m.placeholder {
		s.disks = append(s.disks, savedDisk{SavedDisk: vmm.SavedDisk{Serial: vmm.RootSerial, LUN: rootLUN, Placeholder: true}})
	}
	m.mu.Lock()
	for _, d := range m.disks {
		from, err := reopen(d.image, true) // the machine's end closes the other
		if err != nil {
			m.mu.Unlock()
			return fmt.Errorf("disk %s: %w", d.Serial, err)
		}
		s.files.Push(from.Close)
		s.disks = append(s.disks, savedDisk{SavedDisk: vmm.SavedDisk{Serial: d.Serial, LUN: d.LUN, ReadOnly: d.ReadOnly}, from: from})
	}
	m.mu.Unlock()
	slices.SortFunc(s.disks, func(a, b savedDisk) int { return cmp.Compare(a.LUN, b.LUN) })
	for i := range s.disks {
		d := &s.disks[i]
		if d.from == nil {
			continue
		}
		var err error
		if d.to, err = s.create(dir, vmm.DiskFile(d.Serial)); err != nil {
			return err
		}
		if d.ReadOnly { // nobody writes to it
			_, err = reflink.Clone(ctx, d.to, d.from)
		} else {
			err = guestmark.Set(d.to)
		}
		if err != nil {
			return fmt.Errorf("disk %s: %w", d.Serial, err)
		}
	}
	return nil
}

func (s *saving) create(dir, name string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		s.files.Push(f.Close)
	}
	return f, err
}

// freeze brings the guest's work to rest, if the agent does that in time.
func (m *Machine) freeze(ctx context.Context, q vmm.Quiesce) (frozen bool, err error) {
	limited, cancel := context.WithTimeout(ctx, m.driver.cfg.Timeout(freezeTimeout))
	defer cancel()
	err = q.Freeze(limited)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		m.log.Warn("the guest has not come to rest in time, and is saved as it is", "err", err)
		return false, nil
	}
	return err == nil, err
}

// thaw lets the work go on, even if nobody waits for the save any more. The save is made by then, or has failed.
func (m *Machine) thaw(q vmm.Quiesce) {
	ctx, cancel := context.WithTimeout(context.Background(), m.driver.cfg.Timeout(freezeTimeout))
	defer cancel()
	if err := q.Thaw(ctx); err != nil {
		m.log.Warn("the work in the guest may still stand still after a save", "err", err)
	}
}

// discard takes the file for the state back from QEMU, which lets go of it only while the guest runs.
func (m *Machine) discard(set int) error {
	return m.doWithin(context.Background(), commandTimeout, "take back the state's file", "remove-fd", map[string]any{"fdset-id": set})
}

// capture has the guest stand still and copies what it could change. With still it is left so, unless there is an error.
func (m *Machine) capture(ctx context.Context, s *saving, still bool) (w memory.Written, stopped time.Duration, err error) {
	began := time.Now()
	defer func() {
		if still && err == nil {
			m.paused.Store(true)
			m.still.Store(true)
		} else { // and even if the answer to the stop is still to come
			err = unlessGone(err, m.cont())
		}
		stopped = time.Since(began)
	}()
	if err := m.doWithin(ctx, stopTimeout, "have the guest stand still", "stop", nil); err != nil {
		return w, 0, err
	}
	killpoint("stopped", m)
	g, ctx := errgroup.WithContext(ctx)
	if s.state != nil {
		g.Go(func() error { return m.saveState(ctx, s.stateSet) })
		g.Go(func() (err error) {
			w, err = s.private.Overlay(ctx, s.underlay)
			return err
		})
	}
	g.Go(func() error {
		for _, d := range s.disks {
			if d.from == nil || d.ReadOnly {
				continue
			}
			if _, err := reflink.Clone(ctx, d.to, d.from); err != nil {
				return fmt.Errorf("disk %s: %w", d.Serial, err)
			}
		}
		return nil
	})
	err = g.Wait()
	return w, 0, err // the defer knows how long it was
}

// unlessGone adds what else went wrong to an error. Of a machine that is gone there is no more to say than that.
func unlessGone(err error, more ...error) error {
	for _, e := range append([]error{err}, more...) {
		if errors.Is(e, vmm.ErrGone) {
			return e
		}
	}
	return errors.Join(err, errors.Join(more...))
}

// saveState has QEMU write the state of devices and CPUs to the descriptor in the set. The guest stands still.
func (m *Machine) saveState(ctx context.Context, set int) error {
	// The default, live: true, would take this for the end of a migration and let go of the disks.
	return m.doWithin(ctx, stopTimeout, "save state", "xen-save-devices-state", map[string]any{"filename": fdset(set), "live": false})
}

// writeState copies the state from the file that QEMU could still write to.
func writeState(path string, from *os.File) (err error) {
	to, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	n, err := io.Copy(to, io.NewSectionReader(from, 0, maxState+1))
	if err == nil && (n == 0 || n > maxState) {
		err = fmt.Errorf("the state has %d bytes, not 1 to %d", n, maxState)
	}
	return err
}

// SaveState pauses the guest for good and writes the state of its devices and CPUs, but not its memory, to f, which must
// be opened for writing only. The machine can only be stopped afterwards.
func (m *Machine) SaveState(ctx context.Context, f *os.File) error {
	if err := m.Pause(ctx); err != nil {
		return err
	}
	set := m.newSet()
	if err := m.do(ctx, "save state", "add-fd", map[string]any{"fdset-id": set}, f); err != nil {
		return err
	}
	return m.saveState(ctx, set)
}
