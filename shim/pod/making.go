package pod

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/meminfo"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm"
)

// identifyLimit bounds the greeting of the agent in a machine that has already answered once.
const identifyLimit = 10 * time.Second

// making is the making of a machine: what there is of it so far. Its steps are claim, launch and identify.
type making struct {
	*Pod
	cfg      *config.Config
	log      *slog.Logger
	hostname string
	request  vmm.Request // what the machine is to be
	network  spec.Network
	from     *origin // nil for a machine in which nothing has run yet
	snapshot string  // that it is made from, or has its disk of; "" for none
	cold     string  // why only the disk; "" if all of it

	undo     undo.Stack
	state    record.PodState
	attached *Attachment // nil for none
	machine  vmm.Machine
	guest    *guest.Guest
	vm       *vm // after greet

	loan sync.Mutex // guards the rest
	// lent: its place in the network, and the record, are another machine's as well, whose place it takes or who takes its
	// own. owed: its end has come meanwhile.
	lent, owed bool
}

// newMaking prepares to make a machine. configFile is where cfg is from, "" for the default; netns is as in vmm.Request.
func (p *Pod) newMaking(cfg *config.Config, configFile string, m spec.Machine, netns string) *making {
	dir := filepath.Join(cfg.VMDir(), fmt.Sprintf("%s-%s", p.env.ID, shortName(p.env.Dir)))
	return &making{
		Pod:      p,
		cfg:      cfg,
		log:      p.env.Log.With("pod", p.env.ID),
		hostname: p.env.ID,
		request:  vmm.Request{ID: p.env.ID, Dir: dir, Shape: m.Shape, CPULimit: m.CPULimit, NetNS: netns},
		network:  m.Network,
		state:    record.PodState{ID: p.env.ID, Namespace: p.env.Namespace, MachineDir: dir, ConfigFile: configFile},
	}
}

// shortName tells pods of one id apart: two containerds on one host, or two of their namespaces, may both have one.
func shortName(dir record.Pod) string {
	const enough = 8
	name := filepath.Base(string(dir))
	return name[:min(len(name), enough)]
}

// claim makes the machine's directory, after having written down that it will be there.
func (k *making) claim(ctx context.Context) error {
	if err := k.cleanUp(); err != nil {
		return err
	}
	if err := k.env.Dir.SaveState(k.state); err != nil {
		return err
	}
	k.undo.Push(func() error { return k.env.Cleanup(k.cfg, k.request.Dir) })
	if err := os.MkdirAll(k.request.Dir, 0o700); err != nil {
		return fmt.Errorf("make the machine's directory: %w", err)
	}
	if k.state.DiskDir == "" {
		return nil
	}
	k.undo.Push(k.state.RemoveDisks)
	return record.MakeDisks(ctx, k.state.DiskDir)
}

// cleanUp undoes what an earlier shim of this pod has left. The pod's lock is ours, so nobody alive owns it.
func (k *making) cleanUp() error {
	old, err := k.env.Dir.State()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	dirs := map[string]string{k.request.Dir: k.state.ConfigFile}
	for _, dir := range old.MachineDirs() {
		dirs[dir] = old.ConfigFile
	}
	for dir, file := range dirs {
		_, err := os.Lstat(dir)
		if known := slices.Contains(old.MachineDirs(), dir) && !old.Undone; errors.Is(err, fs.ErrNotExist) && !known {
			continue
		}
		k.log.Warn("clean up what an earlier shim of this pod has left", "dir", dir)
		cfg, err := config.Load(file)
		if err == nil {
			err = k.env.Cleanup(cfg, dir)
		}
		if err == nil {
			err = k.detach(cfg)
		}
		if err == nil {
			err = old.RemoveDisks()
		}
		if err != nil {
			return fmt.Errorf("clean up what an earlier shim has left in %s: %w", dir, err)
		}
	}
	return nil
}

// launch makes the machine. root may be nil.
func (k *making) launch(ctx context.Context, root *os.File) error {
	if err := k.attach(ctx); err != nil {
		return err
	}
	return k.boot(ctx, root)
}

// boot is launch for a machine that has its place in the network, if it is to have one.
func (k *making) boot(ctx context.Context, root *os.File) error {
	began := time.Now()
	r := k.request
	r.Root = root
	if k.attached != nil {
		defer k.attached.Tap.Close() // the machine has its own
		r.Tap = k.attached.Tap
	}
	// Whatever was promised to whom: others may have taken it meanwhile.
	if err := meminfo.Check(k.cfg, int64(r.Shape.MemoryMiB)<<20); err != nil {
		return err
	}
	m, err := k.env.Launcher(k.cfg).Launch(ctx, r)
	if err != nil {
		return err
	}
	k.machine = m
	k.undo.Push(k.stopMachine)
	k.log.Debug("machine launched", "took", time.Since(began), "pid", m.PID(), "shape", m.Shape())
	k.state.PID = m.PID()
	return k.env.Dir.SaveState(k.state)
}

// identify greets the agent and gives the guest its identity, before which nothing of a workload runs in it, and follows
// what it tells.
func (k *making) identify(ctx context.Context) (*vm, error) {
	if err := k.greet(ctx); err != nil {
		return nil, err
	}
	k.heed()
	return k.vm, nil
}

// heed follows the guest's events, and the network for it.
func (k *making) heed() {
	go k.dispatch(k.vm)
	if k.attached != nil {
		go k.follow(k.vm)
	}
}

// greet is the first talk with the agent.
func (k *making) greet(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, k.cfg.Timeout(identifyLimit))
	defer cancel()
	began := time.Now()
	if k.guest, err = guest.Connect(ctx, k.machine.Agent(), k.cfg.Timeout); err != nil {
		return k.deathOf(err)
	}
	k.log.Debug("the agent answers", "took", time.Since(began))
	var network *api.Network
	if k.attached != nil {
		network = k.attached.Guest
	}
	if err = k.tell(ctx, network); err != nil {
		return k.deathOf(err)
	}
	if err = k.open(ctx); err != nil {
		return err
	}
	k.vm = newVM(k.machine, k.guest, k.log, k.cfg.Timeout, k.undone)
	k.vm.made = k
	if k.from != nil {
		k.vm.asleep.Store(true)
		k.vm.lastEvent.Store(k.from.pod.Event)
	}
	return nil
}

// tell gives the guest its identity, for the first time or again.
func (k *making) tell(ctx context.Context, network *api.Network) error {
	_, err := k.guest.Identify(ctx, hostname(k.hostname), k.env.ID, network)
	return err
}

// deathOf prefers the machine's own reason to that of a call that failed because of it. The channel ends a little before
// the machine.
func (k *making) deathOf(err error) error {
	if k.guest != nil {
		if errors.Is(err, guest.ErrGone) {
			<-k.guest.Done() // the call has met the channel's end, which is under way
		}
		select {
		case <-k.guest.Done():
		default:
			return err
		}
		if k.guest.Broken() {
			return k.guest.Err()
		}
	}
	timer := time.NewTimer(k.cfg.Timeout(panicGrace))
	defer timer.Stop()
	select {
	case <-k.machine.Done():
		if death := k.machine.Err(); death != nil {
			return death
		}
	case <-timer.C:
	}
	return err
}

// hostname is a name as far as it is a host name.
func hostname(name string) string {
	const longest = 63 // of a label, RFC 1123
	return strings.Trim(name[:min(len(name), longest)], "._-")
}

// stopMachine undoes launch. Nothing in the guest is worth waiting for.
func (k *making) stopMachine() error {
	if k.vm != nil {
		return k.vm.discard()
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err := k.machine.Stop(ctx)
	if k.guest != nil {
		k.guest.Close() // always nil
	}
	return err
}

// release undoes all steps so far. The record goes on saying what is left if there is anything.
func (k *making) release() error {
	if err := k.undo.Release(); err != nil {
		return err
	}
	return k.undone()
}

// lend keeps undone from giving anything back; false when that has begun.
func (k *making) lend() bool {
	k.loan.Lock()
	defer k.loan.Unlock()
	k.lent = !k.owed
	return k.lent
}

// reclaim is the end of lend: what undone hasn't given back is given back.
func (k *making) reclaim() error {
	k.loan.Lock()
	k.lent = false
	owed := k.owed
	k.loan.Unlock()
	if owed {
		return k.undone()
	}
	return nil
}

// undone gives back the place in the network of a machine that is no more, and notes that nothing is left.
func (k *making) undone() error {
	k.loan.Lock()
	k.owed = true
	lent := k.lent
	k.loan.Unlock()
	if lent || k.state.Undone {
		return nil
	}
	if k.state.Other != nil { // of a rollback that couldn't
		if err := k.env.Cleanup(k.cfg, k.state.Other.MachineDir); err != nil {
			return err
		}
	}
	if err := errors.Join(k.detach(k.cfg), k.state.RemoveDisks()); err != nil {
		return err
	}
	k.state.Undone = true
	return k.env.Dir.SaveState(k.state)
}
