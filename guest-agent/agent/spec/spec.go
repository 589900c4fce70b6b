// Package spec makes of the OCI specification that the host sends one that crun can run in the guest. What the host
// should have taken out, because it means something only there, is refused.
package spec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// ErrInvalid says that a specification can't be run in a guest.
var ErrInvalid = errors.New("invalid specification")

// version is what the guest's crun takes. It doesn't look at fields that are newer, so these are refused (newer).
const version = "1.0.2"

// maxSize is far more than any specification has; ttrpc takes no more than 4 MiB.
const maxSize = 2 << 20

// Guest is what the guest decides about a container.
type Guest struct {
	Rootfs     string // where its root file system is
	Cgroup     string // its cgroup
	Terminal   bool
	AllDevices []specs.LinuxDevice // for a container that may use them all; nil for others
	// Join are the namespaces that it has in common with other containers, as paths.
	Join map[specs.LinuxNamespaceType]string
	// Files and Shares are the paths that mounts of the types cube-file and cube-share name by index.
	Files, Shares []string
	// Shm returns the path of the /dev/shm that containers have in common. Whoever comes first decides on its size
	// (tmpfs(5)), "" for the kernel's default.
	Shm func(size string) (string, error)
	// Tools returns the path of the guest image's programs for containers.
	Tools func() (string, error)
	// ResolvConf is the path of the resolv.conf for a container that brings none, "" if the guest has none.
	ResolvConf string
}

// Container transforms a container's specification.
func Container(b []byte, g Guest) ([]byte, error) {
	var s specs.Spec
	if err := decode(b, &s); err != nil {
		return nil, err
	}
	for _, step := range []func(*specs.Spec, Guest) error{
		complete, newer, namespaces, mounts, resolver, hooks, seccomp, devices, place,
	} {
		if err := step(&s, g); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	s.Version = version
	process(s.Process, g.Terminal)
	return json.Marshal(&s)
}

// Process transforms the description of a further process. oomScoreAdj is what crun doesn't look at when it starts one
// in a container that runs; nil is as any process.
func Process(b []byte, terminal bool, columns, rows uint32) (_ []byte, oomScoreAdj *int, err error) {
	var p specs.Process
	if err := decode(b, &p); err != nil {
		return nil, nil, err
	}
	if len(p.Args) == 0 {
		return nil, nil, fmt.Errorf("%w: the process has no command", ErrInvalid)
	}
	if err := newerProcess(&p); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	process(&p, terminal)
	if terminal && columns > 0 && rows > 0 {
		p.ConsoleSize = &specs.Box{Width: uint(columns), Height: uint(rows)}
	}
	b, err = json.Marshal(&p)
	return b, p.OOMScoreAdj, err
}

func decode(b []byte, into any) error {
	if len(b) > maxSize {
		return fmt.Errorf("%w: %d bytes", ErrInvalid, len(b))
	}
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

// process sets what every process gets.
func process(p *specs.Process, terminal bool) {
	p.Terminal = terminal
	// The guest has no profiles or policies of the host's.
	p.ApparmorProfile, p.SelinuxLabel = "", ""
}

func complete(s *specs.Spec, _ Guest) error {
	switch {
	case s.Process == nil || len(s.Process.Args) == 0:
		return errors.New("the container has no command")
	case s.Root == nil:
		return errors.New("the container has no root")
	case s.Linux == nil:
		return errors.New("the container isn't one for Linux")
	}
	return nil
}

// newer refuses what the guest's crun would ignore.
func newer(s *specs.Spec, _ Guest) error {
	hasTime := slices.ContainsFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.TimeNamespace })
	switch {
	case s.Domainname != "":
		return unsupported("domainname")
	case s.Linux.MemoryPolicy != nil:
		return unsupported("linux.memoryPolicy")
	case len(s.Linux.NetDevices) > 0:
		return unsupported("linux.netDevices")
	case len(s.Linux.TimeOffsets) > 0 || hasTime:
		return unsupported("a time namespace")
	}
	return newerProcess(s.Process)
}

func newerProcess(p *specs.Process) error {
	switch {
	case p.Scheduler != nil:
		return unsupported("process.scheduler")
	case p.IOPriority != nil:
		return unsupported("process.ioPriority")
	case p.ExecCPUAffinity != nil:
		return unsupported("process.execCPUAffinity")
	}
	return nil
}

func unsupported(field string) error {
	return fmt.Errorf("the guest's OCI runtime doesn't support %s", field)
}

// hooks refuses those that run outside of the container: their programs are the host's.
func hooks(s *specs.Spec, _ Guest) error {
	h := s.Hooks
	if h == nil {
		return nil
	}
	//lint:ignore SA1019 Prestart is deprecated and still used.
	for _, outside := range [][]specs.Hook{h.Prestart, h.CreateRuntime, h.CreateContainer, h.Poststart, h.Poststop} {
		if len(outside) > 0 {
			return fmt.Errorf("the hook %s runs outside of the container, on the host", outside[0].Path)
		}
	}
	return nil
}

func seccomp(s *specs.Spec, _ Guest) error {
	if c := s.Linux.Seccomp; c != nil && c.ListenerPath != "" {
		return fmt.Errorf("the seccomp listener %q isn't in the guest", c.ListenerPath)
	}
	return nil
}

// devices gives all of the guest's devices to a container that may use them. Any other has rules, if only that there are
// none but those that each container has: a cgroup without rules may use everything.
func devices(s *specs.Spec, g Guest) error {
	if s.Linux.Resources == nil {
		s.Linux.Resources = &specs.LinuxResources{}
	}
	if g.AllDevices == nil {
		if len(s.Linux.Resources.Devices) == 0 {
			s.Linux.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
		}
		return nil
	}
	for _, d := range g.AllDevices {
		if !slices.ContainsFunc(s.Linux.Devices, func(o specs.LinuxDevice) bool { return o.Path == d.Path }) {
			s.Linux.Devices = append(s.Linux.Devices, d)
		}
	}
	s.Linux.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
	return nil
}

// place puts the container where the guest wants it.
func place(s *specs.Spec, g Guest) error {
	s.Root.Path = g.Rootfs
	s.Linux.CgroupsPath = g.Cgroup
	s.Linux.MountLabel = ""
	if s.Linux.Personality == nil {
		// Said, so that nothing is handed down: crun's own may be another (package crun).
		s.Linux.Personality = &specs.LinuxPersonality{Domain: specs.PerLinux}
	}
	return nil
}
