package pod

import (
	"context"
	"fmt"

	eventsapi "github.com/containerd/containerd/api/events"

	"github.com/cubesandbox/cube/guest-agent/api"
)

// Pause makes all processes of a container stand still.
func (p *Pod) Pause(ctx context.Context, id string) error {
	c, err := p.get(id)
	if err != nil {
		return err
	}
	if err := c.init.acquire(ctx); err != nil {
		return err
	}
	defer c.init.release()
	done, err := p.change(ctx)
	if err != nil {
		return err
	}
	defer done()
	if err := c.advance(opPause, Pausing); err != nil {
		return err
	}
	v := c.vm()
	_, err = v.guest.PauseContainer(ctx, &api.ContainerRequest{Id: c.guestID})
	if err == nil {
		return c.paused()
	}
	// Without an answer it may stand still all the same.
	v.guest.ResumeContainer(context.WithoutCancel(ctx), &api.ContainerRequest{Id: c.guestID}) // the error is that of the pause
	c.mu.Lock()
	if c.init.state == Pausing {
		c.init.state = Running
	}
	c.mu.Unlock()
	return fmt.Errorf("pause %s: %w", c.init.name(), v.explain(err))
}

// advance takes init into a state if the op is possible.
func (c *container) advance(o op, to State) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.init.state.check(o, c.init.name()); err != nil {
		return err
	}
	c.init.state = to
	return nil
}

// paused publishes a pause, unless the container has ended meanwhile.
func (c *container) paused() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.init.state != Pausing {
		return c.init.state.check(opPause, c.init.name())
	}
	c.init.state = Paused
	c.events.Send(&eventsapi.TaskPaused{ContainerID: c.id})
	return nil
}

// Resume lets them go on.
func (p *Pod) Resume(ctx context.Context, id string) error {
	c, err := p.get(id)
	if err != nil {
		return err
	}
	if err := c.init.acquire(ctx); err != nil {
		return err
	}
	defer c.init.release()
	done, err := p.change(ctx)
	if err != nil {
		return err
	}
	defer done()
	if err := c.advance(opResume, Paused); err != nil {
		return err
	}
	v := c.vm()
	if _, err := v.guest.ResumeContainer(ctx, &api.ContainerRequest{Id: c.guestID}); err != nil {
		return fmt.Errorf("resume %s: %w", c.init.name(), v.explain(err))
	}
	if err := c.advance(opResume, Running); err != nil {
		return err // it has ended meanwhile
	}
	c.events.Send(&eventsapi.TaskResumed{ContainerID: c.id})
	return nil
}
