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
	c.mu.Lock()
	state := c.init.state
	c.mu.Unlock()
	if err := state.check(opUpdate, c.init.name()); err != nil {
		return err
	}
	guest, cpus, err := spec.Update(resources, c.vm().machine.Shape())
	if err != nil {
		return fmt.Errorf("update %s: %w", c.init.name(), err)
	}
	b, err := json.Marshal(guest)
	if err != nil {
		return err
	}
	if _, err := c.vm().guest.UpdateContainer(ctx, &api.UpdateContainerRequest{Id: c.guestID, Resources: b}); err != nil {
		return fmt.Errorf("update %s: %w", c.init.name(), c.vm().explain(err))
	}
	if cpus > 0 && c.alone {
		if err := c.vm().machine.SetCPULimit(ctx, cpus); err != nil {
			return fmt.Errorf("update the CPU limit of the virtual machine: %w", err)
		}
	}
	return nil
}
