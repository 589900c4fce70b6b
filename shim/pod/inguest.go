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

// createInGuest has the agent make the container.
func (n *creation) createInGuest(ctx context.Context) (*container, error) {
	c := &container{
		id:         n.ID,
		bundle:     n.Bundle,
		pod:        n.Pod,
		claim:      n.claim,
		vm:         n.vm,
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
	c.init = newProcess(c, "", n.Stdio)
	c.init.state = Starting // an exit that comes before Create has succeeded waits for that
	names, err := c.init.attach(n.host, n.vm.guest)
	if err != nil {
		return nil, fmt.Errorf("open stdio in the guest: %w", err)
	}
	request, err := n.guestRequest(names)
	if err != nil {
		return nil, err
	}
	n.expect(c)
	if _, err := n.vm.guest.CreateContainer(ctx, request); err != nil {
		c.init.closeIO()
		return nil, n.vm.explain(err)
	}
	n.stage("container")
	n.log.Debug("container created", append(n.stages, "all", time.Since(n.began))...)
	return c, nil
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
	n.mu.Unlock()
	for _, t := range types {
		switch {
		case lent && t != specs.PIDNamespace:
			list = append(list, &api.Namespace{Type: string(t)})
		case first != "" && first != n.ID:
			list = append(list, &api.Namespace{Type: string(t), Container: first})
		}
	}
	return list
}
