package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/qmp"
)

// disk is a disk that is, or is about to be, plugged in.
type disk struct {
	Disk
	image   *os.File      // for reading only; nil before ready
	ready   bool          // AddDisk has succeeded
	busy    bool          // a RemoveDisk is at work
	deleted chan struct{} // closed when the guest has let it go
}

// AddDisk plugs a disk in.
func (m *Machine) AddDisk(ctx context.Context, vd vmm.Disk) (err error) {
	release, err := m.change(ctx)
	if err != nil {
		return fmt.Errorf("add disk %s: %w", vd.Serial, err)
	}
	defer release()
	d, err := m.reserve(vd)
	if err != nil {
		return fmt.Errorf("add disk %s: %w", vd.Serial, err)
	}
	defer func() {
		if err != nil {
			m.forget(d)
		}
	}()
	f, err := reopen(vd.File, d.ReadOnly)
	if err != nil {
		return fmt.Errorf("add disk %s: %w", vd.Serial, err)
	}
	defer f.Close()
	image, err := reopen(vd.File, true)
	if err != nil {
		return fmt.Errorf("add disk %s: %w", vd.Serial, err)
	}
	defer func() {
		if err != nil {
			_ = image.Close()
		}
	}()
	what := "add disk " + d.Serial
	if err := m.do(ctx, what, "add-fd", map[string]any{"fdset-id": d.FDSet}, f); err != nil {
		return err
	}
	if err := m.do(ctx, what, "blockdev-add", d.blockdev()); err != nil {
		return errors.Join(err, m.takeBack(d, false))
	}
	if err := m.do(ctx, what, "device_add", d.device()); err != nil {
		return errors.Join(err, m.takeBack(d, true))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	d.image, d.ready = image, true
	return nil
}

// reserve takes the serial and a free address.
func (m *Machine) reserve(vd vmm.Disk) (*disk, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if vd.Serial == ModulesSerial || vd.Serial == vmm.RootSerial || m.disks[vd.Serial] != nil {
		return nil, errors.New("a disk of that serial is plugged in already")
	}
	used := make(map[int]bool)
	for _, d := range m.disks {
		used[d.LUN] = true
	}
	lun := firstLUN
	for used[lun] {
		lun++
	}
	if lun > maxLUN {
		return nil, fmt.Errorf("there are %d disks already", len(m.disks))
	}
	m.nextSet++
	d := &disk{
		Disk:    Disk{Serial: vd.Serial, FDSet: m.nextSet, Bus: scsiBus, LUN: lun, ReadOnly: vd.ReadOnly},
		deleted: make(chan struct{}),
	}
	if err := d.Valid(); err != nil {
		return nil, err
	}
	m.disks[vd.Serial] = d
	return d, nil
}

func (m *Machine) forget(d *disk) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.disks, d.Serial)
}

// reopen makes an open file of QEMU's own: with the access that it needs (QEMU takes a descriptor only with exactly
// that), and with locks that aren't the caller's.
func reopen(f *os.File, readOnly bool) (*os.File, error) {
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return nil, err
	}
	mode := os.O_RDWR
	if readOnly {
		mode = os.O_RDONLY
	} else if flags&unix.O_ACCMODE != unix.O_RDWR {
		return nil, fmt.Errorf("%s is not opened for reading and writing", f.Name())
	}
	return os.OpenFile(procFD(int(f.Fd())), mode, 0)
}

// takeBack undoes the first steps of AddDisk.
func (m *Machine) takeBack(d *disk, node bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), m.driver.cfg.Timeout(commandTimeout))
	defer cancel()
	return m.dropImage(ctx, d, node)
}

// dropImage frees what is behind a disk that is no longer plugged in.
func (m *Machine) dropImage(ctx context.Context, d *disk, node bool) error {
	what := "remove disk " + d.Serial
	if node {
		if err := m.do(ctx, what, "blockdev-del", map[string]any{"node-name": d.node()}); err != nil {
			return err
		}
	}
	return m.do(ctx, what, "remove-fd", map[string]any{"fdset-id": d.FDSet})
}

// RemoveDisk unplugs the disk with that serial.
func (m *Machine) RemoveDisk(ctx context.Context, serial string) (err error) {
	what := "remove disk " + serial
	release, err := m.change(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer release()
	m.mu.Lock()
	d := m.disks[serial]
	switch {
	case d == nil || !d.ready:
		err = vmm.ErrNoDisk
	case d.busy:
		err = errors.New("it is being removed already")
	default:
		d.busy = true
	}
	m.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		d.busy = false
		if err == nil {
			delete(m.disks, serial)
			_ = d.image.Close()
		}
	}()
	select {
	case <-d.deleted: // by an earlier attempt that was cut short
	default:
		if err := m.unplug(ctx, what, d); err != nil {
			return err
		}
	}
	return m.dropImage(ctx, d, true)
}

func (m *Machine) unplug(ctx context.Context, what string, d *disk) error {
	err := m.do(ctx, what, "device_del", map[string]any{"id": d.id()})
	if err != nil && !errors.Is(err, qmp.ErrDeviceNotFound) && !errors.Is(err, qmp.ErrGeneric) {
		return err
	}
	// Not found: the event is on its way. GenericError: an earlier attempt still waits for the guest.
	select {
	case <-d.deleted:
		return nil
	case <-m.done:
		return fmt.Errorf("%s: %w", what, vmm.ErrGone)
	case <-ctx.Done():
		return fmt.Errorf("%s: the guest has not let it go: %w", what, errors.Join(ctx.Err(), err))
	}
}
