package pod

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/guest-agent/api"
)

// createInGuest makes the container, which the agent has made before if it was saved.
func (n *creation) createInGuest(ctx context.Context) (*container, error) {
	c := &container{
		id:         n.ID,
		guestID:    n.ID,
		specSum:    n.specSum,
		saved:      n.saved,
		bundle:     n.Bundle,
		pod:        n.Pod,
		claim:      n.claim,
		events:     n.env.Events,
		log:        n.log,
		timeout:    n.cfg.Timeout,
		records:    n.records,
		state:      n.state,
		hooks:      n.plan.Hooks,
		alone:      n.making != nil && n.plan.Group == "",
		disks:      n.disks,
		shares:     n.shares,
		commonPIDs: slices.Contains(n.plan.Join, specs.PIDNamespace),
		execs:      map[string]*process{},
	}
	if n.saved != nil {
		c.guestID = n.saved.Guest
	}
	c.on.Store(n.vm)
	c.init = newProcess(c, "", n.Stdio)
	c.init.state = Starting // an exit that comes before Create has succeeded waits for that
	names, err := c.init.attach(n.host, n.vm.guest)
	if err != nil {
		return nil, fmt.Errorf("open stdio in the guest: %w", err)
	}
	if n.saved != nil {
		err = n.adopt(ctx, c, names)
	} else {
		err = n.makeInGuest(ctx, c, names)
	}
	if err != nil {
		c.init.closeIO()
		return nil, n.vm.explain(err)
	}
	n.stage("container")
	n.log.Debug("container created", append(n.stages, "all", time.Since(n.began))...)
	return c, nil
}

// makeInGuest has the agent make the container.
func (n *creation) makeInGuest(ctx context.Context, c *container, names *api.Stdio) error {
	request, err := n.guestRequest(names)
	if err != nil {
		return err
	}
	n.expect(c)
	_, err = n.vm.guest.CreateContainer(ctx, request)
	return err
}

func (n *creation) guestRequest(names *api.Stdio) (*api.CreateContainerRequest, error) {
	b, err := json.Marshal(n.plan.Guest)
	if err != nil {
		return nil, err
	}
	shared, err := n.shares.connect(n.vm.guest, n.log)
	if err != nil {
		return nil, err
	}
	for i, s := range n.plan.Shares {
		shared[i].ReadOnly = s.ReadOnly
	}
	r := &api.CreateContainerRequest{
		Id:                n.ID,
		Spec:              b,
		Rootfs:            n.root.Guest,
		Stdio:             names,
		PrivilegedDevices: n.plan.PrivilegedDevices,
		Namespaces:        n.join(n.plan.Join),
		MachineId:         n.machineID(),
		Shares:            shared,
	}
	for _, f := range n.plan.Files {
		r.Files = append(r.Files, &api.File{Content: f.Content, Mode: f.Mode})
	}
	return r, nil
}

// join names the container whose namespaces are the pod's. The first one has them by being the first. Where the machine
// is the pod's own, they are those of the guest, except for the pid namespace, which is the agent's.
func (n *creation) join(types []specs.LinuxNamespaceType) (list []*api.Namespace) {
	n.mu.Lock()
	first, lent := n.claim.first, n.claim.sandbox
	named := first
	if s := n.slots[first]; s != nil && s.c != nil {
		named = s.c.guestID
	}
	n.mu.Unlock()
	for _, t := range types {
		switch {
		case lent && t != specs.PIDNamespace:
			list = append(list, &api.Namespace{Type: string(t)})
		case first != "" && first != n.ID:
			list = append(list, &api.Namespace{Type: string(t), Container: named})
		}
	}
	return list
}
