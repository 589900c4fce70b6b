package conformance

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/cubesandbox/cube/shim/sandbox/cri"
)

var sandboxRows = []row{
	{name: "Lifecycle", test: sandboxLifecycle},
	{name: "WrongOrder", test: sandboxOrder},
	{name: "HostNamespaces", test: sandboxHostNamespaces},
	{name: "Files", test: sandboxFiles, noFake: noFiles},
	{name: "Members", test: sandboxMembers},
	{name: "StopWithMembers", test: sandboxStop},
	{name: "Namespaces", test: sandboxNamespaces},
	{name: "NetworkNamespace", test: sandboxNetwork, noFake: "a fake machine is the shim's own process"},
	{name: "MachineKilled", test: sandboxKilled, noFake: "a fake machine is the shim's own process"},
	{name: "ShimKilled", test: sandboxShimKilled},
}

// The states that containerd's CRI plugin compares with.
const (
	ready    = "SANDBOX_READY"
	notReady = "SANDBOX_NOTREADY"
)

// sandbox is a pod that containerd has the shim make without a container.
type sandbox struct {
	*box
	api sandboxapi.TTRPCSandboxService
}

// sandbox starts the shim in a bundle without config.json.
func (b *box) sandbox() *sandbox {
	b.Helper()
	b.boot()
	s := &sandbox{box: b, api: sandboxapi.NewTTRPCSandboxClient(b.conn)}
	b.Cleanup(func() {
		_, err := s.api.ShutdownSandbox(b.d.context(b.T), &sandboxapi.ShutdownSandboxRequest{SandboxID: b.id})
		if err != nil && !errors.Is(err, ttrpc.ErrClosed) && !b.crashed {
			b.Errorf("shutdown of the sandbox: %v", err)
		}
	})
	return s
}

func (s *sandbox) make(netns string) error { return s.makeWith(netns, &cri.PodSandboxConfig{}) }

func (s *sandbox) makeWith(netns string, c *cri.PodSandboxConfig) error {
	s.Helper()
	text, err := proto.Marshal(c)
	s.must(err)
	return second(s.api.CreateSandbox(s.d.context(s.T), &sandboxapi.CreateSandboxRequest{
		SandboxID: s.id, BundlePath: s.bundle, NetnsPath: netns, Annotations: map[string]string{criType: "sandbox", criSandbox: s.id},
		Options: &anypb.Any{TypeUrl: "runtime.v1.PodSandboxConfig", Value: text},
	}))
}

func (s *sandbox) up() error {
	r, err := s.api.StartSandbox(s.d.within(s.T, bootLimit), &sandboxapi.StartSandboxRequest{SandboxID: s.id})
	if err != nil {
		return err
	}
	if r.Pid == 0 || r.CreatedAt == nil {
		s.Errorf("start answers %v", r)
	}
	s.machine, s.pod.machine = int(r.Pid), int(r.Pid)
	return nil
}

// running makes and starts it.
func (s *sandbox) running() *sandbox {
	s.Helper()
	s.must(s.make(""))
	s.must(s.up())
	return s
}

func (s *sandbox) status() *sandboxapi.SandboxStatusResponse {
	s.Helper()
	r, err := s.api.SandboxStatus(s.d.context(s.T), &sandboxapi.SandboxStatusRequest{SandboxID: s.id, Verbose: true})
	s.must(err)
	return r
}

func (s *sandbox) hasState(want string) {
	s.Helper()
	if r := s.status(); r.State != want {
		s.Errorf("state %q, want %s", r.State, want)
	}
}

func (s *sandbox) stop() error {
	return second(s.api.StopSandbox(s.d.context(s.T), &sandboxapi.StopSandboxRequest{SandboxID: s.id, TimeoutSecs: 10}))
}

func (s *sandbox) wait() *sandboxapi.WaitSandboxResponse {
	s.Helper()
	began := time.Now()
	r, err := s.api.WaitSandbox(s.d.context(s.T), &sandboxapi.WaitSandboxRequest{SandboxID: s.id})
	s.must(err)
	if took := time.Since(began); took > s.d.cfg.Timeout(15*time.Second) || r.ExitedAt == nil {
		s.Errorf("wait took %s and answers %v", took, r)
	}
	return r
}

// container is one in the sandbox: containerd connects to the sandbox's shim and starts none.
func (s *sandbox) container() *box {
	s.Helper()
	m := s.d.box(s.T)
	m.pod, m.group = s.pod, s.group
	m.pod.boxes++
	m.annotate(map[string]string{criType: "container", criSandbox: s.id})
	m.dial("unix://" + s.address)
	return m
}

func sandboxLifecycle(b *box) {
	s := b.sandbox()
	ctx := b.d.context(b.T)
	b.must(s.make(""))
	p, err := s.api.Platform(ctx, &sandboxapi.PlatformRequest{SandboxID: b.id})
	b.must(err)
	if p.Platform.GetOS() != "linux" || p.Platform.GetArchitecture() != runtime.GOARCH {
		b.Errorf("platform %v", p)
	}
	b.must(s.up())
	b.must(second(s.api.PingSandbox(ctx, &sandboxapi.PingRequest{SandboxID: b.id})))
	r := s.status()
	if r.State != ready || int(r.Pid) != b.machine || r.SandboxID != b.id || r.CreatedAt == nil {
		b.Errorf("status %v", r)
	}
	for _, key := range []string{"pid", "state", "networkSandboxPath"} {
		if _, ok := r.Info[key]; !ok {
			b.Errorf("verbose status %v has no %s", r.Info, key)
		}
	}
	b.must(s.stop())
	b.must(s.stop())
	s.wait()
	s.hasState(notReady)
	if !b.d.fake() && !ended(b.machine, b.d.cfg.Timeout(limit)) {
		b.Error("the machine lives")
	}
	b.refused("ping after the end", second(s.api.PingSandbox(ctx, &sandboxapi.PingRequest{SandboxID: b.id})), codes.Unavailable)
}

func sandboxOrder(b *box) {
	s := b.sandbox()
	ctx := b.d.context(b.T)
	b.refused("start before create", second(s.api.StartSandbox(ctx, &sandboxapi.StartSandboxRequest{SandboxID: b.id})), codes.FailedPrecondition)
	b.must(s.make(""))
	b.refused("second create", s.make(""), codes.AlreadyExists)
	b.refused("status of another", second(s.api.SandboxStatus(ctx, &sandboxapi.SandboxStatusRequest{SandboxID: "other"})), codes.NotFound)
	b.refused("update", second(s.api.UpdateSandbox(ctx, &sandboxapi.UpdateSandboxRequest{SandboxID: b.id})), codes.Unimplemented)
	s.hasState(notReady)
	b.must(s.stop()) // it never was there
}

// sandboxHostNamespaces: what a machine of its own can't give is refused by the name that a pod's author knows.
func sandboxHostNamespaces(b *box) {
	s := b.sandbox()
	for field, o := range map[string]*cri.NamespaceOption{
		"hostNetwork": {Network: cri.NamespaceMode_NODE},
		"hostPID":     {Pid: cri.NamespaceMode_NODE},
		"hostIPC":     {Ipc: cri.NamespaceMode_NODE},
	} {
		err := s.makeWith("", &cri.PodSandboxConfig{Linux: &cri.Linux{
			SecurityContext: &cri.SecurityContext{NamespaceOptions: o},
		}})
		b.refused(field, err, codes.FailedPrecondition)
		if err != nil && !strings.Contains(err.Error(), field) {
			b.Errorf("the error for %s doesn't name it: %v", field, err)
		}
	}
	b.must(s.make(""))
}

// sandboxFiles: what containerd would bind into a pod's containers, or set for them, comes from the pod's configuration.
func sandboxFiles(b *box) {
	s := b.sandbox()
	b.must(s.makeWith("", &cri.PodSandboxConfig{
		Hostname:  "web",
		DnsConfig: &cri.DNSConfig{Servers: []string{"192.0.2.1"}},
		Linux:     &cri.Linux{Sysctls: map[string]string{"net.ipv4.ip_unprivileged_port_start": "80"}},
	}))
	b.must(s.up())
	m := s.container()
	m.run(both("cat /etc/hostname /etc/resolv.conf /proc/sys/net/ipv4/ip_unprivileged_port_start")).ends(0, "web\nnameserver 192.0.2.1\n80\n")
}

// sandboxMembers: containers come and go, and the sandbox stays.
func sandboxMembers(b *box) {
	s := b.sandbox().running()
	for i := range 2 {
		m := s.container()
		m.run(lines(2, i)).ends(uint32(i), "line 1\nline 2\n")
		m.must(m.init.delete())
		m.shutdown()
		s.hasState(ready)
	}
	b.must(second(s.api.PingSandbox(b.d.context(b.T), &sandboxapi.PingRequest{SandboxID: b.id})))
}

// sandboxStop ends what still runs, execs first.
func sandboxStop(b *box) {
	s := b.sandbox().running()
	m := s.container()
	m.run(sleep)
	e := m.exec(sleep).started()
	b.must(s.stop())
	e.ends(137, "")
	m.init.ends(137, "")
	m.init.is(task.Status_STOPPED)
	m.must(m.init.delete())
	s.hasState(notReady)
	late := s.container()
	r := late.request(sleep)
	_, err := late.client.Create(b.d.within(b.T, bootLimit), r)
	late.init.opened()
	b.refused("create in a sandbox that has stopped", err, codes.FailedPrecondition)
}

// sandboxNamespaces: containers that name the sandbox's namespaces by its pid share them, and have others of their own.
func sandboxNamespaces(b *box) {
	s := b.sandbox().running()
	joined := []string{"ipc", "uts"}
	first, second := s.container(), s.container()
	for _, m := range []*box{first, second} {
		m.join(b.machine, joined)
		m.run(sleep)
	}
	one, other := first.namespaces(), second.namespaces()
	for kind := range one {
		if (one[kind] == other[kind]) != slices.Contains(joined, kind) {
			b.Errorf("%s namespaces %q and %q", kind, one[kind], other[kind])
		}
	}
}

// sandboxNetwork: the machine is in the network namespace that it was given, which goes on while somebody is in it.
func sandboxNetwork(b *box) {
	name := b.id
	if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
		b.Skipf("ip netns add: %v: %s", err, out)
	}
	path := filepath.Join("/run/netns", name)
	b.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() }) // it may be gone
	var want, got unix.Stat_t
	b.must(unix.Stat(path, &want))
	s := b.sandbox()
	b.must(s.make(path))
	b.must(s.up())
	b.must(unix.Stat(fmt.Sprintf("/proc/%d/ns/net", b.machine), &got))
	if got.Ino != want.Ino {
		b.Errorf("the machine is in network namespace %d, want %d", got.Ino, want.Ino)
	}
	if r := s.status(); r.Info["networkSandboxPath"] != path {
		b.Errorf("verbose status %v", r.Info)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	b.must(err)
	if strings.Contains(string(mounts), b.bundle) {
		b.Error("there is a mount in the bundle")
	}
}

func sandboxKilled(b *box) {
	s := b.sandbox().running()
	m := s.container()
	m.run(sleep)
	b.must(unix.Kill(b.machine, unix.SIGKILL))
	s.wait()
	m.init.ends(137, "")
	m.must(m.init.delete())
	s.hasState(notReady)
	b.must(s.stop())
}

func sandboxShimKilled(b *box) {
	s := b.sandbox().running()
	m := s.container()
	m.run(sleep)
	m.crashed = true
	b.killShim(unix.SIGKILL)
	for _, c := range []*box{m, b} {
		if r := c.clean(); r.ExitStatus != 137 {
			b.Errorf("shim delete answers %v", r)
		}
	}
	b.nothingLeft()
}
