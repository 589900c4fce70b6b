package qemu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/process"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/accel"
	"github.com/cubesandbox/cube/vmm/cgroup"
	"github.com/cubesandbox/cube/vmm/jail"
	"github.com/cubesandbox/cube/vmm/qmp"
	"github.com/cubesandbox/cube/vmm/record"
)

const (
	// startTimeout is how long QEMU may take to its first word, restoring included.
	startTimeout = 15 * time.Second
	// commandTimeout is how long QEMU may take for a command that nobody outside waits for.
	commandTimeout = 5 * time.Second
)

// Spec is one machine. Its files stay the caller's, who may close them after Start.
type Spec struct {
	ID  string
	Dir string // see vmm.Request
	// QEMU is the artefact directory to run it from.
	QEMU     string
	Shape    vmm.Shape
	CPULimit float64
	NetNS    string
	Tap      *os.File // see vmm.Request
	Accel    accel.Kind
	// Memory is a file of the shape's size that any uid may open (memory.Scratch, or a sealed one). For a machine that
	// shares it, it must be the machine's alone.
	Memory *os.File
	Share  bool
	// Modules is the image of the guest's kernel modules, opened for reading.
	Modules *os.File
	// Root is the image of the first disk, or nil.
	Root *os.File
	// Boot starts the guest from its kernel, State (opened for reading) restores it: one of them is set.
	Boot  *Boot
	State *os.File
}

// Driver starts machines.
type Driver struct {
	cfg  *config.Config
	log  *slog.Logger
	uids *jail.UIDs
}

// NewDriver returns the driver of this host.
func NewDriver(cfg *config.Config, log *slog.Logger) *Driver {
	return &Driver{cfg: cfg, log: log, uids: jail.NewUIDs(cfg)}
}

// Start returns a machine that runs: its guest is booting, or goes on from where it was saved. On error nothing is left,
// s.Dir included.
func (d *Driver) Start(ctx context.Context, s *Spec) (_ *Machine, err error) {
	var u undo.Stack
	defer u.Run(&err)
	u.Push(func() error { return os.RemoveAll(s.Dir) })
	began := time.Now()

	if s.Tap != nil {
		if err := validTap(s.Tap); err != nil {
			return nil, err
		}
	}
	rec, err := record.New(ctx, s.Dir, s.ID)
	if err != nil {
		return nil, err
	}
	uid, err := d.uids.Take(s.Dir, func(uid uint32) error {
		return rec.Update(func(r *record.State) { r.UID, r.Cgroup = uid, record.CgroupName(d.cfg, s.Dir, s.ID) })
	})
	if err != nil {
		return nil, err
	}
	u.Push(func() error { return d.uids.Release(uid, s.Dir) })
	group, err := cgroup.Create(ctx, record.CgroupName(d.cfg, s.Dir, s.ID), limits(s), d.log)
	if err != nil {
		return nil, err
	}
	u.Push(func() error { return d.removeGroup(group) })

	ch, err := openChannels()
	if err != nil {
		return nil, err
	}
	u.Push(ch.closeHost)
	cmd := &jail.Command{
		Launcher: d.cfg.Bin("cube-jail"),
		Name:     s.ID,
		Output:   ch.output,
		UID:      uid,
		Cgroup:   group,
		NetNS:    s.NetNS,
		KVM:      s.Accel == accel.KVM,
		Tap:      s.Tap == nil,
	}
	// The directory behind the name "current": the machine keeps to it whatever set-up publishes meanwhile.
	if cmd.Root, err = filepath.EvalSymlinks(s.QEMU); err != nil {
		return nil, errors.Join(fmt.Errorf("QEMU is missing: %w; run the set-up (make run)", err), ch.closeGuest())
	}
	var root *os.File
	if s.Root != nil {
		if root, err = openRoot(s.Root); err != nil {
			return nil, errors.Join(fmt.Errorf("root disk: %w", err), ch.closeGuest())
		}
		defer root.Close()
	}
	if cmd.Argv, err = s.descriptors(cmd, ch, root); err != nil {
		return nil, errors.Join(err, ch.closeGuest())
	}
	prepared := time.Now()
	proc, err := cmd.Start(func(pid int) error {
		id, err := process.Of(pid)
		if err != nil {
			return err
		}
		return rec.Update(func(r *record.State) { r.QEMU = id })
	})
	if err := errors.Join(err, ch.closeGuest()); err != nil {
		return nil, &vmm.BootError{Stage: "start", Err: err}
	}
	m := newMachine(d, s, group, proc, ch)
	m.release.Push(func() error { return os.RemoveAll(s.Dir) })
	m.release.Push(func() error { return d.uids.Release(uid, s.Dir) })
	m.release.Push(func() error { return d.removeGroup(group) })
	u.Push(m.end) // ahead of the releases: nothing can be freed under a running process

	spawned := time.Now()
	if err := m.awaitRunning(ctx); err != nil {
		return nil, err
	}
	m.log.Debug("the machine runs", "pid", proc.PID(), "prepared", prepared.Sub(began), "spawned", spawned.Sub(prepared),
		"running", time.Since(spawned))
	return m, nil
}

// descriptors hands files over to the jail and returns the command line that names them.
func (s *Spec) descriptors(cmd *jail.Command, ch *channels, root *os.File) ([]string, error) {
	add := func(f *os.File) int {
		cmd.Files = append(cmd.Files, f)
		return cmd.TapFD() - 1
	}
	f := fds{qmp: add(ch.qmp), agent: add(ch.agent), console: add(ch.console), memory: add(s.Memory), modules: add(s.Modules)}
	if s.Boot != nil {
		f.kernel, f.initrd = add(s.Boot.Kernel), add(s.Boot.Initrd)
	}
	if s.State != nil {
		f.state = add(s.State)
	}
	if root != nil {
		f.root = add(root)
	}
	if s.Tap != nil {
		f.tap = add(s.Tap)
	} else {
		f.tap = cmd.TapFD()
	}
	return layout(s, f).Argv()
}

// openRoot opens the image for QEMU. One larger than the guest takes it to be would lose its end.
func openRoot(image *os.File) (*os.File, error) {
	info, err := image.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > vmm.RootBytes {
		return nil, fmt.Errorf("%s has more than %d bytes", image.Name(), int64(vmm.RootBytes))
	}
	return reopen(image, false)
}

func (d *Driver) removeGroup(g *cgroup.Group) error {
	ctx, cancel := context.WithTimeout(context.Background(), d.cfg.Timeout(commandTimeout))
	defer cancel()
	return g.Remove(ctx)
}

// channels are the sockets between this process and the machine. The files are QEMU's ends.
type channels struct {
	qmp, agent, console, output     *os.File
	qmpConn, agentConn, consoleConn *net.UnixConn
	outputRead                      *os.File
}

func openChannels() (_ *channels, err error) {
	ch := &channels{}
	var u undo.Stack
	defer u.Run(&err)
	u.Push(ch.closeHost)
	u.Push(ch.closeGuest)
	if ch.qmpConn, ch.qmp, err = socketpair("qmp"); err != nil {
		return nil, err
	}
	if ch.agentConn, ch.agent, err = socketpair("agent"); err != nil {
		return nil, err
	}
	if ch.consoleConn, ch.console, err = socketpair("console"); err != nil {
		return nil, err
	}
	if ch.outputRead, ch.output, err = os.Pipe(); err != nil {
		return nil, err
	}
	return ch, nil
}

// closeGuest closes QEMU's ends in this process.
func (ch *channels) closeGuest() error {
	for _, f := range []*os.File{ch.qmp, ch.agent, ch.console, ch.output} {
		_ = f.Close() // nil included
	}
	return nil
}

func (ch *channels) closeHost() error {
	for _, c := range []*net.UnixConn{ch.qmpConn, ch.agentConn, ch.consoleConn} {
		if c != nil {
			_ = c.Close()
		}
	}
	_ = ch.outputRead.Close() // nil included
	return nil
}

func socketpair(name string) (*net.UnixConn, *os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make the %s channel: %w", name, err)
	}
	host, guest := os.NewFile(uintptr(pair[0]), name), os.NewFile(uintptr(pair[1]), name)
	defer host.Close() // FileConn has its own duplicate
	c, err := net.FileConn(host)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make the %s channel: %w", name, err), guest.Close())
	}
	return c.(*net.UnixConn), guest, nil
}

// awaitRunning waits for QMP and for the state, if there is one, to be loaded.
func (m *Machine) awaitRunning(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.driver.cfg.Timeout(startTimeout))
	defer cancel()
	stage := "start"
	if m.restored {
		stage = "restore"
	}
	resumed := m.qmp.Subscribe("RESUME")
	defer resumed.Close()
	err := m.qmp.Open(ctx)
	if err == nil {
		var status struct {
			Status string `json:"status"`
		}
		err = m.qmp.Do(ctx, "query-status", nil, &status)
		if err == nil && status.Status == "inmigrate" {
			select {
			case _, ok := <-resumed.C():
				if !ok {
					err = qmp.ErrClosed
				}
			case <-ctx.Done():
				err = fmt.Errorf("the state has not been loaded: %w", ctx.Err())
			}
		} else if err == nil && status.Status != "running" {
			err = fmt.Errorf("QEMU is in state %q", status.Status)
		}
	}
	if err == nil {
		return nil
	}
	if errors.Is(err, qmp.ErrClosed) { // QEMU is ending: its exit says more
		select {
		case <-m.done:
			err = errors.New("QEMU ended: " + m.proc.Status())
		case <-ctx.Done():
		}
	}
	return &vmm.BootError{Stage: stage, Console: m.Tail(), Err: err}
}
