package pod

import (
	"context"
	eventsapi "github.com/containerd/containerd/api/events"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Delete forgets a process that has stopped or never ran. With the container's init the machine goes.
// Of deletions of a container at the same time all tell the same.
func (p *Pod) Delete(ctx context.Context, id, execID string) (pid int, exit Exit, err error) {
	t, err := p.process(id, execID)
	if err != nil {
		if d, ok := p.deletion(id); ok && execID == "" {
			return d.pid, d.exit, nil
		}
		return 0, Exit{}, err
	}
	if err := t.acquire(ctx); err != nil {
		return 0, Exit{}, err
	}
	defer t.release()
	c := t.c
	c.mu.Lock()
	state, exit := t.state, t.exit
	c.mu.Unlock()
	if state == Deleted && execID == "" { // by another deletion, just now
		return c.vm().PID(), exit, nil
	}
	if err := state.check(opDelete, t.name()); err != nil {
		return 0, Exit{}, err
	}
	if execID == "" {
		if err := p.goesOn(ctx, c.timeout(killLimit), t.name()+" is to be deleted"); err != nil {
			return 0, Exit{}, err
		}
		done, err := p.change(ctx)
		if err != nil {
			return 0, Exit{}, err
		}
		defer done()
	}
	if state == Created {
		if execID == "" {
			c.exited(t, statusKilled)
		} else {
			c.notStarted(t, 0) // as runc's shim tells it
		}
	}
	select {
	case <-t.done:
	case <-ctx.Done():
		return 0, Exit{}, ctx.Err()
	}
	if execID == "" {
		if err := c.remove(); err != nil {
			// What has stopped can always be deleted; `shim delete` follows and undoes the rest by the record.
			c.log.Error("clean up after the container", "error", err)
		}
	}
	t.closeIO()
	c.mu.Lock()
	t.state = Deleted
	exit = t.exit
	delete(c.execs, execID)
	c.mu.Unlock()
	if execID == "" {
		c.events.Send(&eventsapi.TaskDelete{
			ContainerID: id,
			Pid:         uint32(c.vm().PID()),
			ExitStatus:  exit.Status,
			ExitedAt:    timestamppb.New(exit.At),
		})
		p.deleted(id, deletion{c.vm().PID(), exit})
	}
	return c.vm().PID(), exit, nil
}
