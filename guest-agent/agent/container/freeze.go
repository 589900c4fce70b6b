package container

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/agent/cgroup"
	"github.com/cubesandbox/cube/guest-agent/agent/stdio"
)

// Freeze has all processes of all containers stand still, in one step: the cgroup that all containers' are in is frozen.
// No container is made, changed or ended meanwhile; the caller sees to that. When it fails, they go on.
func (m *Manager) Freeze(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	// Before they stand still: a stream that breaks from here on waits for another.
	m.mu.Lock()
	m.thawed = make(chan struct{})
	m.mu.Unlock()
	if err := m.group().Freeze(ctx); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		return errors.Join(fmt.Errorf("freeze all containers: %w", err), m.Thaw(ctx))
	}
	return nil
}

// Thaw lets them go on, but for containers that are paused. Idempotent.
func (m *Manager) Thaw(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	if err := m.group().Thaw(ctx); err != nil {
		return fmt.Errorf("thaw the containers: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.thawed != nil {
		close(m.thawed)
		m.thawed = nil
	}
	return nil
}

// rest implements stdio.Rest.
func (m *Manager) rest() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.thawed
}

func (m *Manager) group() cgroup.Group { return cgroup.New(m.Cgroups, cgroupParent) }

// Attach gives a process, "" for the first, other streams; see stdio.Process.Replace.
func (c *Container) Attach(ctx context.Context, exec string, s stdio.Streams, terminal, goesOn bool) error {
	p, err := c.find(exec)
	if err == nil && p.terminal != terminal {
		err = fmt.Errorf("whether process %q has a terminal can't be changed: %w", exec, errdefs.ErrInvalidArgument)
	}
	if err != nil {
		s.Close()
		return err
	}
	return p.io.Replace(ctx, s, goesOn)
}
