package container

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// find finds a process that hasn't ended; "" is the first.
func (c *Container) find(exec string) (*process, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.execs[exec]
	if exec == "" {
		p = c.init
	}
	if p == nil {
		return nil, fmt.Errorf("process %q: %w", exec, errdefs.ErrNotFound)
	}
	return p, nil
}

// Signal sends a signal to a process, or to all of the container's.
func (c *Container) Signal(exec string, sig unix.Signal, all bool) error {
	if sig == unix.SIGKILL && (all || exec == "") {
		c.ending()
	}
	if all {
		return c.group.Signal(sig)
	}
	p, err := c.find(exec)
	if err != nil {
		return err
	}
	return p.signal(sig)
}

// Resize sets the size of a process's terminal.
func (c *Container) Resize(exec string, columns, rows uint16) error {
	p, err := c.find(exec)
	if err != nil {
		return err
	}
	return p.io.Resize(columns, rows)
}

// Processes lists the pids of the container's processes.
func (c *Container) Processes() ([]int, error) { return c.group.Processes() }

// Stats returns io.containerd.cgroups.v2.Metrics, encoded, of all containers together.
func (m *Manager) Stats() ([]byte, error) { return m.group().Stats() }

// Stats returns io.containerd.cgroups.v2.Metrics, encoded.
func (c *Container) Stats() ([]byte, error) {
	b, err := c.group.Stats()
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("container %s has no processes: %w", c.id, errdefs.ErrNotFound)
	}
	return b, err
}

// ending sees to it that no server of a share, by being silent, keeps the container from its end.
func (c *Container) ending() {
	if c.is(creating) {
		return // it has no process yet that could wait for one
	}
	stop := c.volumes.Watch()
	go func() {
		<-c.ended
		stop()
	}()
}

// kill ends the container's processes and waits for them.
func (c *Container) kill(ctx context.Context) error {
	defer c.volumes.Watch()()
	if err := c.group.Kill(); err != nil {
		return err
	}
	select {
	case <-c.ended:
	case <-ctx.Done():
		return fmt.Errorf("wait for the first process: %w", context.Cause(ctx))
	}
	if err := c.group.WaitEmpty(ctx); err != nil {
		return fmt.Errorf("wait for the last process: %w", err)
	}
	return nil
}

// leave ends the container and unmounts its disks.
func (c *Container) leave(ctx context.Context) error {
	if err := errors.Join(c.kill(ctx), c.volumes.Release(), c.root.Unmount()); err != nil {
		return fmt.Errorf("end container %s: %w", c.id, err)
	}
	return nil
}

// Delete removes a container that has stopped or was never started: its processes, cgroup, mounts and files. All data
// is on its disks afterwards. When it fails, it may be called again. A creation that is under way, because whoever asked
// for it has given up, comes to its end before.
func (c *Container) Delete(ctx context.Context) error {
	select {
	case <-c.settled:
	case <-ctx.Done():
		return fmt.Errorf("container %s is still being created: %w", c.id, ctx.Err())
	}
	if c.m.lookup(c.id) != c {
		return nil // its creation failed, or somebody else has deleted it
	}
	if err := c.enter(deleting, created, stopped); err != nil {
		return err
	}
	err := c.delete(ctx)
	if err != nil {
		c.mu.Lock()
		c.state = stopped
		c.mu.Unlock()
		return fmt.Errorf("delete container %s: %w", c.id, err)
	}
	c.m.forget(c)
	return nil
}

func (c *Container) delete(ctx context.Context) error {
	if err := c.kill(ctx); err != nil {
		return err
	}
	if err := c.m.Crun.Delete(ctx, c.id, c.dir); err != nil {
		return err
	}
	c.stopWatch()
	return c.clean()
}

// clean unmounts everything and removes the container's directory. What can't be unmounted isn't removed: it would be
// the files on the container's disks.
func (c *Container) clean() error {
	if c.volumes != nil {
		if err := c.volumes.Release(); err != nil {
			return err
		}
	}
	if c.root != nil {
		if err := c.root.Unmount(); err != nil {
			return err
		}
	}
	return os.RemoveAll(c.dir)
}

// discard removes what crun has made of a container whose creation failed.
func (c *Container) discard(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if err := c.group.Kill(); err != nil {
		return err
	}
	if err := c.group.WaitEmpty(ctx); err != nil {
		return fmt.Errorf("wait for the last process: %w", err)
	}
	return c.m.Crun.Delete(ctx, c.id, c.dir)
}
