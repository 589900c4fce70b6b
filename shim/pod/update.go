package pod

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/spec"
)

// Update changes a container's limits; what isn't named stays. They can't be more than the machine has. A machine that is
// the container's alone gets the CPU limit on the host, too.
func (p *Pod) Update(ctx context.Context, id string, resources *specs.LinuxResources) error {
	c, err := p.get(id)
	if err != nil {
		return err
	}
	done, err := p.change(ctx)
	if err != nil {
		return err
	}
	defer done()
	c.mu.Lock()
	state := c.init.state
	c.mu.Unlock()
	if err := state.check(opUpdate, c.init.name()); err != nil {
		return err
	}
	v := c.vm()
	guest, cpus, err := spec.Update(resources, v.machine.Shape())
	if err != nil {
		return fmt.Errorf("update %s: %w", c.init.name(), err)
	}
	b, err := json.Marshal(guest)
	if err != nil {
		return err
	}
	if _, err := v.guest.UpdateContainer(ctx, &api.UpdateContainerRequest{Id: c.guestID, Resources: b}); err != nil {
		return fmt.Errorf("update %s: %w", c.init.name(), v.explain(err))
	}
	if err := c.updated(b); err != nil {
		return err
	}
	if cpus > 0 && c.alone {
		if err := v.machine.SetCPULimit(ctx, cpus); err != nil {
			return fmt.Errorf("update the CPU limit of the virtual machine: %w", err)
		}
		p.mu.Lock()
		v.made.request.CPULimit = cpus
		p.mu.Unlock()
	}
	return nil
}

// updated adds to what the container's limits have become.
func (c *container) updated(guest []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.limits == nil {
		c.limits = &specs.LinuxResources{}
	}
	return json.Unmarshal(guest, c.limits) // what isn't named stays
}

// limitAgain gives the container in another machine, which is of a snapshot, the limits that it was given after its creation.
func (c *container) limitAgain(ctx context.Context, v *vm) error {
	c.mu.Lock()
	if c.limits == nil {
		c.mu.Unlock()
		return nil
	}
	b, err := json.Marshal(c.limits)
	c.mu.Unlock()
	if err == nil {
		_, err = v.guest.UpdateContainer(ctx, &api.UpdateContainerRequest{Id: c.guestID, Resources: b})
	}
	if err != nil {
		return fmt.Errorf("limit %s again: %w", c.init.name(), v.explain(err))
	}
	return nil
}
