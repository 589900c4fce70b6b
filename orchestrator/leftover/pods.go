package leftover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/pkg/shim"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/process"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/orchestrator/stack"
	shimrecord "github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/vmm/record"
)

const (
	// lockLimit bounds the wait for whoever starts or ends a pod's shim.
	lockLimit = 5 * time.Second
	// stopLimit is how long a shim may take to end its pod in order.
	stopLimit = 10 * time.Second
)

// podInfo is a pod's directory as it was found under its lock.
type podInfo struct {
	shimrecord.Pod
	state   shimrecord.PodState // the zero value where none was saved
	members []string            // see shimrecord.Pod.Members
	shim    process.ID          // the zero value without a living shim
	since   time.Time
}

// inspect reads a pod's directory. ok is false for one that is gone.
func inspect(ctx context.Context, s *search, p shimrecord.Pod) (i podInfo, ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout(lockLimit))
	defer cancel()
	unlock, err := p.Lock(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return i, false, nil
	}
	if err != nil {
		return i, false, err
	}
	defer unlock()
	i.Pod = p
	info, err := os.Stat(string(p))
	if err != nil {
		return i, false, err
	}
	i.since = info.ModTime()
	if i.shim, err = p.Shim(); err != nil {
		return i, false, err
	}
	if i.members, err = p.Members(); err != nil {
		return i, false, err
	}
	if i.state, err = p.State(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return i, false, err
	}
	return i, true, nil
}

func inspectAll(ctx context.Context, s *search) ([]podInfo, error) {
	all, err := shimrecord.Pods(s.cfg.PodDir())
	errs := []error{err}
	var infos []podInfo
	for _, p := range all {
		i, ok, err := inspect(ctx, s, p)
		if ok {
			infos = append(infos, i)
		}
		errs = append(errs, err)
	}
	return infos, errors.Join(errs...)
}

// known says whether containerd has anything of the pod.
func (i podInfo) known(inv *sandbox.Inventory) bool {
	ns := i.state.Namespace
	for _, id := range append([]string{i.state.ID}, i.members...) {
		if inv.Knows(sandbox.Ref{Namespace: ns, ID: id}) {
			return true
		}
	}
	for r, t := range inv.Tasks { // one whose bundle was removed by hand
		if r.Namespace == ns && t.Alive && i.state.PID != 0 && t.PID == uint32(i.state.PID) {
			return true
		}
	}
	return false
}

// shims finds living shims of this stack's containerd that it has lost sight of.
func shims(ctx context.Context, s *search) ([]Leftover, error) {
	run, err := stack.Shims(s.cfg)
	if err != nil {
		return nil, err
	}
	all, err := inspectAll(ctx, s)
	var found []Leftover
	for _, i := range all {
		ours := slices.ContainsFunc(run, func(f process.Found) bool { return f.ID == i.shim })
		if !ours || i.state.ID == "" || !s.old(i.shim.Started()) || i.known(s.inv) {
			continue
		}
		found = append(found, Leftover{
			Name:   fmt.Sprintf("%d", i.shim.PID),
			Detail: fmt.Sprintf("of %s/%s, of which containerd knows nothing", i.state.Namespace, i.state.ID),
			Since:  i.shim.Started(),
			Remedy: "stops it with its machine",
			remove: func(ctx context.Context) error { return i.stop(ctx, s) },
		})
	}
	return found, err
}

// stop ends the pod with its living shim: in order, or by force when that takes too long.
func (i podInfo) stop(ctx context.Context, s *search) error {
	lctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout(lockLimit))
	defer cancel()
	unlock, err := i.Lock(lctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	now, err := i.Shim()
	if err != nil {
		return err
	}
	// Under the lock nobody joins: what has joined since was not judged.
	if members, err := i.Members(); err != nil || now != i.shim || !slices.Equal(members, i.members) {
		return err
	}
	if err := unix.Kill(now.PID, unix.SIGTERM); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("stop shim %d: %w", now.PID, err)
	}
	sctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout(2*stopLimit))
	defer cancel()
	dead, err := i.KillShim(sctx, s.cfg.Timeout(stopLimit))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it has removed its directory itself
	}
	if err != nil {
		return err
	}
	defer dead()
	return i.free(ctx)
}

// pods finds the directories of pods whose shims are gone and that no container refers to. Those with containers are
// undone with these.
func pods(ctx context.Context, s *search) ([]Leftover, error) {
	all, err := inspectAll(ctx, s)
	var found []Leftover
	for _, i := range all {
		if i.shim.PID != 0 || len(i.members) > 0 || !s.old(i.since) {
			continue
		}
		found = append(found, Leftover{
			Name:   string(i.Pod),
			Detail: "its shim is gone, and so are its containers",
			Since:  i.since,
			Remedy: "ends its machine and removes it",
			remove: func(ctx context.Context) error { return i.remove(ctx, s) },
		})
	}
	return found, err
}

// remove removes a pod that is dead, and still is under the lock.
func (i podInfo) remove(ctx context.Context, s *search) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout(lockLimit))
	defer cancel()
	unlock, err := i.Lock(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	shim, err := i.Shim()
	if err != nil {
		return err
	}
	if members, err := i.Members(); err != nil || shim.PID != 0 || len(members) > 0 {
		return err
	}
	return i.free(ctx)
}

// free frees what a dead pod has. The caller has its lock.
func (i podInfo) free(ctx context.Context) error {
	if address, err := i.Address(); err == nil {
		if err := shim.RemoveSocket(address); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the shim's socket: %w", err)
		}
	}
	state, err := i.State() // the shim's last
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if state.MachineDir != "" && !state.Undone {
		cfg, err := config.Load(state.ConfigFile)
		if err != nil {
			return err
		}
		if err := record.Cleanup(cfg, state.MachineDir); err != nil {
			return err
		}
		if err := network.New(cfg).Release(ctx, network.Pod{Namespace: state.Namespace, ID: state.ID}); err != nil {
			return fmt.Errorf("detach the pod from the network: %w", err)
		}
		state.Undone = true
		if err := i.SaveState(state); err != nil {
			return err
		}
	}
	return i.Discard()
}
