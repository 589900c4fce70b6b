package container

import (
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/agent/identity"
)

// Identity is what tells a container from others. Empty fields are left as they are.
type Identity struct{ Hostname, MachineID string }

// Identify gives a container that stands still another identity.
func (c *Container) Identify(i Identity) error {
	p, err := c.find("")
	if err != nil {
		return err
	}
	if i.Hostname != "" {
		if err := p.setHostname(i.Hostname); err != nil {
			return fmt.Errorf("name container %s: %w", c.id, err)
		}
	}
	if i.MachineID == "" {
		return nil
	}
	return identity.ReplaceMachineID(c.root.Path, i.MachineID)
}

func (p *process) setHostname(name string) error {
	ended := fmt.Errorf("its first process has ended: %w", errdefs.ErrFailedPrecondition)
	if p.pidfd == nil {
		return ended
	}
	conn, err := p.pidfd.SyscallConn()
	if err != nil {
		return ended
	}
	if raw := conn.Control(func(fd uintptr) { err = identity.SetHostnameOf(int(fd), name) }); raw != nil {
		return ended
	}
	return err
}
