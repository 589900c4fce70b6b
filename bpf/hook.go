package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/cubesandbox/cube/internal/undo"
)

// hook is where a program is attached: a direction of a device.
type hook struct {
	ifindex int
	point   point
}

type point struct {
	name   string // of the program, and of what is pinned
	egress bool
}

var (
	tapIn  = point{name: dpProgTapIn}
	tapOut = point{name: dpProgTapOut, egress: true}
	gwOut  = point{name: dpProgGwOut, egress: true}
)

func (h hook) String() string { return fmt.Sprintf("%s of device %d", h.point.name, h.ifindex) }

// pin is the hook's file in one of the directories of pins. A BPF file system has no names with dots.
func (h hook) pin(dir string) string {
	return filepath.Join(dir, strconv.Itoa(h.ifindex)+"-"+h.point.name)
}

func (d *Datapath) program(p point) **ebpf.Program {
	switch p {
	case tapIn:
		return &d.objs.TapIn
	case tapOut:
		return &d.objs.TapOut
	}
	return &d.objs.GwOut
}

// AttachTap brings this process's programs to a tap. If it has others of the datapath, they are replaced in one step: no
// frame passes unseen.
func (d *Datapath) AttachTap(ifindex int) error {
	return d.attach(hook{ifindex, tapIn}, hook{ifindex, tapOut})
}

// AttachGateway does the same to the gateway device.
func (d *Datapath) AttachGateway() error {
	return d.attach(hook{d.cfg.Gateway.Ifindex, gwOut})
}

// CheckTap verifies, as the kernel tells it, that exactly this process's programs are attached to a tap, before any other.
func (d *Datapath) CheckTap(ifindex int) error {
	return errors.Join(d.check(hook{ifindex, tapIn}), d.check(hook{ifindex, tapOut}))
}

// CheckGateway verifies the same of the gateway device.
func (d *Datapath) CheckGateway() error {
	return d.check(hook{d.cfg.Gateway.Ifindex, gwOut})
}

// DetachTap takes the programs off a tap, which may be gone.
func (d *Datapath) DetachTap(ifindex int) error {
	return errors.Join(detach(d.cfg.Dir, hook{ifindex, tapIn}), detach(d.cfg.Dir, hook{ifindex, tapOut}))
}

// Taps lists the devices that tap programs have been attached to and not detached from, by any process. They may be gone.
func (d *Datapath) Taps() ([]int, error) {
	hooks, err := hooks(d.cfg.Dir)
	if err != nil {
		return nil, err
	}
	var taps []int
	for _, h := range hooks {
		if h.point == tapIn {
			taps = append(taps, h.ifindex)
		}
	}
	return taps, nil
}

func (d *Datapath) attach(hooks ...hook) (err error) {
	var u undo.Stack
	defer u.Run(&err)
	for _, h := range hooks {
		fresh, err := d.attachOne(h)
		if err != nil {
			return fmt.Errorf("attach %s: %w", h, err)
		}
		if fresh {
			u.Push(func() error { return detach(d.cfg.Dir, h) })
		}
	}
	return nil
}

// attachOne attaches a hook's program, then detaches what is attached there the other way, which saw no frame any more or
// sees none yet: links come before filters, and our programs let none get to the next. fresh: there was none.
func (d *Datapath) attachOne(h hook) (fresh bool, err error) {
	if !d.cfg.Clsact {
		fresh, err = attachTCX(d.cfg.Dir, h, *d.program(h.point))
		if err == nil {
			return fresh, detachFilter(d.cfg.Dir, h)
		}
		if !errors.Is(err, ebpf.ErrNotSupported) {
			return false, err
		}
	}
	fresh, err = attachFilter(d.cfg.Dir, h, *d.program(h.point))
	if err != nil {
		return false, err
	}
	return fresh, detachTCX(d.cfg.Dir, h)
}

func (d *Datapath) check(h hook) error {
	want, err := d.programID(h.point)
	if err != nil {
		return err
	}
	var have ebpf.ProgramID
	if _, err := os.Stat(h.pin(filtersDir(d.cfg.Dir))); err == nil {
		have, err = firstFilter(h)
		if err != nil {
			return fmt.Errorf("check %s: %w", h, err)
		}
	} else {
		have, err = firstTCX(h)
		if err != nil {
			return fmt.Errorf("check %s: %w", h, err)
		}
	}
	switch have {
	case want:
		return nil
	case 0:
		return fmt.Errorf("%s has no program; attach it again", h)
	}
	return fmt.Errorf("%s runs program %d first, not %d; attach it again, or detach what is before it", h, have, want)
}

// programID asks for a program's number, once: the kernel tells all there is of a program.
func (d *Datapath) programID(p point) (ebpf.ProgramID, error) {
	d.idsMu.Lock()
	defer d.idsMu.Unlock()
	if id, ok := d.ids[p]; ok {
		return id, nil
	}
	info, err := (*d.program(p)).Info()
	if err != nil {
		return 0, fmt.Errorf("ask for program %s: %w", p.name, err)
	}
	id, ok := info.ID()
	if !ok {
		return 0, fmt.Errorf("program %s has no id", p.name)
	}
	d.ids[p] = id
	return id, nil
}

func detach(dir string, h hook) error {
	return errors.Join(detachTCX(dir, h), detachFilter(dir, h))
}

// hooks lists all that is attached.
func hooks(dir string) ([]hook, error) {
	var all []hook
	for _, pins := range []string{linksDir(dir), filtersDir(dir)} {
		entries, err := os.ReadDir(pins)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			number, name, _ := strings.Cut(e.Name(), "-")
			ifindex, err := strconv.Atoi(number)
			if err != nil {
				return nil, fmt.Errorf("%s in %s is not ours", e.Name(), pins)
			}
			for _, p := range []point{tapIn, tapOut, gwOut} {
				if p.name == name {
					all = append(all, hook{ifindex, p})
				}
			}
		}
	}
	return all, nil
}

func detachAll(dir string) error {
	hooks, err := hooks(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range hooks {
		if err := detach(dir, h); err != nil {
			errs = append(errs, fmt.Errorf("detach %s: %w", h, err))
		}
	}
	return errors.Join(errs...)
}
