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

// Datapath is an open datapath. Its methods are safe for concurrent use; those for one sandbox take turns.
type Datapath struct {
	cfg  Config
	objs dpObjects

	// walks has those who delete flows take turns: they alone count what is gone.
	walks sync.Mutex

	mu        sync.Mutex
	sandboxes map[ID]*entry
	serial    uint32 // the last epoch or generation given out

	cpus int // that the kernel has counters for
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
	d := &Datapath{cfg: cfg, sandboxes: map[ID]*entry{}}
	err = spec.LoadAndAssign(&d.objs, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: mapsDir(cfg.Dir)}})
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		return nil, fmt.Errorf("the maps in %s are of another version's making; stop all sandboxes and remove the datapath: %w: %w", cfg.Dir, err, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return nil, fmt.Errorf("load the datapath: %w", err)
	}
	u.Push(d.Close)
	if err := d.recover(); err != nil {
		return nil, fmt.Errorf("take over the datapath: %w", err)
	}
	return d, nil
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
