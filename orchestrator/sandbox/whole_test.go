package sandbox

import (
	"slices"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/shim/spec"
)

// TestWhole: root of such a container is root of its machine, which has one /dev/shm and the guest image's programs.
func TestWhole(t *testing.T) {
	ctx := namespaces.WithNamespace(t.Context(), "testing")
	s, err := oci.GenerateSpec(ctx, nil, &containers.Container{ID: "box"}, oci.WithDefaultPathEnv, whole)
	if err != nil {
		t.Fatal(err)
	}
	var shm, tools []specs.Mount
	for _, m := range s.Mounts {
		switch m.Destination {
		case "/dev/shm":
			shm = append(shm, m)
		case ToolsDir:
			tools = append(tools, m)
		case "/sys", "/sys/fs/cgroup":
			if slices.Contains(m.Options, "ro") {
				t.Errorf("%s can't be written to", m.Destination)
			}
		}
	}
	if len(shm) != 1 || !slices.Contains(shm[0].Options, "size=50%") {
		t.Errorf("/dev/shm: %+v", shm)
	}
	if len(tools) != 1 || tools[0].Type != spec.ToolsMount || !slices.Contains(tools[0].Options, "ro") {
		t.Errorf("%s: %+v", ToolsDir, tools)
	}
	p, l := s.Process, s.Linux
	if !slices.Contains(p.Capabilities.Bounding, "CAP_SYS_ADMIN") || p.NoNewPrivileges || l.Seccomp != nil || len(l.MaskedPaths) != 0 || len(l.ReadonlyPaths) != 0 {
		t.Errorf("%+v, %+v", p, l)
	}
	if len(p.Rlimits) != 1 || p.Rlimits[0].Hard < 4096 || p.Rlimits[0].Soft != 1024 {
		t.Errorf("%+v", p.Rlimits)
	}
	if len(l.Resources.Devices) == 0 || !l.Resources.Devices[0].Allow || l.Resources.Devices[0].Access != "rwm" {
		t.Errorf("%+v", l.Resources.Devices)
	}
}
