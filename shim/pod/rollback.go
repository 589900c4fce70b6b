package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/saved"
)

// holdLimit is how long QEMU may take to have the guest stand still, or go on.
const holdLimit = 10 * time.Second

var errRollingBack = errdefs.ErrUnavailable.WithMessage("the pod is being put back to a snapshot: try again when it is")

// rollback is one under way: another machine, made from a snapshot, takes the place of the pod's.
type rollback struct {
	*Pod
	m     *machine
	old   *vm
	from  *origin
	next  *making
	pairs []pair
	lines *lines // nil: it has no network
	undo  undo.Stack
	over  func() // the stillness's; nil before and after it
}

// pair is a container, and what it was when it was saved.
type pair struct {
	c     *container
	saved *saved.Container
	wires []*wire
}

// Rollback puts the pod's machine back to a snapshot of it, and returns the pid of the one that has it then. The containers
// must be those that were saved; their tasks stay what they are, and so do the execs that were saved, while others end as if
// killed. The old machine stands still until the other goes on, and goes on itself after an error.
func (p *Pod) Rollback(ctx context.Context, name string) (pid int, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.ctx, func() { cancel(errShuttingDown) })()
	defer func() {
		if err = calledOff(ctx, err); err != nil {
			err = fmt.Errorf("put the pod back to snapshot %s: %w", name, err)
		}
	}()
	r := &rollback{Pod: p}
	if err := r.begin(); err != nil {
		return 0, err
	}
	defer r.end()
	if r.from, err = openOrigin(r.old.made.store(), name); err != nil {
		return 0, err
	}
	unlock, err := r.match(ctx)
	if err != nil {
		return 0, err
	}
	defer unlock()
	done, err := p.unchanged(ctx, r.old.timeout) // only then: who has a process's token may wait for this
	if err != nil {
		return 0, err
	}
	defer done()
	defer r.goOn()
	defer func() { r.lines.close() }()
	defer r.undo.Run(&err)
	r.over = p.standStill(r.old, cancel)
	for _, step := range []func(context.Context) error{r.hold, r.quieten, r.launch, r.connect, r.wake} {
		if err := step(ctx); err != nil {
			return 0, err
		}
	}
	if err := r.swap(); err != nil {
		return 0, err
	}
	r.settle(context.WithoutCancel(ctx))
	return r.next.vm.PID(), nil
}

// begin keeps containers from being created meanwhile.
func (r *rollback) begin() (err error) {
	if r.old, err = r.live(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.busy():
		return errdefs.ErrUnavailable.WithMessage("a container is being created, or the pod put back: try again when it is")
	case r.old.asleep.Load():
		return errdefs.ErrFailedPrecondition.WithMessage("the pod has not been started since it was made from a snapshot")
	}
	if !r.old.made.lend() {
		return errEnded
	}
	r.m, r.rolling = r.machine, true
	return nil
}

func (r *rollback) end() {
	if r.m.vm == r.old { // only this changes it
		r.reclaim(r.old.made)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rolling = false
	r.settled.Broadcast()
}

// reclaim ends the loan of what the two machines have had together.
func (r *rollback) reclaim(k *making) {
	if err := k.reclaim(); err != nil {
		r.env.Log.Error("give back what the machine has had", "error", err)
	}
}

// goOn ends the stillness.
func (r *rollback) goOn() {
	if r.over != nil {
		r.over()
		r.over = nil
	}
}

// match finds the containers that were saved, and keeps them from being started, paused or deleted.
func (r *rollback) match(ctx context.Context) (unlock func(), err error) {
	if r.from.pod.ID != r.env.ID || r.from.pod.Namespace != r.env.Namespace {
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("it is of pod %s in namespace %s", r.from.pod.ID, r.from.pod.Namespace))
	}
	var taken []*process
	unlock = func() {
		for _, t := range taken {
			t.release()
		}
	}
	for _, id := range r.ids() {
		c, err := r.get(id)
		if err == nil {
			if err = r.take(ctx, c.init); err == nil {
				taken = append(taken, c.init)
				err = r.pair(c)
			}
		}
		if err != nil {
			unlock()
			return nil, err
		}
	}
	for i := range r.from.pod.Containers {
		id := r.from.pod.Containers[i].ID
		if !slices.ContainsFunc(r.pairs, func(p pair) bool { return p.c.id == id && p.saved != nil }) {
			unlock()
			return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s, which was saved, is not running any more", id))
		}
	}
	return unlock, nil
}

// take takes a process's token from whoever has it.
func (r *rollback) take(ctx context.Context, t *process) error {
	limited, cancel := context.WithTimeout(ctx, r.old.timeout(changeLimit))
	defer cancel()
	err := t.acquire(limited)
	if err != nil && ctx.Err() == nil {
		return errdefs.ErrUnavailable.WithMessage(t.name() + " is being started, paused or deleted, and that takes long: try again later")
	}
	return err
}

// pair adds a container, unless its task has ended before: then nothing can come back to it.
func (r *rollback) pair(c *container) error {
	was := r.from.pod.Container(c.id)
	live, doomed := c.lives()
	switch {
	case live && doomed:
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s is being killed", c.id))
	case live && (was == nil || was.Guest != c.guestID || was.Spec != c.specSum):
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s was not there when it was saved: delete it first", c.id))
	case live && len(was.Processes) == 0:
		return errdefs.ErrDataLoss.WithMessage(fmt.Sprintf("container %s was saved without a process", c.id))
	case live:
		r.pairs = append(r.pairs, pair{c: c, saved: was})
	default:
		r.pairs = append(r.pairs, pair{c: c})
	}
	return nil
}

// lives tells whether init's exit is still to come, and whether it has been asked for.
func (c *container) lives() (lives, doomed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.init.state < Stopped, c.doomed
}

// hold has the old machine stand still.
func (r *rollback) hold(ctx context.Context) error {
	r.undo.Push(func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.old.timeout(holdLimit))
		defer cancel()
		return r.old.explain(r.old.machine.Resume(ctx))
	})
	ctx, cancel := context.WithTimeout(ctx, r.old.timeout(holdLimit))
	defer cancel()
	return r.old.explain(r.old.machine.Pause(ctx))
}

// launch makes the other machine, with the old one's tap.
func (r *rollback) launch(ctx context.Context) error {
	old := r.old.made
	k := &making{Pod: r.Pod, cfg: old.cfg, log: old.log, hostname: old.hostname, request: old.request, network: old.network, state: old.state, lent: true}
	k.request.Dir = otherDir(old.request.Dir)
	k.goOn(r.from)
	k.state.MachineDir = k.request.Dir
	k.state.Other = &record.Other{MachineDir: old.state.MachineDir, DiskDir: old.state.DiskDir}
	r.next = k
	if err := k.env.Dir.SaveState(k.state); err != nil {
		return err
	}
	r.undo.Push(func() error { return old.env.Dir.SaveState(old.state) })
	r.undo.Push(func() error { return errors.Join(k.undo.Release(), os.RemoveAll(k.request.DiskDir)) })
	if err := k.env.Cleanup(k.cfg, k.request.Dir); err != nil { // of a rollback that failed to undo all
		return err
	}
	if err := os.MkdirAll(k.request.Dir, 0o700); err != nil {
		return fmt.Errorf("make the machine's directory: %w", err)
	}
	if err := record.MakeDisks(ctx, k.request.DiskDir); err != nil {
		return err
	}
	k.undo.Push(func() error { return k.env.Cleanup(k.cfg, k.request.Dir) })
	tap, err := r.old.machine.Tap()
	if err != nil {
		return err
	}
	if tap != nil {
		attached := *old.attached
		attached.Tap, attached.Open = tap, func(context.Context) error { return nil } // renew does
		k.attached = &attached
	}
	return k.boot(ctx, nil)
}

// otherDir is the directory for the machine that takes the place of that one.
func otherDir(dir string) string {
	const suffix = "-r"
	if base, ok := strings.CutSuffix(dir, suffix); ok {
		return base
	}
	return filepath.Clean(dir) + suffix
}

// connect gives the guest its identity, and its processes their stdio.
func (r *rollback) connect(ctx context.Context) error {
	if err := r.next.greet(ctx); err != nil {
		return err
	}
	for i := range r.pairs {
		if err := r.wire(ctx, &r.pairs[i]); err != nil {
			return r.next.vm.explain(err)
		}
	}
	return nil
}

// wake lets the work in the other machine go on. From here on it is the one that does.
func (r *rollback) wake(ctx context.Context) error {
	if err := r.renew(ctx); err != nil {
		return err
	}
	if err := r.next.vm.wake(ctx); err != nil {
		return r.next.vm.explain(err)
	}
	for _, p := range r.pairs {
		if p.saved == nil {
			continue
		}
		p.c.mu.Lock()
		paused := p.c.init.state == Paused
		p.c.mu.Unlock()
		var err error
		if request := (&api.ContainerRequest{Id: p.c.guestID}); paused && !p.saved.Paused {
			_, err = r.next.guest.PauseContainer(ctx, request)
		} else if !paused && p.saved.Paused {
			_, err = r.next.guest.ResumeContainer(ctx, request)
		}
		if err == nil {
			err = p.c.limitAgain(ctx, r.next.vm)
		}
		if err != nil {
			return r.next.vm.explain(err)
		}
	}
	return r.sweep()
}

// swap makes the other machine the pod's, unless one of them, or a container, has come to its end by now.
func (r *rollback) swap() error {
	for _, p := range r.pairs {
		p.c.mu.Lock()
		over := p.c.init.state >= Stopped || p.c.struck // what has killed it, isn't undone
		p.c.mu.Unlock()
		if p.saved != nil && over {
			return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s has ended meanwhile", p.c.id))
		}
	}
	if r.next.vm.isDown() {
		return r.next.vm.why()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.m.ended || r.old.isDown() || r.old.ended.Load() {
		return errEnded
	}
	r.m.vm = r.next.vm
	for _, p := range r.pairs {
		p.c.on.Store(r.next.vm)
	}
	return nil
}

// settle ends what was of the old machine. Nothing of it can fail the rollback any more.
func (r *rollback) settle(ctx context.Context) {
	v := r.next.vm
	r.followLife(r.m, v)
	for _, p := range r.pairs {
		p.c.rolledBack(p.wires)
	}
	r.next.heed()
	r.goOn()
	for _, p := range r.pairs {
		if p.saved == nil {
			continue
		}
		p.c.endOthers(p.wires)
		p.c.state.PID = v.PID()
		if err := p.c.records.SaveState(p.c.state); err != nil {
			p.c.log.Warn("record the machine's pid", "error", err)
		}
	}
	err := r.old.discard()
	if err == nil {
		err = os.RemoveAll(r.next.state.Other.DiskDir) // "" is nothing
	}
	if err == nil {
		r.next.state.Other = nil
		err = r.env.Dir.SaveState(r.next.state)
	}
	if err != nil { // the record says what is left
		r.env.Log.Error("remove the machine that was rolled back", "error", err)
	}
	r.reclaim(r.next)
}
