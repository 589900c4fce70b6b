package sandbox

import (
	"fmt"
	"maps"
	"os"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/sandbox/cri"
	"github.com/cubesandbox/cube/shim/spec"
)

// configType is the options' type of containerd's CRI plugin, whose message cri.PodSandboxConfig is a part of.
const configType = "runtime.v1.PodSandboxConfig"

// maxConfig bounds the options. What a kubelet sends has some kilobytes; its annotations may have 256 KiB.
const maxConfig = 1 << 20

// podConfig decodes the options; without any it is that of a pod that asks for nothing.
func podConfig(options *anypb.Any) (*cri.PodSandboxConfig, error) {
	c := &cri.PodSandboxConfig{}
	switch {
	case options == nil:
		return c, nil
	case options.TypeUrl != configType:
		return nil, invalid("the sandbox's options are a %s; known is %s", options.TypeUrl, configType)
	case len(options.Value) > maxConfig:
		return nil, invalid("the sandbox's options have %d bytes, which is more than %d", len(options.Value), maxConfig)
	}
	if err := proto.Unmarshal(options.Value, c); err != nil {
		return nil, invalid("the sandbox's options: %v", err)
	}
	return c, nil
}

// refuse names what a pod asks for of the host's that a virtual machine can't give.
func refuse(c *cri.PodSandboxConfig) error {
	o := c.GetLinux().GetSecurityContext().GetNamespaceOptions()
	for _, ns := range []struct {
		field, kind string
		mode        cri.NamespaceMode
	}{{"hostNetwork", "network", o.GetNetwork()}, {"hostPID", "pid", o.GetPid()}, {"hostIPC", "ipc", o.GetIpc()}} {
		if ns.mode == cri.NamespaceMode_NODE {
			return unsupported("%s: the pod asks for the host's %s namespace, which its virtual machine can't share: leave %s out, or use another runtime class", ns.field, ns.kind, ns.field)
		}
	}
	if u := o.GetUsernsOptions(); u != nil && u.GetMode() != cri.NamespaceMode_NODE {
		return unsupported("hostUsers: false: user namespaces are not supported: the pod already has a kernel of its own; leave it out")
	}
	return nil
}

// machineRequest is the machine that the pod needs.
func (s *Service) machineRequest(r *sandboxapi.CreateSandboxRequest, c *cri.PodSandboxConfig) (pod.MachineRequest, error) {
	cfg, err := config.Load(s.config)
	if err != nil {
		return pod.MachineRequest{}, invalid("%v", err)
	}
	annotations := map[string]string{}
	maps.Copy(annotations, c.GetAnnotations())
	maps.Copy(annotations, r.Annotations)
	m := pod.MachineRequest{Hostname: c.GetHostname(), ConfigFile: s.config}
	if m.Hostname == "" {
		m.Hostname = r.SandboxID
	}
	m.Machine, err = spec.Sandbox(annotations, resources(c.GetLinux().GetResources()), cfg)
	return m, err
}

func resources(r *cri.Resources) *specs.LinuxResources {
	period := uint64(max(r.GetCpuPeriod(), 0))
	quota, memory := r.GetCpuQuota(), r.GetMemoryLimitInBytes()
	return &specs.LinuxResources{
		CPU:    &specs.LinuxCPU{Quota: &quota, Period: &period},
		Memory: &specs.LinuxMemory{Limit: &memory},
	}
}

// openNetNS opens a network namespace, which is there from then on until it is closed.
func openNetNS(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, invalid("the sandbox's network namespace: %v", err)
	}
	kind, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNET {
		f.Close()
		return nil, invalid("%s is no network namespace", path)
	}
	return f, nil
}

func (s *Service) validate(r *sandboxapi.CreateSandboxRequest) error {
	if r.SandboxID != s.pod.Name() {
		return invalid("the shim of pod %s was started for another sandbox than %q", s.pod.Name(), r.SandboxID)
	}
	if len(r.Rootfs) > 0 {
		return unsupported("the sandbox has a root file system, but a virtual machine has one of its own: give it to a container")
	}
	return nil
}

func invalid(format string, args ...any) error {
	return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(format, args...))
}

func unsupported(format string, args ...any) error {
	return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf(format, args...))
}
