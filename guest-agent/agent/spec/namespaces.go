package spec

import (
	"fmt"
	"maps"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// network is the guest's network namespace: its containers are a pod. Named instead of left out, since crun sets the
// sysctls net.* only for a container that has a network namespace.
const network = "/proc/1/ns/net"

// namespaces makes sure that a container sees neither the agent's processes nor its files, and gives it those that it
// has in common with others.
func namespaces(s *specs.Spec, g Guest) error {
	has := map[specs.LinuxNamespaceType]bool{}
	for _, ns := range s.Linux.Namespaces {
		if ns.Path != "" {
			return fmt.Errorf("the %s namespace %q isn't in the guest", ns.Type, ns.Path)
		}
		has[ns.Type] = true
	}
	for _, t := range []specs.LinuxNamespaceType{specs.PIDNamespace, specs.MountNamespace, specs.IPCNamespace} {
		if _, joined := g.Join[t]; !has[t] && !joined {
			return fmt.Errorf("the container has no %s namespace", t)
		}
	}
	if !has[specs.CgroupNamespace] { // specifications made on a host with cgroup v1 have none
		s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	join(s.Linux, specs.NetworkNamespace, network)
	for _, t := range slices.Sorted(maps.Keys(g.Join)) {
		join(s.Linux, t, g.Join[t])
	}
	if _, joined := g.Join[specs.UTSNamespace]; joined {
		s.Hostname = "" // crun would give it to the others, too
	}
	return nil
}

// join puts the container in a namespace that exists.
func join(l *specs.Linux, t specs.LinuxNamespaceType, path string) {
	n := specs.LinuxNamespace{Type: t, Path: path}
	if i := slices.IndexFunc(l.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == t }); i >= 0 {
		l.Namespaces[i] = n
		return
	}
	l.Namespaces = append(l.Namespaces, n)
}
