package container

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
)

// freezeTimeout bounds the wait for processes to stand still. One that waits for a disk can't be stopped meanwhile.
const freezeTimeout = 10 * time.Second

// Pause freezes all processes of a running container, and returns when they stand still. Of signals only SIGKILL gets
// through. When it fails, the container runs. Idempotent.
func (c *Container) Pause(ctx context.Context) error {
	if c.is(paused) {
		return nil
	}
	if err := c.enter(pausing, running); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	err := c.freeze(ctx)
	if err != nil {
		err = fmt.Errorf("pause container %s: %w", c.id, err)
		c.thaw(ctx)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.state != pausing: // it has ended, or is being deleted
		return fmt.Errorf("container %s is %s: %w", c.id, c.state, errdefs.ErrFailedPrecondition)
	case err != nil:
		c.state = running
	default:
		c.state = paused
	}
	return err
}

// freeze waits for processes that are being started, which crun could not bring to an end in a frozen cgroup, and
// freezes the container's cgroup.
func (c *Container) freeze(ctx context.Context) error {
	for {
		c.mu.Lock()
		busy, changed := c.launching(), c.launched
		c.mu.Unlock()
		if !busy {
			return c.group.Freeze(ctx)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for a process that is being started: %w", context.Cause(ctx))
		}
	}
}

// launching tells whether a further process is being started. c.mu is held.
func (c *Container) launching() bool {
	for _, p := range c.execs {
		if p == nil {
			return true
		}
	}
	return false
}

// Resume lets the processes of a paused container go on. Idempotent.
func (c *Container) Resume(ctx context.Context) error {
	if c.is(running) {
		return nil
	}
	if err := c.enter(resuming, paused); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	err := c.group.Thaw(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.state != resuming:
		return fmt.Errorf("container %s is %s: %w", c.id, c.state, errdefs.ErrFailedPrecondition)
	case err != nil:
		c.state = paused
		return fmt.Errorf("resume container %s: %w", c.id, err)
	}
	c.state = running
	return nil
}

// thaw undoes what a failed pause may have done, also when ctx is over.
func (c *Container) thaw(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if err := c.group.Thaw(ctx); err != nil {
		slog.Error("container may stand still", "container", c.id, "error", err)
	}
}

func (c *Container) is(s state) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state == s
}
