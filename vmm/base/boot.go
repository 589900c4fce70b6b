package base

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/qemu"
)

// bootTimeout is how long a guest may take from its start to its being settled. Emulated on an idle host it takes 6 to
// 10 s.
const bootTimeout = 90 * time.Second

// hangTimeout is how long the first try of an emulated guest may take. Once in some dozens of boots one of several CPUs stands
// still, half a second into its kernel's time, and never answers (seen with QEMU 7.2, at loads of 3 and more).
const hangTimeout = 45 * time.Second

// deathDelay is how much later than a broken agent channel the machine's end may be known.
const deathDelay = time.Second

// The files of a guest image.
const (
	kernelFile  = "vmlinuz"
	initrdFile  = "initrd.img"
	modulesFile = "modules.img"
)

// bootAgain is boot for a guest that nothing depends on yet: one that hangs is given up for another.
func (l *Launcher) bootAgain(ctx context.Context, art artefacts, kind accel.Kind, shape vmm.Shape) (*qemu.Machine, *os.File, error) {
	if kind == accel.TCG {
		first, cancel := context.WithTimeout(ctx, l.cfg.Timeout(hangTimeout))
		defer cancel()
		m, mem, err := l.boot(first, art, kind, shape)
		var failed *vmm.BootError
		hangs := errors.As(err, &failed) && failed.Stage == "agent" && first.Err() != nil && ctx.Err() == nil
		if !hangs {
			return m, mem, err
		}
		l.log.Warn("an emulated guest hangs; it is booted once more", "shape", shape, "error", err)
	}
	return l.boot(ctx, art, kind, shape)
}

// boot starts a machine of its own from the kernel and has the guest settled. mem is its memory, which outlives it.
func (l *Launcher) boot(ctx context.Context, art artefacts, kind accel.Kind, shape vmm.Shape) (_ *qemu.Machine, mem *os.File, err error) {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.Timeout(bootTimeout))
	defer cancel()
	var files undo.Stack // QEMU has its own
	defer func() { _ = files.Release() }()
	openGuest := func(name string) *os.File {
		f, e := os.Open(filepath.Join(art.guest, name))
		if e != nil {
			err = errors.Join(err, fmt.Errorf("the guest image is incomplete: %w; run the set-up (make run)", e))
			return nil
		}
		files.Push(f.Close)
		return f
	}
	kernel, initrd, modules := openGuest(kernelFile), openGuest(initrdFile), openGuest(modulesFile)
	if err != nil {
		return nil, nil, err
	}
	khz, err := l.tscKHz()
	if err != nil {
		return nil, nil, err
	}
	var u undo.Stack
	defer u.Run(&err)
	if mem, err = memory.Scratch(int64(shape.MemoryMiB) << 20); err != nil {
		return nil, nil, err
	}
	u.Push(mem.Close)
	id, dir, err := l.machineDir()
	if err != nil {
		return nil, nil, err
	}
	m, err := l.driver.Start(ctx, &qemu.Spec{
		ID:      id,
		Dir:     dir,
		QEMU:    art.qemu,
		Shape:   shape,
		Accel:   kind,
		Memory:  mem,
		Share:   true,
		Modules: modules,
		Boot:    &qemu.Boot{Kernel: kernel, Initrd: initrd, TSCKHz: khz},
	})
	if err != nil {
		return nil, nil, err
	}
	u.Push(func() error { return halt(m) })
	if err := l.settle(ctx, stayOpen{m.Agent()}); err != nil {
		return nil, nil, l.bootError(ctx, m, err)
	}
	return m, mem, nil
}

// bootError tells a guest that has died from one that doesn't answer.
func (l *Launcher) bootError(ctx context.Context, m *qemu.Machine, err error) error {
	select {
	case <-m.Done():
	case <-time.After(l.cfg.Timeout(deathDelay)):
	}
	var death *vmm.DeathError
	if errors.As(m.Err(), &death) {
		return &vmm.BootError{Stage: "boot", Console: death.Console, Err: errors.New(death.Reason)}
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("the guest has not answered in time: %w", err)
	}
	return &vmm.BootError{Stage: "agent", Console: m.Tail(), Err: err}
}

// machineDir makes the directory of a machine that nobody has asked for.
func (l *Launcher) machineDir() (id, dir string, err error) {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	id = "base-" + hex.EncodeToString(b[:])
	if err := os.MkdirAll(l.cfg.VMDir(), 0o711); err != nil {
		return "", "", err
	}
	dir = filepath.Join(l.cfg.VMDir(), id)
	return id, dir, os.Mkdir(dir, 0o700)
}

// halt ends a machine without waiting for its guest.
func halt(m *qemu.Machine) error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return m.Stop(ctx)
}

// stayOpen keeps the channel open when whoever settles the guest is done with it: a guest that is saved must not see an
// end of file.
type stayOpen struct{ net.Conn }

// Close ends what still waits for the channel.
func (c stayOpen) Close() error { return c.SetDeadline(time.Unix(1, 0)) }
