package base

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/guestmark"
	"github.com/cubesandbox/cube/internal/reflink"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/qemu"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Restorable implements vmm.Launcher.
func (l *Launcher) Restorable(ctx context.Context, id string) (err error) {
	s, err := l.saved.Open(id, "restorable")
	if err != nil {
		return err
	}
	defer s.Close()
	return l.Fits(ctx, &s.Info)
}

// Fits is Restorable for a snapshot of which no more is here than what it says of itself.
func (l *Launcher) Fits(ctx context.Context, i *snapshot.Info) error {
	art := l.artefactsOf(i.Platform)
	release, err := useSaved(ctx, art, i.Platform)
	if err != nil {
		return err
	}
	return errors.Join(l.compatible(ctx, art, i), release())
}

// artefactsOf are those that a saved machine needs.
func (l *Launcher) artefactsOf(p vmm.Platform) artefacts {
	return artefacts{
		qemu:  filepath.Join(filepath.Dir(l.cfg.QEMUDir()), p.QEMU),
		guest: filepath.Join(filepath.Dir(l.cfg.GuestDir()), p.Guest),
	}
}

// restore makes a machine of a snapshot of another.
func (l *Launcher) restore(ctx context.Context, r vmm.Request) (_ vmm.Machine, err error) {
	s, err := l.saved.Open(r.Snapshot, r.ID)
	if err != nil {
		return nil, err
	}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(s.Close)
	defer func() {
		if err != nil {
			err = fmt.Errorf("restore snapshot %s: %w", r.Snapshot, err)
		}
	}()
	art := l.artefactsOf(s.Platform)
	release, err := useSaved(ctx, art, s.Platform)
	if err != nil {
		return nil, err
	}
	u.Push(release)
	if err := l.compatible(ctx, art, &s.Info); err != nil {
		return nil, err
	}
	modules, err := os.Open(filepath.Join(art.guest, modulesFile))
	if err != nil {
		return nil, err
	}
	defer modules.Close()
	disks, err := cloneDisks(ctx, s, r.DiskDir)
	if err != nil {
		return nil, err
	}
	defer disks.close()
	u.Push(disks.remove)
	held, err := s.Hold(ctx)
	if err != nil {
		return nil, err
	}
	u.Push(held.Release)
	m, err := l.driver.Start(ctx, &qemu.Spec{
		ID:       r.ID,
		Dir:      r.Dir,
		QEMU:     art.qemu,
		Shape:    s.Shape,
		CPULimit: r.CPULimit,
		NetNS:    r.NetNS,
		Tap:      r.Tap,
		Accel:    accel.Kind(s.Platform.Accel),
		Memory:   held.File,
		Modules:  modules,
		Root:     disks.root,
		NoRoot:   disks.noRoot,
		Plugged:  disks.plugged,
		State:    s.State,
		Platform: s.Platform,
		Base:     &qemu.Base{File: s.Memory, Digests: s.Info.Memory.Digests, Snapshot: s.ID},
	})
	if err != nil {
		return nil, err
	}
	letGo := func() error { return errors.Join(held.Release(), s.Close(), release()) }
	return &machine{Machine: m, letGo: sync.OnceValue(letGo)}, nil
}

// compatible says what of this host the snapshot can't be restored with.
func (l *Launcher) compatible(ctx context.Context, art artefacts, s *snapshot.Info) error {
	max, err := limits(l.cfg)
	if err != nil {
		return err
	}
	if s.Shape.MemoryMiB > max.MemoryMiB {
		return &vmm.LimitError{What: "MiB of memory", Asked: s.Shape.MemoryMiB, Min: minMemoryMiB, Max: max.MemoryMiB}
	}
	// Emulation there is on each host.
	kind := accel.TCG
	if s.Platform.Accel != string(accel.TCG) {
		v, err := l.accelerator(ctx, art)
		if err != nil {
			return err
		}
		kind = v.Kind
	}
	cpu, err := cpuOf(kind)
	if err != nil {
		return err
	}
	khz, err := l.tscKHz()
	if err != nil {
		return err
	}
	return s.Compatible(vmm.Platform{Board: qemu.BoardVersion, QEMU: s.Platform.QEMU, Accel: string(kind), CPU: cpu, TSCKHz: khz})
}

// useSaved keeps the artefacts that a snapshot needs from being removed, and says which of them are gone.
func useSaved(ctx context.Context, art artefacts, p vmm.Platform) (release func() error, err error) {
	release, err = art.use(ctx)
	if !errors.Is(err, fs.ErrNotExist) {
		return release, err
	}
	what, digest := "its QEMU", p.QEMU
	if _, err := os.Stat(art.qemu); err == nil {
		what, digest = "the guest's kernel modules", p.Guest
	}
	return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("the snapshot can't be restored on this host: %s (%.12s…) is not among the artefacts any more", what, digest))
}

// disks are the images of a machine from a snapshot.
type disks struct {
	root    *os.File // nil: it never had one, or has none any more
	noRoot  bool     // the latter
	plugged []qemu.Plugged
	files   []*os.File
}

// cloneDisks makes the images in dir.
func cloneDisks(ctx context.Context, s *snapshot.Snapshot, dir string) (_ *disks, err error) {
	d := &disks{noRoot: true}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(d.remove)
	u.Push(d.close)
	for _, disk := range s.Disks {
		if disk.Serial == vmm.RootSerial {
			d.noRoot = false
		}
		if disk.Placeholder {
			continue
		}
		f, err := os.OpenFile(filepath.Join(dir, vmm.DiskFile(disk.Serial)), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil, fmt.Errorf("make disk %s: %w", disk.Serial, err)
		}
		d.files = append(d.files, f)
		if !disk.ReadOnly {
			if err := guestmark.Set(f); err != nil {
				return nil, err
			}
		}
		if _, err := reflink.Clone(ctx, f, s.Images[disk.Serial]); err != nil {
			return nil, fmt.Errorf("make disk %s: %w", disk.Serial, err)
		}
		if disk.Serial == vmm.RootSerial {
			d.root = f
			continue
		}
		d.plugged = append(d.plugged, qemu.Plugged{Disk: vmm.Disk{Serial: disk.Serial, File: f, ReadOnly: disk.ReadOnly}, LUN: disk.LUN})
	}
	return d, nil
}

func (d *disks) close() error {
	for _, f := range d.files {
		_ = f.Close()
	}
	return nil
}

func (d *disks) remove() error {
	var errs []error
	for _, f := range d.files {
		errs = append(errs, os.Remove(f.Name()))
	}
	return errors.Join(errs...)
}
