package spec

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/internal/config"
)

// plain is a spec as `ctr run` makes it.
func plain() *specs.Spec {
	return &specs.Spec{
		Version: specs.Version,
		Process: &specs.Process{Args: []string{"sh"}, Cwd: "/", ApparmorProfile: "cri-default", SelinuxLabel: "label"},
		Root:    &specs.Root{Path: "/bundle/rootfs"},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts"},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm"},
			{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue"},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs"},
			{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup"},
		},
		Linux: &specs.Linux{
			CgroupsPath: "/default/box",
			Resources: &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{
				{Access: "rwm"}, {Allow: true, Type: "c", Major: ptr(int64(1)), Minor: ptr(int64(3)), Access: "rwm"},
			}},
			Namespaces: []specs.LinuxNamespace{{Type: "pid"}, {Type: "ipc"}, {Type: "uts"}, {Type: "mount"}, {Type: "network"}},
		},
	}
}

func ptr[T any](v T) *T { return &v }

func defaults() *config.Config {
	c := config.Default()
	c.VM.MaxVCPUs, c.VM.MaxMemory = 8, 4*units.GiB
	return c
}

func TestPlain(t *testing.T) {
	p, err := Transform(plain(), defaults())
	if err != nil {
		t.Fatal(err)
	}
	s := p.Guest
	if p.Shape.VCPUs != 1 || p.Shape.MemoryMiB != 256 || p.CPULimit != 0 || p.NetNS != "" || p.PrivilegedDevices {
		t.Errorf("plan %+v", p)
	}
	if p.Root != "/bundle/rootfs" || s.Root.Path != "rootfs" {
		t.Errorf("root %q and %q", p.Root, s.Root.Path)
	}
	if s.Linux.CgroupsPath != "" || s.Process.ApparmorProfile != "" || s.Process.SelinuxLabel != "" {
		t.Errorf("the guest got names of the host: %+v", s.Linux)
	}
	if !slices.Contains(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.CgroupNamespace}) {
		t.Error("no cgroup namespace")
	}
	if len(s.Mounts) != 7 || len(s.Process.Args) != 1 || len(s.Linux.Resources.Devices) != 2 {
		t.Error("something got lost")
	}
	b, err := json.Marshal(s)
	if err != nil || strings.Contains(string(b), "/bundle") {
		t.Errorf("a path of the host is left in %s", b)
	}
}

// refused checks an error: what it is, what it names, and that it is one line.
func refused(t *testing.T, err error, is func(error) bool, says string) {
	t.Helper()
	if err == nil || !is(err) || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "\n") {
		t.Errorf("error %v, want one that says %q", err, says)
	}
}

// TestSize: annotations come before limits, limits before the configuration.
func TestSize(t *testing.T) {
	limits := func(quota int64, period uint64, memory int64) *specs.LinuxResources {
		return &specs.LinuxResources{CPU: &specs.LinuxCPU{Quota: &quota, Period: &period}, Memory: &specs.LinuxMemory{Limit: &memory}}
	}
	for name, c := range map[string]struct {
		annotations map[string]string
		resources   *specs.LinuxResources
		vcpus, mib  int
		limit       float64
	}{
		"configuration":        {nil, nil, 1, 256, 0},
		"annotations":          {map[string]string{VCPUs: "4", Memory: "1GiB"}, nil, 4, 1024, 0},
		"bytes, rounded up":    {map[string]string{Memory: "536870913"}, nil, 1, 513, 0},
		"limits":               {nil, limits(150000, 100000, 512<<20), 2, 512 + guestOverheadMiB, 1.5},
		"small limits":         {nil, limits(10000, 100000, 16<<20), 1, 256, 0.1},
		"no limits":            {nil, limits(-1, 100000, -1), 1, 256, 0},
		"annotations first":    {map[string]string{VCPUs: "1", Memory: "2g"}, limits(400000, 100000, 3<<30), 1, 2048, 4},
		"quota above the host": {nil, limits(6400000, 100000, 0), 8, 256, 64},
		"default period":       {nil, &specs.LinuxResources{CPU: &specs.LinuxCPU{Quota: ptr(int64(250000))}}, 3, 256, 2.5},
	} {
		t.Run(name, func(t *testing.T) {
			s := plain()
			s.Annotations = c.annotations
			if c.resources != nil {
				s.Linux.Resources = c.resources
			}
			p, err := Transform(s, defaults())
			if err != nil {
				t.Fatal(err)
			}
			if p.Shape.VCPUs != c.vcpus || p.Shape.MemoryMiB != c.mib || p.CPULimit != c.limit {
				t.Errorf("%v with limit %v", p.Shape, p.CPULimit)
			}
		})
	}
}

// TestRefused: each names what is wrong, in one line.
func TestRefused(t *testing.T) {
	annotate := func(key, value string) func(*specs.Spec) {
		return func(s *specs.Spec) { s.Annotations = map[string]string{key: value} }
	}
	without := func(ns specs.LinuxNamespaceType) func(*specs.Spec) {
		return func(s *specs.Spec) {
			s.Linux.Namespaces = slices.DeleteFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == ns })
		}
	}
	mount := func(m specs.Mount) func(*specs.Spec) {
		return func(s *specs.Spec) { s.Mounts = append(s.Mounts, m) }
	}
	for name, c := range map[string]struct {
		change func(*specs.Spec)
		is     func(error) bool
		says   string
	}{
		"no number of vCPUs":   {annotate(VCPUs, "many"), errdefs.IsInvalidArgument, VCPUs},
		"half a vCPU":          {annotate(VCPUs, "0.5"), errdefs.IsInvalidArgument, "whole number from 1 to 8"},
		"no vCPUs":             {annotate(VCPUs, "0"), errdefs.IsInvalidArgument, VCPUs},
		"too many vCPUs":       {annotate(VCPUs, "9"), errdefs.IsInvalidArgument, VCPUs},
		"no size":              {annotate(Memory, "a lot"), errdefs.IsInvalidArgument, Memory},
		"negative memory":      {annotate(Memory, "-1"), errdefs.IsInvalidArgument, Memory},
		"too little memory":    {annotate(Memory, "64MiB"), errdefs.IsInvalidArgument, "from 128MiB"},
		"too much memory":      {annotate(Memory, "64TiB"), errdefs.IsInvalidArgument, "to 4GiB"},
		"unknown annotation":   {annotate("io.cube.vcpu", "1"), errdefs.IsInvalidArgument, "io.cube.vcpu"},
		"limit above the host": {func(s *specs.Spec) { s.Linux.Resources.Memory = &specs.LinuxMemory{Limit: ptr(int64(8 << 30))} }, errdefs.IsInvalidArgument, "8GiB"},
		"host network":         {without("network"), errdefs.IsFailedPrecondition, "host's network namespace"},
		"host pid":             {without("pid"), errdefs.IsFailedPrecondition, "host's pid namespace"},
		"host ipc":             {without("ipc"), errdefs.IsFailedPrecondition, "host's ipc namespace"},
		"host uts":             {without("uts"), errdefs.IsFailedPrecondition, "host's uts namespace"},
		"another's pid":        {func(s *specs.Spec) { s.Linux.Namespaces[0].Path = "/proc/1/ns/pid" }, errdefs.IsFailedPrecondition, "/proc/1/ns/pid"},
		"twice":                {func(s *specs.Spec) { s.Linux.Namespaces[0].Type = "ipc" }, errdefs.IsInvalidArgument, "twice"},
		"user namespace": {func(s *specs.Spec) {
			s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: "user"})
		}, errdefs.IsFailedPrecondition, "user namespaces"},
		"odd type":  {mount(specs.Mount{Destination: "/x", Type: "nfs", Source: "server:/x"}), errdefs.IsFailedPrecondition, `"nfs"`},
		"id-mapped": {mount(specs.Mount{Destination: "/x", Type: "tmpfs", UIDMappings: []specs.LinuxIDMapping{{Size: 1}}}), errdefs.IsFailedPrecondition, "id-mapped"},
		"device":    {func(s *specs.Spec) { s.Linux.Devices = []specs.LinuxDevice{{Path: "/dev/sda", Type: "b", Major: 8}} }, errdefs.IsFailedPrecondition, "/dev/sda"},
		"netdevice": {func(s *specs.Spec) { s.Linux.NetDevices = map[string]specs.LinuxNetDevice{"eth0": {}} }, errdefs.IsFailedPrecondition, "netDevices"},
		"block IO": {func(s *specs.Spec) {
			s.Linux.Resources.BlockIO = &specs.LinuxBlockIO{ThrottleReadBpsDevice: []specs.LinuxThrottleDevice{{}}}
		}, errdefs.IsFailedPrecondition, "blockIO"},
		"rdma": {func(s *specs.Spec) { s.Linux.Resources.Rdma = map[string]specs.LinuxRdma{"mlx5_0": {}} }, errdefs.IsFailedPrecondition, "rdma"},
		"huge pages": {func(s *specs.Spec) {
			s.Linux.Resources.HugepageLimits = []specs.LinuxHugepageLimit{{Pagesize: "1GB"}, {Pagesize: "2MB", Limit: 2 << 20}}
		}, errdefs.IsFailedPrecondition, "2MB"},
		"hook": {func(s *specs.Spec) { s.Hooks = &specs.Hooks{CreateContainer: []specs.Hook{{Path: "/bin/hook"}}} }, errdefs.IsFailedPrecondition, "/bin/hook"},
	} {
		t.Run(name, func(t *testing.T) {
			s := plain()
			c.change(s)
			_, err := Transform(s, defaults())
			refused(t, err, c.is, c.says)
		})
	}
}

func TestDevices(t *testing.T) {
	fuse := specs.LinuxDevice{Path: "/dev/fuse", Type: "c", Major: 10, Minor: 229}
	s := plain()
	s.Linux.Devices = []specs.LinuxDevice{fuse}
	p, err := Transform(s, defaults())
	if err != nil || len(p.Guest.Linux.Devices) != 1 {
		t.Errorf("fuse: %v, %v", p, err)
	}
	s = plain()
	s.Linux.Devices = []specs.LinuxDevice{fuse, {Path: "/dev/sda", Type: "b", Major: 8}}
	s.Linux.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
	p, err = Transform(s, defaults())
	if err != nil || !p.PrivilegedDevices || len(p.Guest.Linux.Devices) != 1 || len(p.Dropped) != 1 {
		t.Errorf("privileged: %+v, %v", p, err)
	}
}

func TestHooksAreSplit(t *testing.T) {
	s := plain()
	s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/a"}}, StartContainer: []specs.Hook{{Path: "/b"}}, Poststop: []specs.Hook{{Path: "/c"}}}
	p, err := Transform(s, defaults())
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Hooks.CreateRuntime) != 1 || len(p.Hooks.Poststop) != 1 || len(p.Hooks.StartContainer) != 0 {
		t.Errorf("the host runs %+v", p.Hooks)
	}
	if h := p.Guest.Hooks; h == nil || len(h.StartContainer) != 1 || len(h.CreateRuntime)+len(h.Poststop) != 0 {
		t.Errorf("the guest runs %+v", h)
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	write := func(b []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	refuse := func(what, says string) {
		t.Helper()
		if _, err := Load(dir); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", what, err)
		}
	}
	refuse("missing", "no config.json")
	write([]byte("{\"ociVersion\": \"1.0"))
	refuse("cut off", "not an OCI spec")
	write([]byte("\x00\x01\x02"))
	refuse("garbage", "not an OCI spec")
	write(make([]byte, maxSize+1))
	refuse("huge", "larger")
	write([]byte("{}"))
	refuse("empty", "no linux section")
	for what, change := range map[string]func(*specs.Spec){
		"no command":            func(s *specs.Spec) { s.Process.Args = nil },
		"no root file system":   func(s *specs.Spec) { s.Root = nil },
		"only Linux containers": func(s *specs.Spec) { s.Linux = nil },
	} {
		s := plain()
		change(s)
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		write(b)
		refuse(what, what)
	}
	s := plain()
	s.Root.Path = "rootfs"
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	write(b)
	if s, err = Load(dir); err != nil || s.Root.Path != filepath.Join(dir, "rootfs") {
		t.Errorf("%v, %v", s, err)
	}
}

func FuzzTransform(f *testing.F) {
	b, err := json.Marshal(plain())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"linux":{"resources":{"cpu":{"quota":9223372036854775807,"period":1}}},"process":{"args":["x"]},"root":{"path":"r"}}`))
	f.Add([]byte(`{"linux":{"namespaces":[{"type":"pid"},{"type":"ipc","path":"/proc/7/ns/ipc"},{"type":"uts"},{"type":"mount"},{"type":"network"}]},` +
		`"mounts":[{"destination":"/etc/hosts","type":"bind","source":"/etc/hosts","options":["rbind","rro"]},{"destination":"/x","source":"/tmp","options":["bind"]}],` +
		`"annotations":{"io.kubernetes.cri.sandbox-id":"pod"},"process":{"args":["x"]},"root":{"path":"r"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Load(dir)
		if err != nil {
			return
		}
		p, err := Transform(s, defaults())
		if err != nil {
			return
		}
		if p.Shape.VCPUs < 1 || p.Shape.VCPUs > 8 || p.Shape.MemoryMiB < 128 || p.Shape.MemoryMiB > 4096+guestOverheadMiB {
			t.Errorf("shape %v", p.Shape)
		}
		if len(p.Shares) > maxShares || len(p.Files) > maxFiles || slices.ContainsFunc(p.Guest.Mounts, isBind) {
			t.Errorf("shares %v, %d files, mounts %v", p.Shares, len(p.Files), p.Guest.Mounts)
		}
	})
}
