package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime/debug"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/pkg/cap"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"google.golang.org/protobuf/types/known/anypb"
)

// featuresURL is the type that containerd knows features.Features, in JSON, by.
const featuresURL = "types.containerd.io/opencontainers/runtime-spec/1/features/Features"

// Info describes the runtime.
func (m *Manager) Info(context.Context, io.Reader) (*types.RuntimeInfo, error) {
	f, err := json.Marshal(supported())
	if err != nil {
		return nil, fmt.Errorf("describe the features: %w", err)
	}
	return &types.RuntimeInfo{
		Name:     m.Runtime,
		Version:  version(),
		Features: &anypb.Any{TypeUrl: featuresURL, Value: f},
	}, nil
}

// version is this program's, from its build.
func version() *types.RuntimeVersion {
	v := &types.RuntimeVersion{}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	v.Version = info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			v.Revision = s.Value
		}
	}
	return v
}

// supported is what of the OCI specification a container in a machine can have: what package spec lets through and crun
// does in the guest. containerd itself asks for id-mapped mounts, and refuses containers that need them where they are
// not there; what is named here at all tells known from unknown.
func supported() *features.Features {
	yes, no := true, false
	return &features.Features{
		OCIVersionMin: "1.0.0",
		OCIVersionMax: specs.Version,
		Hooks:         []string{"prestart", "createRuntime", "startContainer", "poststart", "poststop"},
		MountOptions: []string{
			"async", "atime", "bind", "defaults", "dev", "diratime", "dirsync", "exec", "mand", "noatime", "nodev", "nodiratime",
			"noexec", "nomand", "norelatime", "nostrictatime", "nosuid", "private", "ratime", "rbind", "rdev", "rdiratime",
			"relatime", "rexec", "rnoatime", "rnodev", "rnodiratime", "rnoexec", "rnorelatime", "rnostrictatime", "rnosuid",
			"ro", "rprivate", "rrelatime", "rro", "rrw", "rslave", "rstrictatime", "rsuid", "runbindable", "rw", "slave",
			"strictatime", "suid", "sync", "tmpcopyup", "unbindable",
		},
		Linux: &features.Linux{
			Namespaces:      []string{"cgroup", "ipc", "mount", "network", "pid", "uts"},
			Capabilities:    cap.Known(),
			Cgroup:          &features.Cgroup{V1: &no, V2: &yes, Systemd: &no, SystemdUser: &no, Rdma: &no},
			Seccomp:         seccomp(),
			Apparmor:        &features.Apparmor{Enabled: &no},
			Selinux:         &features.Selinux{Enabled: &no},
			IntelRdt:        &features.IntelRdt{Enabled: &no},
			MountExtensions: &features.MountExtensions{IDMap: &features.IDMap{Enabled: &no}},
			NetDevices:      &features.NetDevices{Enabled: &no},
		},
		// They make a machine larger, and put containers together into one.
		PotentiallyUnsafeConfigAnnotations: []string{"io.cube.", "io.containerd.runc.v2.group", "io.kubernetes.cri."},
	}
}

// seccomp is what the guest's libseccomp takes; a listener on the host is not to be had.
func seccomp() *features.Seccomp {
	yes := true
	return &features.Seccomp{
		Enabled: &yes,
		Actions: []string{
			"SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO", "SCMP_ACT_KILL", "SCMP_ACT_KILL_PROCESS", "SCMP_ACT_KILL_THREAD", "SCMP_ACT_LOG",
			"SCMP_ACT_TRACE", "SCMP_ACT_TRAP",
		},
		Operators: []string{
			"SCMP_CMP_EQ", "SCMP_CMP_GE", "SCMP_CMP_GT", "SCMP_CMP_LE", "SCMP_CMP_LT", "SCMP_CMP_MASKED_EQ", "SCMP_CMP_NE",
		},
		Archs: []string{"SCMP_ARCH_X86", "SCMP_ARCH_X32", "SCMP_ARCH_X86_64"},
	}
}
