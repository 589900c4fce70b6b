package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/api"
	"github.com/cubesandbox/cube/orchestrator/ingress/keeper"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/vmm/record"
)

// sandboxTimeout bounds, beside the grace that sandboxes get, how long containerd may take to stop all of them.
const sandboxTimeout = time.Minute

// Down stops this stack's sandboxes, giving each grace to end by itself, then the `cube up` that runs it, its private
// containerd and its store. It works from any state, a killed `cube up` too, and is idempotent. Of an existing
// containerd it stops this runtime's tasks only. Containers, images and snapshots stay on disk. The network loses the
// sandboxes' places and stays up; with purge all of it goes, and the host's network is as it was before the first Up.
func Down(ctx context.Context, cfg *config.Config, grace time.Duration, purge bool, o Options) error {
	if os.Geteuid() != 0 {
		return errors.New("the stack needs root: use sudo")
	}
	if _, err := os.Stat(cfg.RunDir); errors.Is(err, fs.ErrNotExist) {
		return releaseStore(cfg)
	}
	d := &downer{Options: o, cfg: cfg, grace: grace}
	l, err := acquire(cfg)
	var busy *BusyError
	if errors.As(err, &busy) {
		// Sandboxes first: it takes containerd to stop them well, and that `cube up` stops containerd. Those that
		// can't be stopped now have another chance below.
		if err := d.stopSandboxes(ctx); err != nil {
			o.Log.Info("not all sandboxes could be stopped while the stack runs", "error", err)
		}
		if l, err = d.stopUp(ctx, busy.PID); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	if err := d.clear(ctx); err != nil {
		return errors.Join(err, l.release())
	}
	if purge {
		if err := removeNetwork(ctx, cfg); err != nil {
			return errors.Join(err, l.release())
		}
	}
	return errors.Join(l.remove(), removeEmpty(cfg.RunDir))
}

type downer struct {
	Options
	cfg   *config.Config
	grace time.Duration
}

// stopSandboxes stops what runs in containerd, which must answer.
func (d *downer) stopSandboxes(ctx context.Context) error {
	defer d.Progress("the sandboxes to stop")()
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Timeout(d.grace+sandboxTimeout))
	defer cancel()
	c, err := sandbox.Connect(ctx, d.cfg)
	if err != nil {
		return err
	}
	defer c.Close()
	private := d.cfg.Containerd.Address == ""
	n, err := c.StopAll(ctx, d.cfg.Timeout(d.grace), func(runtime string) bool {
		return private || runtime == sandbox.Runtime
	})
	d.Log.Info("stopped sandboxes", "count", n)
	return err
}

// stopRest is stopSandboxes where nothing else can be tried through containerd: what is left is ended by force.
func (d *downer) stopRest(ctx context.Context) {
	if err := d.stopSandboxes(ctx); err != nil {
		d.Log.Warn("ending by force what containerd couldn't stop", "error", err)
	}
}

// stopUp ends the process that holds the run directory and takes its place.
func (d *downer) stopUp(ctx context.Context, pid int) (*lock, error) {
	defer d.Progress("`cube up` to stop")()
	p, err := openProcess(pid)
	if err == nil {
		sctx, cancel := context.WithTimeout(ctx, d.cfg.Timeout(api.DrainTimeout+2*stopTimeout)) // it ends what is under way and stops its own daemons meanwhile
		defer cancel()
		if err := p.stop(sctx); err != nil {
			return nil, err
		}
		p.close()
	}
	return acquire(d.cfg)
}

// clear stops and removes what is left when no `cube up` runs.
func (d *downer) clear(ctx context.Context) error {
	var errs []error
	if d.cfg.Containerd.Address == "" {
		errs = append(errs, d.clearContainerd(ctx))
	} else {
		d.stopRest(ctx)
	}
	errs = append(errs, d.stopProxy(ctx), d.clearShims(ctx), d.clearMachines(), network.New(d.cfg).Clear(ctx), UnmountBelow(sandbox.MountDir(d.cfg)))
	if d.cfg.Containerd.Address == "" {
		errs = append(errs, UnmountBelow(filepath.Join(d.cfg.StateDir, "containerd")), UnmountBelow(ContainerdState(d.cfg)))
	}
	errs = append(errs, releaseStore(d.cfg))
	if err := errors.Join(errs...); err != nil {
		return err // keep what explains it
	}
	for _, name := range runEntries {
		if filepath.Join(d.cfg.RunDir, name) == d.cfg.Containerd.Address {
			continue
		}
		errs = append(errs, os.RemoveAll(filepath.Join(d.cfg.RunDir, name)))
	}
	return errors.Join(errs...)
}

// runEntries are what Cube makes in its run directory, which may not be its alone, but for the network's, which stays as long
// as that is up.
var runEntries = []string{
	"base", "clones", "containerd", "containerd.sock", "containerd.sock.ttrpc", "containerd.toml", "cube.sock", "fifo", "ingress", "mounts",
	"notify.sock", "pods", "proxy", "shim", "snapshots", "snapshotter.sock", "tsc-khz", "uids", "vm",
}

// stopProxy ends the data plane, in which nothing leads anywhere any more.
func (d *downer) stopProxy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Timeout(stopTimeout))
	defer cancel()
	return keeper.Stop(ctx, d.cfg)
}

// clearShims ends the shims that containerd has lost sight of.
func (d *downer) clearShims(ctx context.Context) error {
	found, err := findProcesses(func(argv []string) bool { return isShim(d.cfg, argv) })
	sctx, cancel := context.WithTimeout(ctx, d.cfg.Timeout(stopTimeout))
	defer cancel()
	errs := []error{err}
	for _, p := range found {
		errs = append(errs, p.stop(sctx))
		p.close()
	}
	return errors.Join(errs...)
}

// clearMachines frees what machines hold whose shims are gone.
func (d *downer) clearMachines() error {
	entries, err := os.ReadDir(d.cfg.VMDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		errs = append(errs, record.Cleanup(d.cfg, filepath.Join(d.cfg.VMDir(), e.Name())))
	}
	return errors.Join(errs...)
}

// removeNetwork takes the network down, which no machine uses any more.
func removeNetwork(ctx context.Context, cfg *config.Config) error {
	if err := network.New(cfg).Down(ctx); err != nil {
		return fmt.Errorf("take the network down: %w", err)
	}
	if err := gateway.Down(ctx, cfg); err != nil {
		return fmt.Errorf("take the network's gateway down: %w", err)
	}
	return nil
}

// clearContainerd stops what runs in the private containerd and then containerd itself. When that isn't running but
// tasks are left, it is started for it: stopping tasks is what it can do and nobody else.
func (d *downer) clearContainerd(ctx context.Context) error {
	proc, err := findContainerd(d.cfg)
	if err != nil {
		return err
	}
	ctrd := &daemon{proc: proc, adopted: true, log: containerdLog(d.cfg)}
	if proc == nil {
		if !hasBundles(d.cfg) {
			return nil
		}
		conf, err := containerdConfig(d.cfg)
		if err != nil {
			return err
		}
		rctx, cancel := context.WithTimeout(ctx, d.cfg.Timeout(time.Duration(d.cfg.ReadyTimeout)))
		defer cancel()
		if ctrd, err = launchContainerd(rctx, d.cfg, conf); err != nil {
			return fmt.Errorf("start containerd to stop what it left: %w", err)
		}
	}
	d.stopRest(ctx)
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.cfg.Timeout(stopTimeout))
	defer cancel()
	return ctrd.stop(sctx)
}

// hasBundles says whether the private containerd has left tasks.
func hasBundles(cfg *config.Config) bool {
	found, _ := filepath.Glob(filepath.Join(cfg.BundleDir(), "*", "*"))
	return len(found) > 0
}

// removeEmpty removes a directory unless something is in it.
func removeEmpty(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) > 0 {
		return nil
	}
	return errors.Join(err, os.Remove(dir))
}

// UnmountBelow unmounts what a killed containerd has left mounted below dir.
func UnmountBelow(dir string) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return fmt.Errorf("look for mounts below %s: %w", dir, err)
	}
	var errs []error
	for _, m := range slices.Backward(mounts) { // the last mounted first
		if err := unix.Unmount(m.Mountpoint, unix.UMOUNT_NOFOLLOW); err != nil {
			errs = append(errs, fmt.Errorf("unmount %s: %w", m.Mountpoint, err))
		}
	}
	return errors.Join(errs...)
}
