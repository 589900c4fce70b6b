package container

import (
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/guest-agent/api"
)

// namespaceFiles are the names in /proc/<pid>/ns of the namespaces that containers can have in common. All of them have
// the guest's network anyway.
var namespaceFiles = map[specs.LinuxNamespaceType]string{
	specs.PIDNamespace: "pid",
	specs.IPCNamespace: "ipc",
	specs.UTSNamespace: "uts",
}

// join finds the namespaces of other containers, or of the guest.
func (m *Manager) join(names []*api.Namespace) (map[specs.LinuxNamespaceType]string, error) {
	paths := map[specs.LinuxNamespaceType]string{}
	for _, n := range names {
		t := specs.LinuxNamespaceType(n.GetType())
		if namespaceFiles[t] == "" {
			return nil, fmt.Errorf("containers can't have a namespace of type %q in common: %w", n.GetType(), errdefs.ErrInvalidArgument)
		}
		if n.GetContainer() == "" {
			if t == specs.PIDNamespace { // the agent is in it
				return nil, fmt.Errorf("containers can't have the guest's pid namespace: %w", errdefs.ErrInvalidArgument)
			}
			paths[t] = fmt.Sprintf("/proc/1/ns/%s", namespaceFiles[t])
			continue
		}
		owner := m.lookup(n.GetContainer())
		if owner == nil {
			return nil, fmt.Errorf("the %s namespace's container %q doesn't exist: %w", t, n.GetContainer(), errdefs.ErrFailedPrecondition)
		}
		var err error
		if paths[t], err = owner.namespace(t); err != nil {
			return nil, err
		}
	}
	return paths, nil
}

// namespace is the path of a namespace of the container, which must be alive.
func (c *Container) namespace(t specs.LinuxNamespaceType) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.state {
	case creating, stopped, deleting:
		return "", fmt.Errorf("the %s namespace's container %s is %s: %w", t, c.id, c.state, errdefs.ErrFailedPrecondition)
	}
	return fmt.Sprintf("/proc/%d/ns/%s", c.init.pid, namespaceFiles[t]), nil
}
