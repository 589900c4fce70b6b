package spec

import (
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

// namespaces refuses the host's namespaces and those of other processes, takes the network namespace for the machine,
// and gives the guest new ones.
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
			return unsupported("the container can't join the %s namespace %s: it runs in a virtual machine of its own", ns.Type, ns.Path)
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

// resources drops the numbering of the host (CPUs, memory nodes, device numbers, network classes) and what only
// exists in cgroup v1.
func resources(p *Plan, _ *config.Config) error {
	r := p.Guest.Linux.Resources
	if r == nil {
		return nil
	}
	if b := r.BlockIO; b != nil {
		if len(b.WeightDevice)+len(b.ThrottleReadBpsDevice)+len(b.ThrottleWriteBpsDevice)+
			len(b.ThrottleReadIOPSDevice)+len(b.ThrottleWriteIOPSDevice) > 0 {
			return unsupported("linux.resources.blockIO names devices of the host, which a virtual machine doesn't have")
		}
		r.BlockIO = nil
		p.drop("linux.resources.blockIO")
	}
	if len(r.Rdma) > 0 {
		return unsupported("linux.resources.rdma names devices of the host, which a virtual machine doesn't have")
	}
	if r.Network != nil {
		r.Network = nil
		p.drop("linux.resources.network")
	}
	if c := r.CPU; c != nil {
		if c.Cpus != "" || c.Mems != "" {
			c.Cpus, c.Mems = "", ""
			p.drop("linux.resources.cpu.cpus and mems")
		}
		c.RealtimePeriod, c.RealtimeRuntime = nil, nil
	}
	if m := r.Memory; m != nil {
		//lint:ignore SA1019 callers still set it, and crun refuses it
		m.Kernel = nil
		m.KernelTCP, m.Swappiness, m.DisableOOMKiller = nil, nil, nil
	}
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

// guestMounts are the types of mounts that are made in the guest, of nothing from the host.
var guestMounts = []string{"proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"}

// mounts refuses what needs files of the host.
func mounts(p *Plan, _ *config.Config) error {
	for _, m := range p.Guest.Mounts {
		if len(m.UIDMappings) > 0 || len(m.GIDMappings) > 0 {
			return unsupported("mount %s: id-mapped mounts are not supported", m.Destination)
		}
		if slices.Contains(guestMounts, m.Type) {
			continue
		}
		if m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind") {
			return unsupported("mount %s: %s is a file or directory of the host; bind mounts into a virtual machine are not supported by this version", m.Destination, m.Source)
		}
		return unsupported("mount %s: file system type %q is not available in a virtual machine; available are %s",
			m.Destination, m.Type, strings.Join(guestMounts, ", "))
	}
	return nil
}

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
