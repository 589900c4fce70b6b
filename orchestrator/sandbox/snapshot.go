package sandbox

import (
	"context"

	"github.com/containerd/containerd/v2/pkg/namespaces"

	"github.com/cubesandbox/cube/shim/api"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/shim/snapshots"
)

// Save makes a snapshot of a running container: of its machine, with all that runs there. The container goes on. "" has the
// snapshot named after it.
func (c *Client) Save(ctx context.Context, id, name string) (string, error) {
	return c.save(c.context(ctx), id, name, "")
}

// SaveDisks makes a snapshot of a running container's disk alone, with which others can begin. The container goes on. like is a snapshot
// whose disk is much the same, so that what both share needn't be read again; "" is none.
func (c *Client) SaveDisks(ctx context.Context, id, name, like string) error {
	ctx = c.context(ctx)
	if _, _, err := c.runningTask(ctx, id); err != nil {
		return err
	}
	shim, err := snapshots.Dial(ctx, c.cfg, c.cfg.Containerd.Namespace, id)
	if err != nil {
		return err
	}
	defer shim.Close()
	return shim.SaveDisks(ctx, name, like)
}

func (c *Client) save(ctx context.Context, id, name string, purpose saved.Purpose) (string, error) {
	if _, _, err := c.runningTask(ctx, id); err != nil {
		return "", err
	}
	shim, err := snapshots.Dial(ctx, c.cfg, c.cfg.Containerd.Namespace, id)
	if err != nil {
		return "", err
	}
	defer shim.Close()
	return shim.Save(ctx, name, purpose)
}

// stats asks the shim of a container, in the context's namespace.
func (c *Client) stats(ctx context.Context, id string) (*api.StatsResponse, error) {
	ns, _ := namespaces.Namespace(ctx)
	shim, err := snapshots.Dial(ctx, c.cfg, ns, id)
	if err != nil {
		return nil, err
	}
	defer shim.Close()
	return shim.Stats(ctx)
}

// Rollback puts a running container back to a snapshot of it: its memory and its disk.
func (c *Client) Rollback(ctx context.Context, id, name string) error {
	ctx = c.context(ctx)
	if _, _, err := c.runningTask(ctx, id); err != nil {
		return err
	}
	shim, err := snapshots.Dial(ctx, c.cfg, c.cfg.Containerd.Namespace, id)
	if err != nil {
		return err
	}
	defer shim.Close()
	_, err = shim.Rollback(ctx, name)
	return err
}

// Hold has a running container stand still, with its memory where it is, until Release: it takes no CPU, doesn't see the time
// pass, and can only be released or killed.
func (c *Client) Hold(ctx context.Context, id string) error {
	shim, err := snapshots.Dial(ctx, c.cfg, c.cfg.Containerd.Namespace, id)
	if err != nil {
		return err
	}
	defer shim.Close()
	return shim.Hold(ctx)
}

// Release has it go on, with its clock put right. containerd isn't asked. After an error its machine is of no use.
func (c *Client) Release(ctx context.Context, id string) error {
	shim, err := snapshots.Dial(ctx, c.cfg, c.cfg.Containerd.Namespace, id)
	if err != nil {
		return err
	}
	defer shim.Close()
	return shim.Release(ctx)
}
