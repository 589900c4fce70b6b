// Package spec reads a bundle's config.json and turns it into a Plan: the spec that the guest gets, without anything
// that only means something on the host, and what the host itself has to do. It also judges updates of a container's
// limits. It starts nothing and touches no machine.
package spec

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/vmm"
)

// maxSize bounds config.json. Kubernetes' largest specs are some hundred KiB.
const maxSize = 8 << 20

// Plan is what becomes of a spec.
type Plan struct {
	// Guest is the spec for the guest: no host path, no host device, no hook of the host.
	Guest *specs.Spec
	// Root is the root directory that the spec names, absolute. It counts where containerd hands over no rootfs mounts.
	Root string
	// Machine is what the container asks for of a machine that is made for it. One that joins a pod has the pod's.
	Machine
	// NetNS is the network namespace the machine belongs in, "" for a new one.
	NetNS string
	// Hooks run on the host. Only the kinds that the host is to run are set.
	Hooks specs.Hooks
	// PrivilegedDevices: the container may use all devices of the guest.
	PrivilegedDevices bool
	// Group is the pod that the container belongs to, "" for one of its own. Sandbox: it is the container that stands
	// for the pod, and whose end is the pod's.
	Group   string
	Sandbox bool
	// Shares are the files and directories of the host that the spec's mounts of type cube-share name by index.
	Shares []Share
	// Files are the contents that mounts of type cube-file name by index.
	Files []File
	// Join are the namespaces that the container has in common with its pod: pid, ipc, uts.
	Join []specs.LinuxNamespaceType
	// Dropped says what was left out because it only means something on the host, for the log.
	Dropped []string
}

// Machine is what a machine is to be.
type Machine struct {
	// Shape is its size.
	Shape vmm.Shape
	// CPULimit is the host CPU time it may use, in CPUs, 0 for no limit below its vCPUs.
	CPULimit float64
	// Network is the network it is to have.
	Network Network
}

// Network is what a pod says of its network. The zero value leaves it to a CNI plugin.
type Network struct {
	// None: the machine is to have no network card.
	None bool
	// Settings, if set, are of a network that Cube opens itself.
	Settings *network.Settings
}

// Share is a file or directory of the host that the container sees.
type Share struct {
	// Source is absolute and has no symbolic links. It was a directory or a regular file; whoever opens it looks again.
	Source   string
	ReadOnly bool
	// Recursive: what is mounted below Source is part of it.
	Recursive bool
}

// File is a small file of the host that is copied into the guest.
type File struct {
	Content []byte
	Mode    uint32 // permission bits
}

// Load reads the bundle's config.json.
func Load(bundle string) (*specs.Spec, error) {
	var s specs.Spec
	name, err := read(bundle, &s)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, invalid("the bundle %s has no config.json", bundle)
	}
	if err != nil {
		return nil, err
	}
	switch {
	case s.Linux == nil:
		return nil, invalid("%s has no linux section; only Linux containers can run", name)
	case s.Process == nil || len(s.Process.Args) == 0:
		return nil, invalid("%s names no command to run", name)
	case s.Root == nil || s.Root.Path == "":
		return nil, invalid("%s names no root file system", name)
	}
	if !filepath.IsAbs(s.Root.Path) {
		s.Root.Path = filepath.Join(bundle, s.Root.Path)
	}
	for i, m := range s.Mounts {
		if isBind(m) && !filepath.IsAbs(m.Source) {
			s.Mounts[i].Source = filepath.Join(bundle, m.Source)
		}
	}
	return &s, nil
}

// read decodes the bundle's config.json and returns its name.
func read(bundle string, into any) (string, error) {
	f, err := os.Open(filepath.Join(bundle, "config.json"))
	if err != nil {
		return "", fmt.Errorf("read the spec: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return "", fmt.Errorf("read the spec: %w", err)
	}
	if len(b) > maxSize {
		return "", invalid("%s is larger than %d MiB", f.Name(), maxSize>>20)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return "", invalid("%s is not an OCI spec: %v", f.Name(), err)
	}
	return f.Name(), nil
}

// step is one transformation: it reads and rewrites Plan.Guest and fills in the rest of the Plan.
type step func(*Plan, *config.Config) error

// steps in their order. namespaces needs the group; size comes before resources, which drops what size reads.
var steps = []step{
	annotations,
	namespaces,
	size,
	resources,
	devices,
	mounts,
	hooks,
	hostOnly,
}

// Transform makes the Plan of a spec, which it takes over.
func Transform(s *specs.Spec, cfg *config.Config) (*Plan, error) {
	p := &Plan{Guest: s, Root: s.Root.Path}
	for _, step := range steps {
		if err := step(p, cfg); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *Plan) drop(what string) { p.Dropped = append(p.Dropped, what) }

func invalid(format string, args ...any) error {
	return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(format, args...))
}

// unsupported is for what a machine of its own can't give: the caller must change the container, not its syntax.
func unsupported(format string, args ...any) error {
	return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf(format, args...))
}
