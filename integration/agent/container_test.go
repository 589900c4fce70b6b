package agent

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/guest-agent/api/mux"
)

// applets are the busybox commands that the tests' image has.
var applets = strings.Fields("sh cat echo ls true sleep head tail wc id hostname uname stty ps kill mount umount touch mkdir " +
	"sha256sum dd grep env chroot test stat df seq date ulimit cut sync tr nice mknod ifconfig ip free pwd find readlink")

// image makes a small ext4 image with busybox and returns its path.
func (m *machine) image(t *testing.T, size string) string {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("busybox is not installed (package busybox-static)")
	}
	root := t.TempDir()
	for _, d := range []string{"bin", "proc", "sys", "dev", "tmp", "etc", "root"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "bin/busybox"), b, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, a := range applets {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", a)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "etc/passwd"), []byte("root:x:0:0::/root:/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(t.TempDir(), "image")
	if out, err := exec.Command("mkfs.ext4", "-q", "-d", root, image, size).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	return image
}

// containerSpec is a container's specification, with what containerd's default has that matters here.
func containerSpec(args ...string) *specs.Spec {
	caps := []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_NET_RAW", "CAP_SYS_CHROOT", "CAP_MKNOD"}
	mount := func(dst, fstype string, opts ...string) specs.Mount {
		return specs.Mount{Destination: dst, Type: fstype, Source: fstype, Options: opts}
	}
	return &specs.Spec{
		Version: "1.2.1",
		Process: &specs.Process{
			Args: args, Cwd: "/", Env: []string{"PATH=/bin"}, NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
			Rlimits:      []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 1024, Soft: 512}},
		},
		Root:     &specs.Root{Path: "rootfs"},
		Hostname: "box",
		Mounts: []specs.Mount{
			mount("/proc", "proc", "nosuid", "noexec", "nodev"),
			mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
			mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
			mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", "size=65536k"),
			mount("/dev/mqueue", "mqueue", "nosuid", "noexec", "nodev"),
			mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
			mount("/sys/fs/cgroup", "cgroup", "ro", "nosuid", "noexec", "nodev"),
		},
		Linux: &specs.Linux{
			Namespaces:    []specs.LinuxNamespace{{Type: "pid"}, {Type: "mount"}, {Type: "ipc"}, {Type: "uts"}, {Type: "network"}, {Type: "cgroup"}},
			Resources:     &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Access: "rwm"}}},
			MaskedPaths:   []string{"/proc/kcore", "/proc/keys", "/sys/firmware"},
			ReadonlyPaths: []string{"/proc/sys", "/proc/sysrq-trigger"},
		},
	}
}

// container is a container in a machine.
type container struct {
	m      *machine
	id     string
	disks  []*api.Disk
	rootfs *api.Rootfs
	stdin  *mux.Stream
	stdout *mux.Stream
	stderr *mux.Stream
	keep   bool // with its machine

	files      []*api.File
	shares     []*api.Share
	namespaces []*api.Namespace
}

// newContainer plugs a disk in for a container that isn't created yet.
func (m *machine) newContainer(t *testing.T, id string) *container {
	t.Helper()
	c := &container{m: m, id: id}
	c.addDisk(t, "root-"+id, m.image(t, "16M"))
	c.rootfs = &api.Rootfs{Disks: c.disks}
	return c
}

func (c *container) addDisk(t *testing.T, serial, image string) {
	t.Helper()
	c.m.plug(t, serial, image)
	c.disks = append(c.disks, &api.Disk{Serial: serial, Fstype: "ext4", Options: []string{"noatime"}})
	t.Cleanup(func() {
		if !c.keep {
			c.discard(t)
		}
	})
}

// discard deletes the container, while the machine goes on, and unplugs its disks. Idempotent.
func (c *container) discard(t *testing.T) {
	t.Helper()
	if _, err := c.m.agent.DeleteContainer(contextFor(t, 30*time.Second), &api.ContainerRequest{Id: c.id}); err != nil {
		t.Errorf("delete: %v", err)
	}
	for _, d := range c.disks {
		c.m.unplug(t, d.Serial)
	}
	c.disks = nil
}

// streams opens new streams for a process.
func (m *machine) streams(t *testing.T) (in, out, err *mux.Stream, names *api.Stdio) {
	t.Helper()
	names = &api.Stdio{}
	in, names.Stdin = m.open(t)
	out, names.Stdout = m.open(t)
	err, names.Stderr = m.open(t)
	return in, out, err, names
}

func (c *container) create(t *testing.T, s *specs.Spec) error {
	t.Helper()
	var names *api.Stdio
	c.stdin, c.stdout, c.stderr, names = c.m.streams(t)
	return c.createWith(t, s, names)
}

func (c *container) createWith(t *testing.T, s *specs.Spec, names *api.Stdio) error {
	t.Helper()
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	watch := c.m.stopwatch(t)
	r, err := c.m.agent.CreateContainer(contextFor(t, 60*time.Second), &api.CreateContainerRequest{
		Id: c.id, Spec: b, Rootfs: c.rootfs, Stdio: names, Files: c.files, Shares: c.shares, Namespaces: c.namespaces,
	})
	watch.log("create")
	if err == nil && r.Pid == 0 {
		t.Error("created a container with pid 0")
	}
	return err
}

func (c *container) start(t *testing.T) {
	t.Helper()
	watch := c.m.stopwatch(t)
	if _, err := c.m.agent.StartContainer(contextFor(t, 60*time.Second), &api.ContainerRequest{Id: c.id}); err != nil {
		t.Fatal(err)
	}
	watch.log("start")
}

// run creates and starts it.
func (c *container) run(t *testing.T, s *specs.Spec) {
	t.Helper()
	if err := c.create(t, s); err != nil {
		t.Fatal(err)
	}
	c.start(t)
}

// read reads a stream to its end.
func read(t *testing.T, st *mux.Stream) string {
	t.Helper()
	b, err := io.ReadAll(st)
	if err != nil {
		t.Fatalf("after %d bytes: %v", len(b), err)
	}
	return string(b)
}

// follower reads a machine's events, from the first that nobody has read.
type follower struct {
	m      *machine
	stream api.Agent_EventsClient
	seen   []*api.Event
}

func (m *machine) events(t *testing.T) *follower {
	t.Helper()
	stream, err := m.agent.Events(contextFor(t, 300*time.Second), &api.EventsRequest{After: m.read})
	if err != nil {
		t.Fatal(err)
	}
	return &follower{m: m, stream: stream}
}

// next returns the next event of one of these containers.
func (f *follower) next(t *testing.T, ids ...string) *api.Event {
	t.Helper()
	for {
		e, err := f.stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		f.seen = append(f.seen, e)
		f.m.read = max(f.m.read, e.Sequence)
		for _, id := range ids {
			if e.GetExit().GetId() == id || e.GetOom().GetId() == id {
				return e
			}
		}
	}
}

// exit returns the next event, which must be the exit of that process.
func (f *follower) exit(t *testing.T, id, exec string) uint32 {
	t.Helper()
	e := f.next(t, id)
	if e.GetExit() == nil || e.GetExit().ExecId != exec {
		t.Fatalf("got %v, want the exit of %q", e, exec)
	}
	return e.GetExit().Status
}

func (c *container) exec(t *testing.T, id string, p *specs.Process) (in, out, err *mux.Stream, failed error) {
	t.Helper()
	in, out, err, names := c.m.streams(t)
	return in, out, err, c.execWith(t, id, p, names)
}

func (c *container) execWith(t *testing.T, id string, p *specs.Process, names *api.Stdio) error {
	t.Helper()
	b, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	watch := c.m.stopwatch(t)
	_, err = c.m.agent.ExecProcess(contextFor(t, 60*time.Second), &api.ExecProcessRequest{
		Id: c.id, ExecId: id, Process: b, Stdio: names, Columns: 80, Rows: 24,
	})
	watch.log("exec")
	return err
}

func process(args ...string) *specs.Process {
	return &specs.Process{Args: args, Cwd: "/", Env: []string{"PATH=/bin"}}
}

func TestRun(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "run")
	c.run(t, containerSpec("sh", "-c", "uname -r; hostname; id -u; pwd; echo problem >&2; exit 7"))
	if got := read(t, c.stdout); got != m.configure(t).Kernel+"\nbox\n0\n/\n" {
		t.Errorf("standard output %q", got)
	}
	if got := read(t, c.stderr); got != "problem\n" {
		t.Errorf("standard error %q", got)
	}
	if status := f.exit(t, "run", ""); status != 7 {
		t.Errorf("status %d", status)
	}
}

func TestStdinAndBulk(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "bulk")
	c.run(t, containerSpec("cat"))
	want := bytes.Repeat([]byte("0123456789abcdef"), 20<<20/16)
	watch := m.stopwatch(t)
	go func() {
		_, _ = c.stdin.Write(want)
		_ = c.stdin.CloseWrite()
	}()
	if got := read(t, c.stdout); got != string(want) {
		t.Errorf("got %d bytes of %d", len(got), len(want))
	}
	watch.log("20 MiB there and back")
	if status := f.exit(t, "bulk", ""); status != 0 {
		t.Errorf("status %d", status)
	}
}

func TestExec(t *testing.T) {
	m := sharedMachine(t)
	f := m.events(t)
	c := m.newContainer(t, "exec")
	c.run(t, containerSpec("sleep", "1000"))
	in, out, errs, err := c.exec(t, "e1", process("sh", "-c", "cat; echo err >&2; cat /proc/self/oom_score_adj /proc/self/personality; exit 3"))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = in.Write([]byte("input\n"))
	_ = in.CloseWrite()
	if got := read(t, out); got != "input\n0\n00000000\n" {
		t.Errorf("standard output %q", got)
	}
	if got := read(t, errs); got != "err\n" {
		t.Errorf("standard error %q", got)
	}
	if status := f.exit(t, "exec", "e1"); status != 3 {
		t.Errorf("status %d", status)
	}
	for i := range 5 {
		_, out, _, err := c.exec(t, "fast", process("echo", "x"))
		if err != nil {
			t.Fatal(err)
		}
		if got := read(t, out); got != "x\n" {
			t.Errorf("%d: %q", i, got)
		}
		if status := f.exit(t, "exec", "fast"); status != 0 {
			t.Errorf("status %d", status)
		}
	}
	for _, args := range [][]string{{"no-such-command"}, {"/etc/passwd"}} {
		_, out, _, err := c.exec(t, "bad", process(args...))
		t.Logf("%v: %v", args, err)
		if err == nil {
			t.Errorf("%v was started", args)
		}
		if got := read(t, out); got != "" {
			t.Errorf("%v: output %q", args, got)
		}
	}
	var wg sync.WaitGroup
	for _, id := range []string{"a", "b", "c"} {
		if _, _, _, err := c.exec(t, id, process("sleep", "1000")); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
	pids, err := m.agent.ListPids(contextFor(t, 10*time.Second), &api.ContainerRequest{Id: "exec"})
	if err != nil || len(pids.Pids) != 4 {
		t.Errorf("%v, %v", pids, err)
	}
	if _, err := m.agent.SignalProcess(contextFor(t, 10*time.Second), &api.SignalProcessRequest{Id: "exec", ExecId: "a", Signal: 15}); err != nil {
		t.Error(err)
	}
	if status := f.exit(t, "exec", "a"); status != 128+15 {
		t.Errorf("status %d", status)
	}
	if _, err := m.agent.SignalProcess(contextFor(t, 10*time.Second), &api.SignalProcessRequest{Id: "exec", Signal: 9}); err != nil {
		t.Error(err)
	}
	for range 2 {
		if e := f.next(t, "exec").GetExit(); e.GetStatus() != 137 || e.GetExecId() == "" {
			t.Errorf("got %v, want an exec killed", e)
		}
	}
	if status := f.exit(t, "exec", ""); status != 137 {
		t.Errorf("status %d", status)
	}
	t.Log(m.console.String())
}
