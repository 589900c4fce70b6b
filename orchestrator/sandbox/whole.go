package sandbox

import (
	"context"
	"slices"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/cap"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/shim/spec"
)

// ToolsDir is where a whole container has the guest image's programs for it, and Envd one of them.
const (
	ToolsDir = "/.cube"
	Envd     = ToolsDir + "/cube-envd"
)

// whole takes away what stands between a container and the guest's kernel. The wall is the machine's.
func whole(ctx context.Context, client oci.Client, c *containers.Container, s *oci.Spec) error {
	const shm = "/dev/shm"
	s.Mounts = slices.DeleteFunc(s.Mounts, func(m specs.Mount) bool { return m.Destination == shm })
	s.Mounts = append(s.Mounts,
		// As a machine has it: half of the memory.
		specs.Mount{Destination: shm, Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "nodev", "mode=1777", "size=50%"}},
		specs.Mount{Destination: ToolsDir, Type: spec.ToolsMount, Source: "tools", Options: []string{"ro", "nosuid", "nodev"}})
	return oci.Compose(
		oci.WithCapabilities(cap.Known()), // the guest's kernel is no older than this list
		oci.WithAllDevicesAllowed,
		oci.WithMaskedPaths(nil),
		oci.WithReadonlyPaths(nil),
		oci.WithWriteableSysfs,
		oci.WithWriteableCgroupfs,
		oci.WithSeccompUnconfined,
		oci.WithNewPrivileges,
		oci.WithLinuxNamespace(specs.LinuxNamespace{Type: specs.CgroupNamespace}),
		withOpenFiles,
	)(ctx, client, c, s)
}

// withOpenFiles has processes open as few files at first as those of a machine may, and as many as they ask for: envd serves
// thousands of connections. The limit is the kernel's own (fs.nr_open).
func withOpenFiles(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
	s.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 1024, Hard: 1 << 20}}
	return nil
}
