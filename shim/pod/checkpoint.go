package pod

import (
	"context"
	"errors"
	"fmt"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// Checkpoint makes a snapshot of a container that is alone in its machine, and a checkpoint in the directory that names it:
// Create makes other containers of it. With exit the container ends at that moment, as if killed.
func (p *Pod) Checkpoint(ctx context.Context, id, dir string, exit bool) error {
	c, err := p.savable(id)
	if err != nil {
		return err
	}
	if exit {
		return p.saveLast(ctx, c, "", dir, false, func(cp saved.Checkpoint) error { return cp.Write(dir) })
	}
	info, err := p.Save(ctx, snapshotName(id), "")
	if err != nil {
		return err
	}
	if info.Frozen {
		err = checkpointOf(c, info).Write(dir)
	} else {
		err = errNotAtRest
	}
	if err != nil {
		if _, also := c.vm().made.store().Delete(info.ID); also != nil {
			c.log.Error("delete the snapshot of a failed checkpoint", "snapshot", info.ID, "error", also)
		}
		return err
	}
	c.events.Send(&eventsapi.TaskCheckpointed{ContainerID: id, Checkpoint: dir})
	return nil
}

// PauseToDisk saves a container that is alone in its machine and ends it, so that its task can be deleted, and it can go on
// from there. Nothing of it runs after the moment that is saved. Its exit, with the status of a SIGKILL, is no death: that
// is told by the checkpoint in saved.Paused, which is there before. After an error, or a kill of the shim before the
// checkpoint is there, it isn't paused; after an error it runs on. With cold only its disk is saved, with which it begins anew.
func (p *Pod) PauseToDisk(ctx context.Context, id string, cold bool) error {
	c, err := p.savable(id)
	if err != nil {
		return err
	}
	paused := saved.PausedOf(c.vm().made.cfg, p.env.Namespace, id)
	unlock, err := paused.Lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	return p.saveLast(ctx, c, saved.ForPause, string(paused), cold, func(cp saved.Checkpoint) error {
		err := paused.Write(cp)
		if err != nil { // it may be there, though not for good, and the container goes on
			err = errors.Join(err, paused.End(cp.Snapshot))
		}
		return err
	})
}

// savable finds a container that can be saved by itself.
func (p *Pod) savable(id string) (*container, error) {
	c, err := p.get(id)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	state := c.init.state
	c.mu.Unlock()
	if err := state.check(opSave, c.init.name()); err != nil {
		return nil, err
	}
	if !c.alone || !c.claim.alone() {
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s has its virtual machine together with others of its pod: only the pod as a whole can be saved", id))
	}
	return c, nil
}

func checkpointOf(c *container, info *snapshot.Info) saved.Checkpoint {
	return saved.Checkpoint{Snapshot: info.ID, Container: c.id, Time: info.Created, Cold: info.DisksOnly()}
}

// saveLast saves the container's machine, has the checkpoint written for the directory, and ends the machine, which stands
// still from the moment that is saved. It returns when the container's exit has been told.
func (p *Pod) saveLast(ctx context.Context, c *container, purpose saved.Purpose, dir string, disksOnly bool, write func(saved.Checkpoint) error) error {
	written := false
	_, err := p.save(ctx, snapshotName(c.id), purpose, snapshotOf{disksOnly: disksOnly}, func(info *snapshot.Info) error {
		if disksOnly && !writable(info, vmm.RootSerial) {
			return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("container %s has no writable root that it could begin anew with: keep its memory", c.id))
		}
		if err := write(checkpointOf(c, info)); err != nil {
			return err
		}
		written = true
		c.events.Send(&eventsapi.TaskCheckpointed{ContainerID: c.id, Checkpoint: dir})
		return nil
	})
	if err == nil {
		select {
		case <-c.init.done:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	if err != nil && written {
		return fmt.Errorf("container %s is saved, but its end is still to come: %w", c.id, err)
	}
	return err
}
