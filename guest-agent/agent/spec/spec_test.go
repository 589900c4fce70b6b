package spec

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

var guest = Guest{Rootfs: "/run/r", Cgroup: "/cube/1"}

// sample is a specification as the host sends it.
func sample() *specs.Spec {
	return &specs.Spec{
		Version: "1.2.1",
		Process: &specs.Process{
			Args: []string{"sh"}, Cwd: "/", NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_CHOWN"}},
			Rlimits:      []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 5, Soft: 4}},
		},
		Root:     &specs.Root{Path: "rootfs", Readonly: true},
		Hostname: "h",
		Mounts:   []specs.Mount{{Destination: "/proc", Type: "proc", Source: "proc"}},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{{Type: "pid"}, {Type: "mount"}, {Type: "ipc"}, {Type: "uts"}, {Type: "network"}},
			Seccomp:    &specs.LinuxSeccomp{DefaultAction: specs.ActErrno},
			Resources: &specs.LinuxResources{
				Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}},
				Pids:    &specs.LinuxPids{Limit: new(int64)},
			},
			MaskedPaths: []string{"/proc/kcore"}, ReadonlyPaths: []string{"/proc/sys"},
		},
	}
}

func transform(t *testing.T, s *specs.Spec, g Guest) (*specs.Spec, error) {
	t.Helper()
	in, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	out, err := Container(in, g)
	if err != nil {
		return nil, err
	}
	var got specs.Spec
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatal(err)
	}
	return &got, nil
}

func TestContainerKeepsWhatItIsAskedFor(t *testing.T) {
	s := sample()
	got, err := transform(t, s, guest)
	if err != nil {
		t.Fatal(err)
	}
	// What the guest decides, and nothing else, is different.
	s.Version, s.Root.Path, s.Linux.CgroupsPath = version, "/run/r", "/cube/1"
	s.Linux.Personality = &specs.LinuxPersonality{Domain: specs.PerLinux}
	s.Linux.Namespaces[4].Path = network
	s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: "cgroup"})
	want, _ := json.Marshal(s)
	if b, _ := json.Marshal(got); string(b) != string(want) {
		t.Errorf("got  %s\nwant %s", b, want)
	}
}

func TestContainerRemovesTheHosts(t *testing.T) {
	s := sample()
	s.Process.ApparmorProfile, s.Process.SelinuxLabel = "containerd-default", "label"
	s.Process.Terminal = true
	s.Linux.MountLabel, s.Linux.CgroupsPath = "label", "/default/x"
	got, err := transform(t, s, guest)
	if err != nil {
		t.Fatal(err)
	}
	if p := got.Process; p.ApparmorProfile+p.SelinuxLabel+got.Linux.MountLabel != "" || p.Terminal || got.Linux.CgroupsPath != "/cube/1" {
		t.Errorf("%+v, %+v", got.Process, got.Linux)
	}
}

func TestContainerRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*specs.Spec)
		want   string
	}{
		"no process":       {func(s *specs.Spec) { s.Process = nil }, "no command"},
		"no command":       {func(s *specs.Spec) { s.Process.Args = nil }, "no command"},
		"no root":          {func(s *specs.Spec) { s.Root = nil }, "no root"},
		"no linux":         {func(s *specs.Spec) { s.Linux = nil }, "Linux"},
		"the guest's pids": {func(s *specs.Spec) { s.Linux.Namespaces = s.Linux.Namespaces[1:] }, "no pid namespace"},
		"namespace by path": {func(s *specs.Spec) {
			s.Linux.Namespaces[4].Path = "/proc/1/ns/net"
		}, `"/proc/1/ns/net" isn't in the guest`},
		"bind mount": {func(s *specs.Spec) {
			s.Mounts = append(s.Mounts, specs.Mount{Type: "bind", Source: "/etc", Destination: "/x"})
		}, `"/etc" of mount /x`},
		"rbind option": {func(s *specs.Spec) {
			s.Mounts = append(s.Mounts, specs.Mount{Source: "/", Destination: "/x", Options: []string{"ro", "rbind"}})
		}, "isn't in the guest"},
		"host hook":        {func(s *specs.Spec) { s.Hooks = &specs.Hooks{Poststop: []specs.Hook{{Path: "/h"}}} }, "hook /h"},
		"scheduler":        {func(s *specs.Spec) { s.Process.Scheduler = &specs.Scheduler{} }, "process.scheduler"},
		"io priority":      {func(s *specs.Spec) { s.Process.IOPriority = &specs.LinuxIOPriority{} }, "process.ioPriority"},
		"domain name":      {func(s *specs.Spec) { s.Domainname = "d" }, "domainname"},
		"memory policy":    {func(s *specs.Spec) { s.Linux.MemoryPolicy = &specs.LinuxMemoryPolicy{} }, "memoryPolicy"},
		"time namespace":   {func(s *specs.Spec) { s.Linux.Namespaces[4] = specs.LinuxNamespace{Type: "time"} }, "time"},
		"seccomp listener": {func(s *specs.Spec) { s.Linux.Seccomp.ListenerPath = "/l" }, "listener"},
	} {
		s := sample()
		tc.change(s)
		if _, err := transform(t, s, guest); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
	for name, b := range map[string]string{"nothing": "", "no JSON": "{", "wrong type": `{"process":3}`, "huge": strings.Repeat(" ", maxSize+1)} {
		if _, err := Container([]byte(b), guest); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestStartContainerHookStays(t *testing.T) {
	s := sample()
	s.Hooks = &specs.Hooks{StartContainer: []specs.Hook{{Path: "/in/container"}}}
	if got, err := transform(t, s, guest); err != nil || got.Hooks.StartContainer[0].Path != "/in/container" {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestAllDevices(t *testing.T) {
	all, err := Devices("/dev")
	if err != nil {
		t.Fatal(err)
	}
	g := guest
	g.AllDevices = all
	s := sample()
	s.Linux.Devices = []specs.LinuxDevice{{Path: "/dev/null", Type: "c", Major: 1, Minor: 3}}
	got, err := transform(t, s, g)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]specs.LinuxDevice{}
	for _, d := range got.Linux.Devices {
		if _, twice := seen[d.Path]; twice || strings.HasPrefix(d.Path, "/dev/vport") || strings.HasPrefix(d.Path, "/dev/pts") {
			t.Errorf("unexpected %s", d.Path)
		}
		seen[d.Path] = d
	}
	if z := seen["/dev/zero"]; z.Type != "c" || z.Major != 1 || z.Minor != 5 || *z.FileMode != os.FileMode(0o666) {
		t.Errorf("/dev/zero is %+v", z)
	}
	if r := got.Linux.Resources.Devices; len(r) != 1 || !r[0].Allow || r[0].Access != "rwm" {
		t.Errorf("rules %+v", r)
	}
}

func TestDevicesAreDeniedWithoutRules(t *testing.T) {
	for _, r := range []*specs.LinuxResources{nil, {}} {
		s := sample()
		s.Linux.Resources = r
		got, err := transform(t, s, guest)
		if err != nil {
			t.Fatal(err)
		}
		if d := got.Linux.Resources.Devices; len(d) != 1 || d[0].Allow || d[0].Access != "rwm" || d[0].Type != "" {
			t.Errorf("rules %+v", d)
		}
	}
}

func TestProcess(t *testing.T) {
	b, adj, err := Process([]byte(`{"args":["x"],"cwd":"/","apparmorProfile":"p","user":{"uid":7},"oomScoreAdj":5}`), true, 80, 24)
	if err != nil || *adj != 5 {
		t.Fatal(err)
	}
	var p specs.Process
	if err := json.Unmarshal(b, &p); err != nil {
		t.Fatal(err)
	}
	if !p.Terminal || p.ConsoleSize.Width != 80 || p.ConsoleSize.Height != 24 || p.ApparmorProfile != "" || p.User.UID != 7 {
		t.Errorf("%+v", p)
	}
	for _, b := range []string{"", "[]", `{"cwd":"/"}`, `{"args":["x"],"scheduler":{"policy":"SCHED_FIFO"}}`} {
		if _, _, err := Process([]byte(b), false, 0, 0); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", b, err)
		}
	}
}
