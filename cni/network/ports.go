package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/cni/gateway"
	"github.com/cubesandbox/cube/cni/ports"
)

// Port is a port of the host's that leads to one of a sandbox's, as long as that is open and the daemon runs.
type Port = ports.Port

// partTimeout bounds how long the end of a sandbox waits for the daemon to let go of its ports: one that is slow sees by
// itself that they are gone. An overview doesn't wait longer for it either.
const partTimeout = 2 * time.Second

// validatePorts is Open's, errdefs.ErrInvalidArgument.
func (n *Network) validatePorts(all []Port) error {
	if err := ports.Validate(all); err != nil {
		return err
	}
	c := &n.cfg.Network
	for _, own := range []struct {
		key  string
		at   netip.Addr
		port uint16
	}{{"dns_port", c.Gateway(), c.DNSPort}, {"proxy_port", netip.AddrFrom4([4]byte{127, 0, 0, 1}), c.ProxyPort}} {
		for _, p := range all {
			if p.Overlaps(Port{HostIP: own.at, HostPort: own.port, Protocol: p.Protocol}) {
				return fmt.Errorf("port %s of the host is Cube's own, network.%s: %w", p, own.key, errdefs.ErrInvalidArgument)
			}
		}
	}
	return nil
}

// portFile is the name of the file that says whose a port of the host is.
func portFile(p Port) string { return fmt.Sprintf("%s-%s-%d", p.Protocol, p.HostIP, p.HostPort) }

// parsePort reads such a name.
func parsePort(name string) (p Port, err error) {
	protocol, at, _ := strings.Cut(name, "-")
	address, port, _ := strings.Cut(at, "-")
	end, err := netip.ParseAddrPort(address + ":" + port)
	if err != nil {
		return p, fmt.Errorf("%s in %s is not ours: %w", name, portsDir, err)
	}
	return Port{HostIP: end.Addr(), HostPort: end.Port(), Protocol: protocol}, nil
}

// portOwner is the attachment whose file it is; "" for the file of a process that was killed while it made it.
func (n *Network) portOwner(name string) (string, error) {
	b, err := os.ReadFile(n.path(portsDir, name))
	return string(b), err
}

// openPorts takes what an open attachment has asked for, and has the daemon serve it.
func (s *session) openPorts(ctx context.Context, a *attachment) error {
	if len(a.Open.Ports) == 0 {
		return nil
	}
	if err := s.takePorts(ctx, a); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout(ports.UpdateTimeout))
	defer cancel()
	return ports.Update(ctx, s.cfg.ControlSocket(), a.key)
}

// takePorts writes down whose the ports are. A port of all addresses is one of each, so that it takes a lock to see that
// nobody has it.
func (s *session) takePorts(ctx context.Context, a *attachment) error {
	unlock, err := s.lock(ctx, s.path(portsDir), false)
	if err != nil {
		return err
	}
	defer unlock()
	names, err := s.names(portsDir)
	if err != nil {
		return err
	}
	for _, name := range names {
		taken, err := parsePort(name)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(a.Open.Ports, taken.Overlaps)
		if i < 0 {
			continue
		}
		owner, err := s.portOwner(name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("look whose port %s is: %w", taken, err)
		}
		if owner != "" {
			return fmt.Errorf("port %s of the host is mapped to container %s already: %w", a.Open.Ports[i], owner, errdefs.ErrAlreadyExists)
		}
		if err := s.unmark(portsDir, name); err != nil {
			return fmt.Errorf("take port %s: %w", taken, err)
		}
	}
	for _, p := range a.Open.Ports {
		if err := os.WriteFile(s.path(portsDir, portFile(p)), []byte(a.key), 0o600); err != nil {
			return fmt.Errorf("take port %s: %w", p, err)
		}
	}
	return nil
}

// closePorts gives back what the attachment has, and has the daemon cut it, if one runs.
func (s *session) closePorts(ctx context.Context, a *attachment) error {
	if len(a.Open.Ports) == 0 {
		return nil
	}
	for _, p := range a.Open.Ports {
		name := portFile(p)
		owner, err := s.portOwner(name)
		if err == nil && owner == a.key {
			err = s.unmark(portsDir, name)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("give back port %s: %w", p, err)
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Timeout(partTimeout))
	defer cancel()
	_ = ports.Update(ctx, s.cfg.ControlSocket(), a.key)
	return nil
}

// checkPorts verifies that the daemon serves what the attachment has, if one runs.
func (s *session) checkPorts(ctx context.Context, a *attachment) error {
	if len(a.Open.Ports) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout(ports.UpdateTimeout))
	defer cancel()
	served, err := ports.List(ctx, s.cfg.ControlSocket(), a.key)
	if errdefs.IsUnavailable(err) {
		return nil
	} else if err != nil {
		return err
	}
	for _, p := range a.Open.Ports {
		i := slices.IndexFunc(served, func(st ports.State) bool { return st.Port == p })
		if i < 0 {
			return fmt.Errorf("port %s isn't served: %w", p, errdefs.ErrFailedPrecondition)
		}
		if why := served[i].Reason; why != "" {
			return fmt.Errorf("port %s isn't served: %s: %w", p, why, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// lookAtPorts finds those that aren't served.
func (s *session) lookAtPorts(ctx context.Context, o *Overview) error {
	names, err := s.names(portsDir)
	if o.Ports = len(names); err != nil || o.Ports == 0 {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout(partTimeout))
	defer cancel()
	served, err := ports.List(ctx, s.cfg.ControlSocket(), "")
	if errdefs.IsUnavailable(err) {
		o.Findings = append(o.Findings, Finding{gateway.Hint, "ports of the host don't lead to containers: " + err.Error(), ""})
		return nil
	}
	for _, st := range served {
		if st.Reason != "" {
			detail := fmt.Sprintf("port %s of the host doesn't lead to container %s: %s", st.Port, st.ID, st.Reason)
			o.Findings = append(o.Findings, Finding{gateway.Hint, detail, ""})
		}
	}
	return err
}

// PortsDir is where it is written down whose which port of the host is, a file each.
func (n *Network) PortsDir() string { return n.path(portsDir) }

// PortOwners lists who has ports.
func (n *Network) PortOwners() ([]string, error) {
	names, err := n.names(portsDir)
	if err != nil {
		return nil, err
	}
	var owners []string
	for _, name := range names {
		owner, err := n.portOwner(name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("look whose port %s is: %w", name, err)
		}
		if owner != "" && !slices.Contains(owners, owner) {
			owners = append(owners, owner)
		}
	}
	return owners, nil
}

// PortTarget says where the ports of an open sandbox lead; errdefs.ErrNotFound if it has none. It takes no lock, so that Open
// can wait for who asks. What it returns holds as long as the leases: they end before the address is anybody else's.
func (n *Network) PortTarget(id string) (_ *ports.Target, err error) {
	key, err := keyOf(id)
	if err != nil {
		return nil, err
	}
	none := fmt.Errorf("container %s has no ports of the host: %w", id, errdefs.ErrNotFound)
	var before, r record
	if exists, err := n.read(key, &before); err != nil {
		return nil, err
	} else if !exists || before.Open == nil || len(before.Open.Ports) == 0 {
		return nil, none
	}
	t := &ports.Target{}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	for _, p := range before.Open.Ports {
		f, err := os.Open(n.path(portsDir, portFile(p)))
		if errors.Is(err, fs.ErrNotExist) {
			return nil, none
		} else if err != nil {
			return nil, fmt.Errorf("look whose port %s is: %w", p, err)
		}
		t.Leases = append(t.Leases, ports.Lease{Port: p, File: f})
		b := make([]byte, maxKey+1)
		if k, _ := f.Read(b); string(b[:k]) != key {
			return nil, none
		}
	}
	// Read when the leases were there already: before, the address may have been that of another life.
	if exists, err := n.read(key, &r); err != nil {
		return nil, err
	} else if !exists || r.Open == nil || !slices.Equal(r.Open.Ports, before.Open.Ports) {
		return nil, none
	}
	t.Address = r.Open.Address
	return t, nil
}
