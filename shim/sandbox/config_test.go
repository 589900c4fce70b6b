package sandbox

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/cubesandbox/cube/bpf/policy"
	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/shim/sandbox/cri"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/vmm"
)

// kubelet is a PodSandboxConfig as k8s.io/cri-api v0.37.0 encodes it, with most of what a kubelet sets.
const kubelet = "ChMKA3dlYhIBMRoHZGVmYXVsdCABEgV3ZWItMRoRL3Zhci9sb2cvcG9kcy93ZWIiQwoKMTAuOTYuMC4xMBIZZGVmYXVsdC5zdmMuY2x1c3Rlci5sb2NhbBIRc3ZjLmNsdXN0ZXIubG9jYWwaB25kb3RzOjUqBRBQGJA/MgoKA2FwcBIDd2ViOhIKDWlvLmN1YmUudmNwdXMSATJCXwoJL2t1YmVwb2RzEg8KBhABKgIIAhoDCOgHSgAaKAojbmV0LmlwdjQuaXBfdW5wcml2aWxlZ2VkX3BvcnRfc3RhcnQSATAiBCCAgEAqEQigjQYQ8JMJGIAIIICAgIAC"

// TestConfigOfAKubelet: what it says of the machine and the containers is done.
func TestConfigOfAKubelet(t *testing.T) {
	h := newHarness(t)
	b, err := base64.StdEncoding.DecodeString(kubelet)
	h.must(err)
	r := h.request(nil)
	r.Options = &anypb.Any{TypeUrl: "runtime.v1.PodSandboxConfig", Value: b}
	h.must(second(h.CreateSandbox(t.Context(), r)))
	h.start()
	m := h.launcher.Last()
	// The CPUs are by annotation, the limit by quota; the guest's own needs are added to the memory limit.
	if m.Shape() != (vmm.Shape{VCPUs: 2, MemoryMiB: 512 + 96}) || m.CPULimit != 1.5 {
		t.Errorf("shape %v, limit %v", m.Shape(), m.CPULimit)
	}
	if m.Guest.Identity().Hostname != "web-1" {
		t.Errorf("identity %v", m.Guest.Identity())
	}
	h.member("app", func(s *specs.Spec) {
		s.Mounts = []specs.Mount{{Destination: "/etc/hosts", Type: "bind", Source: h.file("hosts", "a kubelet's\n"), Options: []string{"rbind"}}}
	}, "sleep")
	want := map[string]string{
		"/etc/hosts":       "a kubelet's\n",
		"/etc/hostname":    "web-1\n",
		"/etc/resolv.conf": "search default.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n",
	}
	if got := h.files("app"); len(got) != len(want) {
		t.Errorf("files %q", got)
	} else {
		for name, content := range want {
			if got[name] != content {
				t.Errorf("%s is %q, want %q", name, got[name], content)
			}
		}
	}
	if got := m.Guest.Spec("app").Linux.Sysctl; len(got) != 1 || got["net.ipv4.ip_unprivileged_port_start"] != "0" {
		t.Errorf("sysctls %v", got)
	}
}

// TestNoConfig: a sandbox that nobody says anything of is one of the configuration's size.
func TestNoConfig(t *testing.T) {
	h := newHarness(t)
	r := h.request(nil)
	r.Annotations = map[string]string{"io.cube.memory": "300MiB"}
	h.must(second(h.CreateSandbox(t.Context(), r)))
	h.start()
	m := h.launcher.Last()
	if m.Shape().MemoryMiB != 300 || m.CPULimit != 0 || m.NetNS != "" || m.Guest.Identity().Hostname != id {
		t.Errorf("request %+v, identity %v", m.Request, m.Guest.Identity())
	}
	h.member("app", nil, "sleep")
	files := h.files("app")
	if files["/etc/hostname"] != id+"\n" || !strings.Contains(files["/etc/hosts"], "127.0.1.1\t"+id+"\n") {
		t.Errorf("files %q", files)
	}
	if got, has := files["/etc/resolv.conf"]; has {
		t.Errorf("resolv.conf %q, in the place of the guest's own", got)
	}
	if len(h.network.asked) != 1 || h.network.asked[0] != (spec.Network{}) {
		t.Errorf("network %+v", h.network.asked)
	}
}

// TestNetworkOfAPod: the network is by the pod's annotation, and its end with that of the machine.
func TestNetworkOfAPod(t *testing.T) {
	for value, want := range map[string]spec.Network{
		"none":                             {None: true},
		`{"policy": {"default": "allow"}}`: {Settings: &network.Settings{Policy: &policy.Policy{Default: policy.Direct}}},
	} {
		h := newHarness(t)
		// A configuration that says nothing of the DNS is none.
		h.create(&cri.PodSandboxConfig{Annotations: map[string]string{"io.cube.network": value}, DnsConfig: &cri.DNSConfig{}})
		h.start()
		if !reflect.DeepEqual(h.network.asked, []spec.Network{want}) {
			t.Errorf("%s: network %+v", value, h.network.asked)
		}
		h.member("app", nil, "sleep")
		if got, has := h.files("app")["/etc/resolv.conf"]; has {
			t.Errorf("resolv.conf %q", got)
		}
		if h.network.released != 0 {
			t.Error("released before the end")
		}
		h.must(h.stopped())
		h.must(h.stopped())
		if h.network.released != 1 {
			t.Errorf("released %d times", h.network.released)
		}
	}
}

// TestRefusedConfigs: what a virtual machine can't give is named, and the sandbox can be created without it.
func TestRefusedConfigs(t *testing.T) {
	h := newHarness(t)
	namespaces := func(o *cri.NamespaceOption) *cri.PodSandboxConfig {
		return &cri.PodSandboxConfig{Linux: &cri.Linux{SecurityContext: &cri.SecurityContext{NamespaceOptions: o}}}
	}
	node := cri.NamespaceMode_NODE
	for _, c := range []struct {
		config *cri.PodSandboxConfig
		code   codes.Code
		want   string
	}{
		{namespaces(&cri.NamespaceOption{Network: node}), codes.FailedPrecondition, "hostNetwork"},
		{namespaces(&cri.NamespaceOption{Pid: node}), codes.FailedPrecondition, "hostPID"},
		{namespaces(&cri.NamespaceOption{Ipc: node}), codes.FailedPrecondition, "hostIPC"},
		{namespaces(&cri.NamespaceOption{UsernsOptions: &cri.UserNamespace{}}), codes.FailedPrecondition, "hostUsers"},
		{&cri.PodSandboxConfig{Annotations: map[string]string{"io.cube.vcpus": "99"}}, codes.InvalidArgument, "io.cube.vcpus"},
		{&cri.PodSandboxConfig{Annotations: map[string]string{"io.cube.disk": "1"}}, codes.InvalidArgument, "io.cube.disk"},
		{&cri.PodSandboxConfig{Annotations: map[string]string{"io.cube.network": "nothing"}}, codes.InvalidArgument, "io.cube.network"},
		{&cri.PodSandboxConfig{Linux: &cri.Linux{Resources: &cri.Resources{MemoryLimitInBytes: 1 << 50}}}, codes.InvalidArgument, "memory limit"},
	} {
		_, err := h.CreateSandbox(t.Context(), h.request(c.config))
		h.refused(c.want, err, c.code)
		if err != nil && (!strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n")) {
			t.Errorf("%s isn't named in %q", c.want, err)
		}
	}
	for name, options := range map[string]*anypb.Any{
		"another type": {TypeUrl: "runtimeoptions.v1.Options"},
		"nonsense":     {TypeUrl: configType, Value: []byte{0xff, 0xff}},
		"too much":     {TypeUrl: configType, Value: make([]byte, maxConfig+1)},
	} {
		r := h.request(nil)
		r.Options = options
		h.refused(name, second(h.CreateSandbox(t.Context(), r)), codes.InvalidArgument)
	}
	for name, path := range map[string]string{"missing": h.dir + "/none", "a file": h.file("netns", ""), "of another kind": "/proc/self/ns/mnt"} {
		r := h.request(nil)
		r.NetnsPath = path
		h.refused("network namespace: "+name, second(h.CreateSandbox(t.Context(), r)), codes.InvalidArgument)
	}
	h.create(namespaces(&cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER, UsernsOptions: &cri.UserNamespace{Mode: node}}))
}

// TestCommonShm: memory that containers share by name is the pod's where the ipc namespace is.
func TestCommonShm(t *testing.T) {
	h := newHarness(t)
	h.create(nil)
	h.start()
	shm := func(change func(*specs.Spec)) func(*specs.Spec) {
		return func(s *specs.Spec) {
			s.Mounts = []specs.Mount{{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "mode=1777", "size=1024k"}}}
			change(s)
		}
	}
	for name, c := range map[string]struct {
		change  func(*specs.Spec)
		kind    string
		options []string
	}{
		"own":    {func(*specs.Spec) {}, "tmpfs", []string{"nosuid", "mode=1777", "size=1024k"}},
		"common": {joins(specs.IPCNamespace), "cube-shm", []string{"nosuid", "size=1048576"}},
	} {
		h.member(name, shm(c.change), "sleep")
		for _, m := range h.launcher.Last().Guest.Spec(name).Mounts {
			if m.Destination == "/dev/shm" && (m.Type != c.kind || !slices.Equal(m.Options, c.options)) {
				t.Errorf("%s: %+v", name, m)
			}
		}
	}
}

// file makes a file and returns its path.
func (h *harness) file(name, content string) string {
	h.Helper()
	path := filepath.Join(h.dir, name)
	h.must(os.WriteFile(path, []byte(content), 0o600))
	return path
}

// files are those that a container gets a copy of, by where it sees them.
func (h *harness) files(name string) map[string]string {
	h.Helper()
	guest := h.launcher.Last().Guest
	request, got := guest.Request(name), map[string]string{}
	for _, m := range guest.Spec(name).Mounts {
		if m.Type == "cube-file" {
			got[m.Destination] = string(request.Files[m.Source[0]-'0'].Content)
		}
	}
	return got
}
