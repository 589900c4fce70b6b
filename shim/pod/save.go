package pod

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Save makes a snapshot of the machine with all that runs in it, which goes on, and notes its purpose there. "" has it named
// after the pod.
//
// Nothing of the host is in a snapshot, so a pod whose containers see files of the host isn't saved. What execs have started
// is saved with the rest, with its terminals; but who has them on the host is nobody who can be found again: in a machine
// that is made from the snapshot they run on, what they write is lost and nothing comes for them to read.
//
// It comes before or after what else changes the pod. Whoever can't wait for it has it called off.
func (p *Pod) Save(ctx context.Context, name string, purpose saved.Purpose) (*snapshot.Info, error) {
	return p.save(ctx, name, purpose, snapshotOf{}, nil)
}

// SaveDisks is Save of a machine's disks alone, for other containers to begin with. What runs there has written what it had to
// write by then, or there is no snapshot. like is as in snapshot.Store.SaveDisks.
func (p *Pod) SaveDisks(ctx context.Context, name, like string) (*snapshot.Info, error) {
	return p.save(ctx, name, "", snapshotOf{disksOnly: true, like: like}, nil)
}

// snapshotOf says what is saved of a machine.
type snapshotOf struct {
	disksOnly bool
	like      string
}

// save is Save. With settle the machine ends with the moment that is saved, when settle, which is called once the snapshot
// is there, has succeeded.
func (p *Pod) save(ctx context.Context, name string, purpose saved.Purpose, of snapshotOf, settle func(*snapshot.Info) error) (info *snapshot.Info, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.ctx, func() { cancel(errShuttingDown) })()
	defer func() {
		if err = calledOff(ctx, err); err != nil {
			err = fmt.Errorf("save the pod: %w", err)
		}
	}()
	v, err := p.live()
	if err != nil {
		return nil, err
	}
	q := &quiesce{pod: p, purpose: purpose, last: settle != nil, resting: settle != nil || of.disksOnly, giveUp: cancel}
	if q.changed, err = p.unchanged(ctx, v.timeout); err != nil {
		return nil, err
	}
	defer func() { q.release() }()
	if q.vm, err = p.live(); err != nil { // it may have been put back meanwhile
		return nil, err
	}
	if name == "" {
		name = snapshotName(p.env.ID)
	}
	if _, err := p.capture(q.vm); err != nil { // before anything is brought to rest for it
		return nil, err
	}
	if err := p.env.Launcher(q.vm.made.cfg).Room(ctx); err != nil {
		return nil, err
	}
	if !q.last {
		if store := q.vm.made.store(); of.disksOnly {
			info, err = store.SaveDisks(ctx, name, of.like, q.vm.machine, q, q.note)
		} else {
			info, err = store.Save(ctx, name, q.vm.machine, q, q.note)
		}
		return info, q.vm.explain(err)
	}
	if info, err = q.vm.made.store().SaveLast(ctx, name, q.vm.machine, q, of.disksOnly, q.note, settle); err != nil {
		return nil, q.vm.explain(err)
	}
	defer q.over()
	return info, q.vm.discard()
}

// errNotAtRest is why a snapshot isn't one to make other containers of.
var errNotAtRest = errdefs.ErrUnavailable.WithMessage("the guest has not come to rest in time, so nothing else can be made of what is saved: try again when it has less to do")

// snapshotName makes a name for a snapshot of something with that id.
func snapshotName(id string) string {
	const most = 60 // of the 76 that a name may have
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return id[:min(len(id), most)] + "-" + hex.EncodeToString(b[:])
}

// live is the machine if it is of use.
func (p *Pod) live() (*vm, error) {
	p.mu.Lock()
	m := p.machine
	var v *vm
	if m != nil {
		v = m.vm
	}
	ended := m != nil && m.ended
	p.mu.Unlock()
	switch {
	case v == nil:
		return nil, errdefs.ErrFailedPrecondition.WithMessage("the pod has no virtual machine: start a container in it first")
	case ended, v.isDown():
		return nil, errEnded
	}
	return v, nil
}

// quiesce brings the guest to rest, and notes what is in it then.
type quiesce struct {
	pod     *Pod
	vm      *vm
	purpose saved.Purpose
	last    bool                    // the machine ends with the save
	resting bool                    // a guest that doesn't come to rest isn't saved
	giveUp  context.CancelCauseFunc // calls the save off
	changed func()                  // lets changes happen again; nil once they may, or somebody else sees to it
	over    func()                  // ends the stillness
	is      *saved.Pod
	err     error
}

// release lets changes happen again.
func (q *quiesce) release() {
	if q.changed != nil {
		q.changed()
		q.changed = nil
	}
}

// Freeze implements vmm.Quiesce.
func (q *quiesce) Freeze(ctx context.Context) error {
	q.over = q.pod.standStill(q.vm, q.giveUp)
	err := q.vm.guest.Freeze(ctx)
	q.is, q.err = q.pod.capture(q.vm) // also of a guest that is saved as it is
	if q.err == nil && err != nil && q.resting {
		q.err = errNotAtRest
	}
	if err == nil {
		err = q.err
	}
	return err
}

// Thaw implements vmm.Quiesce. When it fails it is tried again, and until then nothing changes.
func (q *quiesce) Thaw(ctx context.Context) error {
	defer q.over()
	err := q.vm.guest.Thaw(ctx)
	if err == nil || errors.Is(err, guest.ErrGone) {
		q.release()
		return err
	}
	changed := q.changed
	q.changed = nil
	go func() {
		defer changed()
		q.vm.letGoOn()
	}()
	return err
}

// note is a snapshot.Note.
func (q *quiesce) note() (json.RawMessage, error) {
	if q.err != nil {
		return nil, q.err
	}
	q.is.Purpose, q.is.Last = q.purpose, q.last
	return q.is.Encode()
}

// capture says what is in the machine. While the guest is at rest nothing of that changes there. What the guest has told of,
// but nobody here has heard yet, has a higher number and is told again.
func (p *Pod) capture(v *vm) (*saved.Pod, error) {
	s := &saved.Pod{ID: p.env.ID, Namespace: p.env.Namespace, Event: v.lastEvent.Load(), Containers: []saved.Container{}}
	if v.asleep.Load() {
		return nil, errdefs.ErrFailedPrecondition.WithMessage("it has not been started since it was made from a snapshot: use that one")
	}
	p.mu.Lock()
	var all []*container
	busy := ""
	for _, id := range slices.Sorted(maps.Keys(p.slots)) {
		if c := p.slots[id]; !c.created {
			busy = id
		} else if c.c.vm() == v {
			all = append(all, c.c)
		}
	}
	p.mu.Unlock()
	if busy != "" {
		return nil, errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("container %s is being created: try again when it is", busy))
	}
	for _, c := range all {
		sc, err := c.capture()
		if err != nil {
			return nil, err
		}
		if sc != nil {
			s.Containers = append(s.Containers, *sc)
		} else {
			s.Ended = append(s.Ended, saved.Ended{Guest: c.guestID, Disks: c.disks})
		}
	}
	return s, nil
}

// capture says what the container is; nil for one that has ended.
func (c *container) capture() (*saved.Container, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state := c.init.state; {
	case state > Paused:
		return nil, nil
	case c.doomed:
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s is being killed", c.id))
	case c.shares != nil:
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s has %s of the host mounted, which no snapshot can keep", c.id, c.shares.source))
	default:
		if err := state.check(opSave, c.init.name()); err != nil {
			return nil, err
		}
	}
	s := &saved.Container{ID: c.id, Guest: c.guestID, Spec: c.specSum, Disks: c.disks, Paused: c.init.state == Paused}
	s.Processes = append(s.Processes, c.init.capture())
	for _, id := range slices.Sorted(maps.Keys(c.execs)) {
		if e := c.execs[id]; e.state == Running {
			s.Processes = append(s.Processes, e.capture())
		}
	}
	return s, nil
}

// capture says what the process is. c.mu is held.
func (p *process) capture() saved.Process {
	return saved.Process{
		Number:   p.number,
		ExecID:   p.execID,
		Terminal: p.stdio.Terminal,
		Stdin:    p.stdio.Stdin != "",
		Stdout:   p.stdio.Stdout != "",
		Stderr:   p.stdio.Stderr != "" && !p.stdio.Terminal,
	}
}
