package spec

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/internal/config"
)

// isolated are the namespaces that a container in a machine always has to itself; without them it would ask for the
// host's, which a machine can't give.
var isolated = []specs.LinuxNamespaceType{
	specs.PIDNamespace, specs.NetworkNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.MountNamespace,
}

// common are those that the containers of a pod may have in common. They all share the machine's network.
var common = []specs.LinuxNamespaceType{specs.PIDNamespace, specs.IPCNamespace, specs.UTSNamespace}

// namespaces refuses the host's namespaces and those of strangers, takes the network namespace for the machine, and
// gives the guest new ones, or those of the pod.
func namespaces(p *Plan, _ *config.Config) error {
	seen := map[specs.LinuxNamespaceType]bool{}
	var guest []specs.LinuxNamespace
	for _, ns := range p.Guest.Linux.Namespaces {
		switch {
		case seen[ns.Type]:
			return invalid("linux.namespaces names %s twice", ns.Type)
		case ns.Type == specs.NetworkNamespace:
			p.NetNS = ns.Path
		case ns.Type == specs.UserNamespace:
			return unsupported("user namespaces are not supported: the container already has a kernel of its own; run it without id mappings")
		case ns.Path != "":
			if err := p.join(ns); err != nil {
				return err
			}
		}
		seen[ns.Type] = true
		guest = append(guest, specs.LinuxNamespace{Type: ns.Type})
	}
	for _, t := range isolated {
		if !seen[t] {
			return unsupported("the container asks for the host's %s namespace: it runs in a virtual machine and can't share it; give it a %s namespace of its own", t, t)
		}
	}
	if !seen[specs.CgroupNamespace] {
		// On a cgroup v1 host specs come without one; the guest has cgroup v2, where a container needs it.
		guest = append(guest, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	p.Guest.Linux.Namespaces = guest
	return nil
}

// join takes a namespace of the pod. What is common to a pod's containers in its machine, the caller can only name by
// the process on the host that they all have: /proc/<pid of the machine>/ns/<type>.
func (p *Plan) join(ns specs.LinuxNamespace) error {
	if p.Group == "" || p.Sandbox {
		return unsupported("the container can't join the %s namespace %s: it runs in a virtual machine of its own", ns.Type, ns.Path)
	}
	var pid uint32
	if _, err := fmt.Sscanf(ns.Path, "/proc/%d/", &pid); err != nil || !slices.Contains(common, ns.Type) ||
		ns.Path != fmt.Sprintf("/proc/%d/ns/%s", pid, ns.Type) {
		return unsupported("the container can't join the %s namespace %s: the containers of a pod can have its pid, ipc and uts namespaces in common, and name them by /proc/<pid of the pod>/ns/<type>", ns.Type, ns.Path)
	}
	p.Join = append(p.Join, ns.Type)
	return nil
}

type deviceNumber struct {
	kind         string
	major, minor int64
}

// guestDevices are the devices that any guest has under the same numbers as the host.
var guestDevices = map[deviceNumber]bool{
	{"c", 1, 3}:    true, // null
	{"c", 1, 5}:    true, // zero
	{"c", 1, 7}:    true, // full
	{"c", 1, 8}:    true, // random
	{"c", 1, 9}:    true, // urandom
	{"c", 5, 0}:    true, // tty
	{"c", 5, 1}:    true, // console
	{"c", 5, 2}:    true, // ptmx
	{"c", 10, 200}: true, // net/tun
	{"c", 10, 229}: true, // fuse
}

// devices keeps those that the guest has too. A privileged container gets all the guest's devices instead of the host's.
func devices(p *Plan, _ *config.Config) error {
	if r := p.Guest.Linux.Resources; r != nil {
		p.PrivilegedDevices = slices.ContainsFunc(r.Devices, func(d specs.LinuxDeviceCgroup) bool {
			return d.Allow && (d.Type == "" || d.Type == "a") && everyNumber(d.Major) && everyNumber(d.Minor) && strings.Contains(d.Access, "w")
		})
	}
	var kept []specs.LinuxDevice
	for _, d := range p.Guest.Linux.Devices {
		kind := d.Type
		if kind == "u" { // an unbuffered character device: the same thing
			kind = "c"
		}
		switch {
		case guestDevices[deviceNumber{kind, d.Major, d.Minor}]:
			kept = append(kept, d)
		case p.PrivilegedDevices:
			p.drop("device " + d.Path)
		default:
			return unsupported("device %s (%s %d:%d) is the host's and can't be given to a virtual machine", d.Path, d.Type, d.Major, d.Minor)
		}
	}
	p.Guest.Linux.Devices = kept
	if len(p.Guest.Linux.NetDevices) > 0 {
		return unsupported("linux.netDevices names network devices of the host, which can't be moved into a virtual machine")
	}
	return nil
}

func everyNumber(n *int64) bool { return n == nil || *n < 0 }

// hooks takes out those that the host runs, and leaves startContainer, which runs inside the container, to the guest.
func hooks(p *Plan, _ *config.Config) error {
	h := p.Guest.Hooks
	if h == nil {
		return nil
	}
	if len(h.CreateContainer) > 0 {
		return unsupported("hook createContainer %s: it would run on the host in the container's mount namespace, which is inside a virtual machine; use createRuntime or startContainer",
			h.CreateContainer[0].Path)
	}
	p.Hooks = specs.Hooks{
		//lint:ignore SA1019 docker and nvidia still use it
		Prestart:      h.Prestart,
		CreateRuntime: h.CreateRuntime,
		Poststart:     h.Poststart,
		Poststop:      h.Poststop,
	}
	p.Guest.Hooks = nil
	if len(h.StartContainer) > 0 {
		p.Guest.Hooks = &specs.Hooks{StartContainer: h.StartContainer}
	}
	return nil
}

// hostOnly removes the rest of what names things of the host: paths, labels and profiles of its kernel, annotations.
func hostOnly(p *Plan, _ *config.Config) error {
	s := p.Guest
	s.Root = &specs.Root{Path: "rootfs", Readonly: s.Root.Readonly}
	s.Annotations = nil
	s.Linux.CgroupsPath = ""
	s.Linux.UIDMappings, s.Linux.GIDMappings = nil, nil
	s.Linux.MountLabel = ""
	s.Windows, s.Solaris, s.VM, s.ZOS, s.FreeBSD = nil, nil, nil, nil, nil
	if s.Linux.IntelRdt != nil {
		s.Linux.IntelRdt = nil
		p.drop("linux.intelRdt")
	}
	Process(s.Process)
	return nil
}

// Process removes from a process what names profiles and labels of the host's kernel, which the guest's doesn't know.
// It is also for the processes of exec.
func Process(p *specs.Process) {
	p.ApparmorProfile = ""
	p.SelinuxLabel = ""
}
