package container

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/agent/spec"
)

// Update changes the container's limits to what resources (OCI specs.LinuxResources) says; what isn't in it stays. A
// memory limit below what is used makes the kernel reclaim, and kill processes of the container for want of memory when
// that isn't enough. When it fails, some limits may have been changed.
func (c *Container) Update(ctx context.Context, resources []byte) error {
	b, err := spec.Resources(resources)
	if err != nil {
		return err
	}
	if err := c.updatable(); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(c.dir, "update")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "resources.json")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		return err
	}
	if err := c.m.Crun.Update(ctx, c.id, file, dir); err != nil {
		return fmt.Errorf("update container %s: %w", c.id, err)
	}
	return nil
}

// updatable tells whether there is a cgroup with limits that matter to anyone.
func (c *Container) updatable() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.state {
	case created, running, paused:
		return nil
	}
	return fmt.Errorf("container %s is %s: %w", c.id, c.state, errdefs.ErrFailedPrecondition)
}
