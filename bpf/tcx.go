package bpf

import (
	"errors"
	"io/fs"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

func tcxType(p point) ebpf.AttachType {
	if p.egress {
		return ebpf.AttachTCXEgress
	}
	return ebpf.AttachTCXIngress
}

// attachTCX updates the pinned link, or makes one: first in line, as a program before it could let anything pass.
func attachTCX(dir string, h hook, prog *ebpf.Program) (fresh bool, err error) {
	pin := h.pin(linksDir(dir))
	l, err := link.LoadPinnedLink(pin, nil)
	if err == nil {
		defer func() { err = errors.Join(err, l.Close()) }()
		if attached(l, h.ifindex) {
			return false, l.Update(prog)
		}
		// Its device is gone, and another one has the number.
		if err := l.Unpin(); err != nil {
			return false, err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	made, err := link.AttachTCX(link.TCXOptions{Interface: h.ifindex, Program: prog, Attach: tcxType(h.point), Anchor: link.Head()})
	if err != nil {
		return false, err
	}
	return true, errors.Join(made.Pin(pin), made.Close())
}

func attached(l link.Link, ifindex int) bool {
	info, err := l.Info()
	if err != nil {
		return false
	}
	tcx := info.TCX()
	return tcx != nil && int(tcx.Ifindex) == ifindex
}

func detachTCX(dir string, h hook) error {
	l, err := link.LoadPinnedLink(h.pin(linksDir(dir)), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(l.Unpin(), l.Close())
}

// firstTCX returns the first program of a direction of a device; 0: it has none.
func firstTCX(h hook) (ebpf.ProgramID, error) {
	found, err := link.QueryPrograms(link.QueryOptions{Target: h.ifindex, Attach: tcxType(h.point)})
	if err != nil || len(found.Programs) == 0 {
		return 0, err
	}
	return found.Programs[0].ID, nil
}
