// Package base makes machines: it boots one of each shape once, saves it before anything has run in it, and restores
// that for every machine asked for. It is the vmm.Launcher of the host.
//
// It doesn't know what runs in the guest. Whoever uses the package says how to wait for the guest and bring it to rest
// before it is saved (Settle).
package base

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/tsc"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/memory"
	"github.com/cubesandbox/cube/vmm/qemu"
)

// bootTimeout is how long a guest may take from its start to its being settled. Emulated on an idle host it takes 6 to
// 10 s.
const bootTimeout = 90 * time.Second

// deathDelay is how much later than a broken agent channel the machine's end may be known.
const deathDelay = time.Second

// trialShape is what the trial of KVM boots.
var trialShape = vmm.Shape{VCPUs: 1, MemoryMiB: 256}

// Settle waits until the guest behind the agent channel answers, and returns when it is at rest and ready to be saved:
// every machine of the shape begins at that point. It is called while the guest is still booting. It may close agent,
// which doesn't reach the guest.
type Settle func(ctx context.Context, agent net.Conn) error

// Launcher is this host's vmm.Launcher.
type Launcher struct {
	cfg    *config.Config
	log    *slog.Logger
	settle Settle
	driver *qemu.Driver
	judge  *accel.Judge
	cache  *cache
}

var _ vmm.Launcher = (*Launcher)(nil)

// NewLauncher returns the launcher. It touches nothing yet.
func NewLauncher(cfg *config.Config, settle Settle, log *slog.Logger) *Launcher {
	return &Launcher{
		cfg:    cfg,
		log:    log,
		settle: settle,
		driver: qemu.NewDriver(cfg, log),
		judge:  accel.NewJudge(cfg, log),
		cache: &cache{
			dir:  cfg.BaseDir(),
			max:  cfg.VM.BaseSnapshots,
			pool: memory.NewPool(filepath.Join(cfg.RunDir, "base")),
			log:  log,
		},
	}
}

// machine lets go of the base snapshot's memory with its end.
type machine struct {
	*qemu.Machine
	letGo func() error // of the base, once
}

// Stop is the machine's, and lets go of the memory.
func (m *machine) Stop(ctx context.Context) error {
	return errors.Join(m.Machine.Stop(ctx), m.letGo())
}

// Launch restores a machine from the base snapshot of the shape that fits r, after making that if there is none.
func (l *Launcher) Launch(ctx context.Context, r vmm.Request) (_ vmm.Machine, err error) {
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return os.RemoveAll(r.Dir) })

	b, err := l.base(ctx, r.Shape)
	if err != nil {
		return nil, err
	}
	u.Push(b.Close)
	modules, err := os.Open(filepath.Join(l.cfg.GuestDir(), "modules.img"))
	if err != nil {
		return nil, err
	}
	defer modules.Close()
	m, err := l.driver.Start(ctx, &qemu.Spec{
		ID:       r.ID,
		Dir:      r.Dir,
		QEMU:     l.cfg.QEMUDir(),
		Shape:    b.Key.Shape,
		CPULimit: r.CPULimit,
		NetNS:    r.NetNS,
		Accel:    b.Key.Accel,
		Memory:   b.held.File,
		Modules:  modules,
		Root:     r.Root,
		State:    b.state,
	})
	if err != nil {
		return nil, err
	}
	return &machine{Machine: m, letGo: sync.OnceValue(b.Close)}, nil
}

// Warm is a base snapshot that this process keeps in memory, for itself and for all others.
type Warm struct{ base *ready }

// Release ends that.
func (w *Warm) Release() error { return w.base.Close() }

// Warm makes the base snapshot for that shape, if there is none, and holds it.
func (l *Launcher) Warm(ctx context.Context, shape vmm.Shape) (*Warm, error) {
	b, err := l.base(ctx, shape)
	if err != nil {
		return nil, err
	}
	return &Warm{base: b}, nil
}

// Accelerator says what executes guests on this host, after a trial of KVM if that is worth one.
func (l *Launcher) Accelerator(ctx context.Context) (accel.Verdict, error) {
	subject, err := l.subject()
	if err != nil {
		return accel.Verdict{}, err
	}
	return l.judge.Decide(ctx, subject, func(ctx context.Context) error {
		m, _, err := l.boot(ctx, accel.KVM, trialShape)
		if err != nil {
			return err
		}
		return halt(m)
	})
}

// KnownAccelerator is Accelerator without a trial: accel.ErrUndecided if that takes one.
func (l *Launcher) KnownAccelerator() (accel.Verdict, error) {
	subject, err := l.subject()
	if err != nil {
		return accel.Verdict{}, err
	}
	return l.judge.Known(subject)
}

// subject is what a trial of KVM is about.
func (l *Launcher) subject() (string, error) {
	k, err := newKey(l.cfg, "", trialShape)
	return k.QEMU + " " + k.Guest, err
}

// base returns the base snapshot for a shape.
func (l *Launcher) base(ctx context.Context, asked vmm.Shape) (*ready, error) {
	max, err := limits(l.cfg)
	if err != nil {
		return nil, err
	}
	shape, err := rung(asked, max)
	if err != nil {
		return nil, err
	}
	v, err := l.Accelerator(ctx)
	if err != nil {
		return nil, err
	}
	key, err := newKey(l.cfg, v.Kind, shape)
	if err != nil {
		return nil, err
	}
	khz, err := l.tscKHz()
	if err != nil {
		return nil, err
	}
	return l.cache.get(ctx, key, khz, func(ctx context.Context, dir string) error {
		return l.build(ctx, key, khz, dir)
	})
}

func (l *Launcher) tscKHz() (int, error) {
	if err := os.MkdirAll(l.cfg.RunDir, 0o711); err != nil {
		return 0, err
	}
	return tsc.Cached(filepath.Join(l.cfg.RunDir, "tsc-khz"))
}

// boot starts a machine of its own from the kernel and has the guest settled. mem is its memory, which outlives it.
func (l *Launcher) boot(ctx context.Context, kind accel.Kind, shape vmm.Shape) (_ *qemu.Machine, mem *os.File, err error) {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.Timeout(bootTimeout))
	defer cancel()
	var files undo.Stack // QEMU has its own
	defer func() { _ = files.Release() }()
	openGuest := func(name string) *os.File {
		f, e := os.Open(filepath.Join(l.cfg.GuestDir(), name))
		if e != nil {
			err = errors.Join(err, fmt.Errorf("the guest image is incomplete: %w; run the set-up (make run)", e))
			return nil
		}
		files.Push(f.Close)
		return f
	}
	kernel, initrd, modules := openGuest("vmlinuz"), openGuest("initrd.img"), openGuest("modules.img")
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
		QEMU:    l.cfg.QEMUDir(),
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
