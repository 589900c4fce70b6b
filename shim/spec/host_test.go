package spec

import (
	"slices"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestNetworkNamespaceIsTheMachines(t *testing.T) {
	s := plain()
	s.Linux.Namespaces[4].Path = "/run/netns/x"
	p, err := Transform(s, defaults())
	if err != nil {
		t.Fatal(err)
	}
	if p.NetNS != "/run/netns/x" {
		t.Errorf("network namespace %q", p.NetNS)
	}
	for _, ns := range p.Guest.Linux.Namespaces {
		if ns.Path != "" {
			t.Errorf("the guest got %+v", ns)
		}
	}
}

// member makes a spec that of a member of a pod, as CRI makes it.
func member(s *specs.Spec) *specs.Spec {
	s.Annotations = map[string]string{containerType: "container", sandboxID: "pod"}
	return s
}

// A member of a pod gets the namespaces of the pod that it names, and only those.
func TestJoin(t *testing.T) {
	for name, c := range map[string]struct {
		paths map[specs.LinuxNamespaceType]string
		join  []specs.LinuxNamespaceType
		says  string // of the refusal
	}{
		"none":        {},
		"as CRI does": {paths: map[specs.LinuxNamespaceType]string{"ipc": "/proc/7/ns/ipc", "uts": "/proc/7/ns/uts", "network": "/proc/7/ns/net"}, join: []specs.LinuxNamespaceType{"ipc", "uts"}},
		"all": {
			paths: map[specs.LinuxNamespaceType]string{"pid": "/proc/7/ns/pid", "ipc": "/proc/7/ns/ipc", "uts": "/proc/7/ns/uts"},
			join:  []specs.LinuxNamespaceType{"pid", "ipc", "uts"},
		},
		"another type": {paths: map[specs.LinuxNamespaceType]string{"pid": "/proc/7/ns/ipc"}, says: "/proc/7/ns/ipc"},
		"mounts":       {paths: map[specs.LinuxNamespaceType]string{"mount": "/proc/7/ns/mnt"}, says: "mount namespace"},
		"a file":       {paths: map[specs.LinuxNamespaceType]string{"ipc": "/run/ipc"}, says: "/run/ipc"},
		"a thread":     {paths: map[specs.LinuxNamespaceType]string{"ipc": "/proc/7/task/8/ns/ipc"}, says: "/proc/<pid of the pod>"},
		"odd pid":      {paths: map[specs.LinuxNamespaceType]string{"ipc": "/proc/+7/ns/ipc"}, says: "/proc/+7"},
		"self":         {paths: map[specs.LinuxNamespaceType]string{"ipc": "/proc/self/ns/ipc"}, says: "/proc/self"},
	} {
		t.Run(name, func(t *testing.T) {
			s := member(plain())
			for i, ns := range s.Linux.Namespaces {
				s.Linux.Namespaces[i].Path = c.paths[ns.Type]
			}
			p, err := Transform(s, defaults())
			if c.says != "" {
				refused(t, err, errdefs.IsFailedPrecondition, c.says)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(p.Join, c.join) || p.NetNS != c.paths["network"] {
				t.Errorf("joins %v, network %q", p.Join, p.NetNS)
			}
			for _, ns := range p.Guest.Linux.Namespaces {
				if ns.Path != "" {
					t.Errorf("the guest got %+v", ns)
				}
			}
		})
	}
}

// In a pod, too, the host's namespaces are not to be had, and the container that stands for it has its own.
func TestJoinRefused(t *testing.T) {
	for _, ns := range isolated {
		s := member(plain())
		s.Linux.Namespaces = slices.DeleteFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == ns })
		_, err := Transform(s, defaults())
		refused(t, err, errdefs.IsFailedPrecondition, "host's "+string(ns)+" namespace")
	}
	s := member(plain())
	s.Annotations[containerType] = "sandbox"
	s.Linux.Namespaces[1].Path = "/proc/7/ns/ipc"
	_, err := Transform(s, defaults())
	refused(t, err, errdefs.IsFailedPrecondition, "/proc/7/ns/ipc")
}
