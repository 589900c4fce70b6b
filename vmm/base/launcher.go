// Package base makes machines: it boots one of each shape once, saves it before anything has run in it, and restores
// that for every machine asked for; or it restores a snapshot of a machine in which something has run. It is the
// vmm.Launcher of the host.
//
// It doesn't know what runs in the guest. Whoever uses the package says how to wait for the guest and bring it to rest
// before it is saved (Settle).
package base

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/tsc"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/qemu"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

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
	saved  *snapshot.Store
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
		cache:  newCache(cfg, log),
		saved:  snapshot.New(cfg, log),
	}
}

// machine lets go of the snapshot's memory and of its artefacts with its end.
type machine struct {
	*qemu.Machine
	letGo func() error // once
}

// Stop is the machine's, and lets go of what it needed.
func (m *machine) Stop(ctx context.Context) error {
	return errors.Join(m.Machine.Stop(ctx), m.letGo())
}

// Launch restores a machine from the snapshot that r names, or from the base snapshot of the shape that fits r, after making
// that if there is none.
func (l *Launcher) Launch(ctx context.Context, r vmm.Request) (_ vmm.Machine, err error) {
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return os.RemoveAll(r.Dir) })

	if r.Snapshot != "" {
		return l.restore(ctx, r)
	}
	art, release, err := useCurrent(ctx, l.cfg)
	if err != nil {
		return nil, err
	}
	u.Push(release)
	b, err := l.base(ctx, art, r.Shape)
	if err != nil {
		return nil, err
	}
	u.Push(b.Close)
	modules, err := os.Open(filepath.Join(art.guest, modulesFile))
	if err != nil {
		return nil, err
	}
	defer modules.Close()
	m, err := l.driver.Start(ctx, &qemu.Spec{
		ID:       r.ID,
		Dir:      r.Dir,
		QEMU:     art.qemu,
		Shape:    b.Key.Shape,
		CPULimit: r.CPULimit,
		NetNS:    r.NetNS,
		Tap:      r.Tap,
		Accel:    b.Key.Accel,
		Memory:   b.held.File,
		Modules:  modules,
		Root:     r.Root,
		State:    b.state,
		Platform: b.platform(),
		Base:     &qemu.Base{File: b.memory, Digests: b.Memory.Digests},
	})
	if err != nil {
		return nil, err
	}
	letGo := func() error { return errors.Join(b.Close(), release()) }
	return &machine{Machine: m, letGo: sync.OnceValue(letGo)}, nil
}

// Warm is a base snapshot that this process keeps in memory, for itself and for all others.
type Warm struct{ base *ready }

// Release ends that.
func (w *Warm) Release() error { return w.base.Close() }

// Warm makes the base snapshot for that shape, if there is none, and holds it.
func (l *Launcher) Warm(ctx context.Context, shape vmm.Shape) (*Warm, error) {
	art, release, err := useCurrent(ctx, l.cfg)
	if err != nil {
		return nil, err
	}
	defer func() { _ = release() }()
	l.cache.sweepIfIdle()
	b, err := l.base(ctx, art, shape)
	if err != nil {
		return nil, err
	}
	return &Warm{base: b}, nil
}

// Accelerator says what executes guests on this host, after a trial of KVM if that is worth one.
func (l *Launcher) Accelerator(ctx context.Context) (accel.Verdict, error) {
	art, release, err := useCurrent(ctx, l.cfg)
	if err != nil {
		return accel.Verdict{}, err
	}
	defer func() { _ = release() }()
	return l.accelerator(ctx, art)
}

func (l *Launcher) accelerator(ctx context.Context, art artefacts) (accel.Verdict, error) {
	return l.judge.Decide(ctx, art.subject(), func(ctx context.Context) error {
		m, mem, err := l.boot(ctx, art, accel.KVM, trialShape)
		if err != nil {
			return err
		}
		return errors.Join(halt(m), mem.Close())
	})
}

// KnownAccelerator is Accelerator without a trial: accel.ErrUndecided if that takes one.
func (l *Launcher) KnownAccelerator() (accel.Verdict, error) {
	art, err := currentArtefacts(l.cfg)
	if err != nil {
		return accel.Verdict{}, err
	}
	return l.judge.Known(art.subject())
}

// subject is what a trial of KVM is about.
func (a artefacts) subject() string { return filepath.Base(a.qemu) + " " + filepath.Base(a.guest) }

// base returns the base snapshot for a shape.
func (l *Launcher) base(ctx context.Context, art artefacts, asked vmm.Shape) (*ready, error) {
	max, err := limits(l.cfg)
	if err != nil {
		return nil, err
	}
	shape, err := rung(asked, max)
	if err != nil {
		return nil, err
	}
	v, err := l.accelerator(ctx, art)
	if err != nil {
		return nil, err
	}
	key, err := newKey(art, v.Kind, shape)
	if err != nil {
		return nil, err
	}
	khz, err := l.tscKHz()
	if err != nil {
		return nil, err
	}
	return l.cache.get(ctx, key, khz, func(ctx context.Context, dir string) error {
		return l.build(ctx, art, key, khz, dir)
	})
}

func (l *Launcher) tscKHz() (int, error) {
	if err := os.MkdirAll(l.cfg.RunDir, 0o711); err != nil {
		return 0, err
	}
	return tsc.Cached(filepath.Join(l.cfg.RunDir, "tsc-khz"))
}
