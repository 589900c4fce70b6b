package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"

	"github.com/cubesandbox/cube/guest-agent/api"
)

// output runs a container of its own to its end.
func (m *machine) output(t *testing.T, id string, s *specs.Spec) (stdout, stderr string, status uint32) {
	t.Helper()
	f := m.events(t)
	c := m.newContainer(t, id)
	c.run(t, s)
	stdout, stderr = read(t, c.stdout), read(t, c.stderr)
	return stdout, stderr, f.exit(t, id, "")
}

// fields makes a map of "key: value" lines.
func fields(s string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(s) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			m[strings.TrimSpace(k)] = strings.TrimSpace(v)
		}
	}
	return m
}

// The OCI properties that crun gives a container in a host, it has in the guest.
func TestProperties(t *testing.T) {
	m := sharedMachine(t)
	s := containerSpec("sh", "-c", `
		grep -E '^(Uid|Groups|CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status
		echo "nofile: $(ulimit -n)"
		echo "write: $(touch /file 2>&1)"
		echo "masked: $(cat /proc/kcore | wc -c)"
		echo "sysctl: $(cat /proc/sys/net/ipv4/ip_forward)"
		echo "sys: $(echo 0 2>&1 >/proc/sys/kernel/hostname)"
		echo "cgroup: $(cat /proc/self/cgroup)"
		echo "limit: $(cat /sys/fs/cgroup/pids.max)"
		echo "oom: $(cat /proc/self/oom_score_adj)"
		echo "personality: $(cat /proc/self/personality)"
		echo "null: $(echo x >/dev/null && echo ok)"
		echo "kmsg: $(mknod /tmp/kmsg c 1 11 && cat /tmp/kmsg 2>&1)"
		echo "chmod: $(chmod 1 /tmp 2>&1)"
		echo "hostname: $(hostname)"
		echo "lo: $(ip addr show lo | grep -c UP)"
		echo "init: $(cat /proc/1/comm)"
		echo "processes: $(ls -d /proc/[0-9]* | wc -l)"`)
	limit := int64(50)
	s.Process.User = specs.User{UID: 1000, GID: 1000, AdditionalGids: []uint32{7}}
	s.Process.Capabilities.Effective, s.Process.Capabilities.Permitted = nil, nil
	s.Root.Readonly = true
	s.Mounts = append(s.Mounts, specs.Mount{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"mode=1777"}})
	s.Linux.Sysctl = map[string]string{"net.ipv4.ip_forward": "1"}
	s.Linux.Resources.Pids = &specs.LinuxPids{Limit: &limit}
	s.Linux.Seccomp = &specs.LinuxSeccomp{
		DefaultAction: specs.ActAllow,
		Architectures: []specs.Arch{specs.ArchX86_64},
		Syscalls:      []specs.LinuxSyscall{{Names: []string{"chmod", "fchmod", "fchmodat"}, Action: specs.ActErrno}},
	}
	out, stderr, status := m.output(t, "properties", s)
	if status != 0 {
		t.Errorf("status %d", status)
	}
	got := fields(out)
	for key, want := range map[string]string{
		"Uid": "1000\t1000\t1000\t1000", "Groups": "7", "CapEff": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2",
		"nofile": "512", "masked": "0", "sysctl": "1", "cgroup": "0::/", "limit": "50", "oom": "0", "personality": "00000000", "null": "ok",
		"hostname": "box", "lo": "1", "init": "sh",
	} {
		if got[key] != want {
			t.Errorf("%s is %q, want %q", key, got[key], want)
		}
	}
	for key, want := range map[string]string{
		"write": "Read-only file system", "sys": "Read-only file system", "chmod": "Operation not permitted",
	} {
		if !strings.Contains(got[key], want) {
			t.Errorf("%s says %q, want %q", key, got[key], want)
		}
	}
	t.Logf("%s%s", out, stderr)
}

// Neither the agent's files nor its processes nor its devices are to be seen, also with all capabilities.
func TestIsolation(t *testing.T) {
	m := sharedMachine(t)
	all := strings.Fields("CAP_CHOWN CAP_DAC_OVERRIDE CAP_SYS_ADMIN CAP_SYS_CHROOT CAP_SYS_PTRACE CAP_MKNOD CAP_NET_ADMIN CAP_SYS_RAWIO")
	s := containerSpec("sh", "-c", `
		echo "roots: $(grep -c ' / / ' /proc/self/mountinfo)"
		echo "initramfs: $(grep -c rootfs /proc/self/mountinfo)"
		echo "crun: $(ls /usr/bin/crun /init /etc/cube 2>/dev/null | wc -l)"
		echo "agent: $(grep -l '[c]ube-agent' /proc/[0-9]*/cmdline 2>/dev/null | wc -l)"
		echo "port: $(ls /dev | grep -c vport)"
		echo "disks: $(ls /dev | grep -c ^sd)"
		echo "sockets: $(cat /proc/net/tcp* /proc/net/udp* /proc/net/raw* | grep -c '^ *[0-9a-f]*:')"
		echo "abstract: $(grep -c @ /proc/net/unix)"
		umount -l / 2>/dev/null
		echo "after umount: $(ls /init /usr/bin/crun 2>/dev/null | wc -l)"`)
	s.Process.Capabilities = &specs.LinuxCapabilities{Bounding: all, Effective: all, Permitted: all}
	s.Process.NoNewPrivileges = false
	out, stderr, _ := m.output(t, "isolation", s)
	got := fields(out)
	for key, want := range map[string]string{
		"roots": "1", "initramfs": "0", "crun": "0", "agent": "0", "port": "0", "disks": "0", "after umount": "0",
		"sockets": "0", "abstract": "0", // the agent has none, in the network that it has in common with containers
	} {
		if got[key] != want {
			t.Errorf("%s: %q, want %q", key, got[key], want)
		}
	}
	t.Logf("%s%s", out, stderr)
}

func TestAllDevices(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "devices")
	s := containerSpec("sh", "-c", "ls /dev | tr '\\n' ' '; head -c 1 /dev/sda | wc -c")
	var names *api.Stdio
	c.stdin, c.stdout, c.stderr, names = m.streams(t)
	_, err := m.agent.CreateContainer(contextFor(t, 60*time.Second), &api.CreateContainerRequest{
		Id: c.id, Spec: marshal(t, s), Rootfs: c.rootfs, Stdio: names, PrivilegedDevices: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	c.start(t)
	out := read(t, c.stdout)
	f.exit(t, "devices", "")
	if !strings.Contains(out, " sda ") || !strings.Contains(out, " kmsg ") || strings.Contains(out, "vport") || !strings.HasSuffix(out, " 1\n") {
		t.Errorf("%q, %q", out, read(t, c.stderr))
	}
}

// A workload makes the kernel load modules: from the disk, with what they depend on.
func TestModulesOnDemand(t *testing.T) {
	m := sharedMachine(t)
	s := containerSpec("sh", "-c", `
		ip link add br0 type bridge && ip link show br0 | grep -o 'br0:' && ip link del br0
		mkdir /x; mount -t fuse -o fd=0,rootmode=40000,user_id=0,group_id=0 fuse /x 2>&1 | grep -o 'Invalid'
		mount -t no-such-fs none /x 2>&1 | grep -o 'No such device'`)
	s.Process.Capabilities.Bounding = append(s.Process.Capabilities.Bounding, "CAP_NET_ADMIN", "CAP_SYS_ADMIN")
	s.Process.Capabilities.Effective, s.Process.Capabilities.Permitted = s.Process.Capabilities.Bounding, s.Process.Capabilities.Bounding
	watch := m.stopwatch(t)
	out, stderr, _ := m.output(t, "modules", s)
	watch.log("with modules")
	if out != "br0:\nInvalid\nNo such device\n" {
		t.Errorf("%q, %q; console:\n%s", out, stderr, m.console)
	}
}

func TestOOM(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "oom")
	s := containerSpec("sh", "-c", "x=xxxxxxxxxxxxxxxx; while :; do x=$x$x; done")
	limit := int64(8 << 20)
	s.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &limit, Swap: &limit}
	c.run(t, s)
	if e := f.next(t, "oom"); e.GetOom() == nil {
		t.Fatalf("got %v, want a kill for want of memory first", e)
	}
	if status := f.exit(t, "oom", ""); status != 137 {
		t.Errorf("status %d", status)
	}
}

func TestStats(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "stats")
	c.run(t, containerSpec("sh", "-c", "echo up; cat"))
	if _, err := c.stdout.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"stats", ""} { // "" for all containers
		watch := m.stopwatch(t)
		r, err := m.agent.Stats(contextFor(t, 10*time.Second), &api.ContainerRequest{Id: id})
		watch.log("stats")
		if err != nil {
			t.Fatal(err)
		}
		var got stats.Metrics
		if err := proto.Unmarshal(r.Metrics, &got); err != nil {
			t.Fatal(err)
		}
		if got.Pids.GetCurrent() < 1 || got.Memory.GetUsage() == 0 || got.CPU.GetUsageUsec() == 0 {
			t.Errorf("of %q: %v", id, &got)
		}
	}
	if _, err := m.agent.SignalProcess(contextFor(t, 10*time.Second), &api.SignalProcessRequest{Id: "stats", Signal: 9, All: true}); err != nil {
		t.Fatal(err)
	}
	f.exit(t, "stats", "")
}
