package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/undo"
)

// Datapath is an open datapath. Its methods are safe for concurrent use; those for one sandbox take turns. Other processes
// may have it open too: they see to it that only one of them adds, changes or removes a sandbox, or attaches to a device, at
// a time, and that none does while the datapath is opened by Open.
type Datapath struct {
	cfg  Config
	objs dpObjects
	cpus int // that the kernel has counters for

	turns [MaxSandboxes + 1]sync.Mutex
	// walks has those who delete flows take turns: they alone count what is gone.
	walks sync.Mutex

	idsMu sync.Mutex
	ids   map[point]ebpf.ProgramID // of the programs, once they were asked for
}

// Open loads the datapath, with the pinned maps of the process before, if any, and removes what that left half done. No
// hook has its programs before it is attached. It needs CAP_BPF, CAP_NET_ADMIN and CAP_SYS_ADMIN.
//
// It fails with errdefs.ErrFailedPrecondition if there are maps that these programs can't use.
func Open(cfg Config) (_ *Datapath, err error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	var u undo.Stack
	defer u.Run(&err)
	unmount, err := mount(cfg.Dir)
	if err != nil {
		return nil, err
	}
	u.Push(unmount)

	spec, err := loadDp()
	if err != nil {
		return nil, err
	}
	if err := cfg.set(spec); err != nil {
		return nil, err
	}
	d := &Datapath{cfg: cfg, ids: map[point]ebpf.ProgramID{}}
	if d.cpus, err = ebpf.PossibleCPU(); err != nil {
		return nil, err
	}
	err = spec.LoadAndAssign(&d.objs, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: mapsDir(cfg.Dir)}})
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		return nil, fmt.Errorf("the maps in %s are of another version's making; stop all sandboxes and remove the datapath: %w: %w", cfg.Dir, err, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		if unfit := CheckKernel(); unfit != nil {
			err = unfit // the kernel's words are long, and don't say it
		}
		return nil, fmt.Errorf("load the datapath: %w", err)
	}
	u.Push(d.Close)
	if err := d.recover(); err != nil {
		return nil, fmt.Errorf("take over the datapath: %w", err)
	}
	if err := d.pinPrograms(); err != nil {
		return nil, fmt.Errorf("pin the datapath's programs: %w", err)
	}
	return d, nil
}

// Use opens the datapath that another process has opened, with the programs and the constants that it has, and changes
// nothing. It takes a fraction of Open's time. Of the configuration, Dir, Clsact and the gateway's Ifindex count.
// errdefs.ErrUnavailable if there is none, or one of another version.
func Use(cfg Config) (_ *Datapath, err error) {
	d := &Datapath{cfg: cfg, ids: map[point]ebpf.ProgramID{}}
	if d.cpus, err = ebpf.PossibleCPU(); err != nil {
		return nil, err
	}
	var u undo.Stack
	defer u.Run(&err)
	for name, to := range d.maps() {
		*to, err = ebpf.LoadPinnedMap(pinned(cfg.Dir, name), nil)
		if err != nil {
			return nil, unavailable(name, err)
		}
		u.Push((*to).Close)
	}
	for _, p := range []point{tapIn, tapOut, gwOut} {
		to := d.program(p)
		*to, err = ebpf.LoadPinnedProgram(pinned(cfg.Dir, p.name), nil)
		if err != nil {
			return nil, unavailable(p.name, err)
		}
		u.Push((*to).Close)
	}
	return d, nil
}

func unavailable(name string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the datapath isn't loaded, or is of another version: no %s: %w", name, errdefs.ErrUnavailable)
	}
	return fmt.Errorf("open the datapath's %s: %w", name, err)
}

// maps names the maps as they are pinned.
func (d *Datapath) maps() map[string]**ebpf.Map {
	m := &d.objs.dpMaps
	return map[string]**ebpf.Map{
		dpMapAddresses: &m.Addresses, dpMapClosed: &m.Closed, dpMapCounters: &m.Counters, dpMapEvents: &m.Events, dpMapFlows: &m.Flows,
		dpMapFragments: &m.Fragments, dpMapMeters: &m.Meters, dpMapPolicy: &m.Policy, dpMapSandboxes: &m.Sandboxes,
		dpMapSerial: &m.Serial, dpMapTaps: &m.Taps,
	}
}

// pinPrograms puts the programs beside the maps that they use, in place of those of the process before.
func (d *Datapath) pinPrograms() error {
	for _, p := range []point{tapIn, tapOut, gwOut} {
		pin := pinned(d.cfg.Dir, p.name)
		fresh := pin + "-new"
		if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := (*d.program(p)).Pin(fresh); err != nil {
			return err
		}
		// Not Program.Pin's way, which leaves a moment without a pin.
		if err := os.Rename(fresh, pin); err != nil {
			return err
		}
	}
	return nil
}

// Close lets go of the datapath, which stays in force as it is.
func (d *Datapath) Close() error { return d.objs.Close() }

// DropOldLayouts removes the maps of other versions. Call it when all hooks have been attached again.
func (d *Datapath) DropOldLayouts() error {
	dirs, err := filepath.Glob(filepath.Join(d.cfg.Dir, "maps-*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		if dir != mapsDir(d.cfg.Dir) {
			errs = append(errs, os.RemoveAll(dir))
		}
	}
	return errors.Join(errs...)
}

// Remove takes away the datapath in dir: hooks, maps and the file system. Sandboxes have no network from then on. It needs
// no datapath that loads, and is done when nothing is there.
func Remove(dir string) error {
	is, err := mounted(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !is {
		if err := os.Remove(dir); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	if err := detachAll(dir); err != nil {
		return err
	}
	return unmount(dir)
}
