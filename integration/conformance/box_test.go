package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
)

// dataMiB is how much data a container's disk has, and the disk of a container that rows have in common.
const (
	dataMiB   = 8
	sharedMiB = 64
)

// box is one container: its bundle, its shim and its init.
type box struct {
	*testing.T
	d          *daemon
	id, bundle string
	rootfs     []*types.Mount
	change     func(*specs.Spec)

	address string
	conn    *ttrpc.Client
	client  taskapi.TTRPCTaskService
	shim    int // pid
	machine int // pid
	init    *proc
	created bool
	crashed bool // the shim has been killed: events may be missing
	pod     *pod
	group   string // the id that the pod's machine is named after
	log     *shimLog
	execs   *int
}

// pod is what boxes in one machine have in common.
type pod struct {
	boxes   int
	machine int // pid
}

// box makes a bundle. Whatever the test does with it, its end is looked after, and checked.
func (d *daemon) box(t *testing.T) *box { return d.sized(t, dataMiB) }

func (d *daemon) sized(t *testing.T, mib int) *box {
	t.Helper()
	b := &box{T: t, d: d, id: fmt.Sprintf("%s-%d", d.stack.Name(), d.ids.Add(1)), execs: new(int), change: func(*specs.Spec) {}}
	b.pod, b.group = &pod{boxes: 1}, b.id
	b.bundle = filepath.Join(d.stack.Dir, "bundles", b.id)
	b.must(os.MkdirAll(filepath.Join(b.bundle, "rootfs"), 0o700))
	b.log = newShimLog(t, filepath.Join(b.bundle, "log"))
	disk := d.disk(t, filepath.Join(d.stack.Dir, b.id+".img"), mib)
	b.rootfs = []*types.Mount{{Type: "ext4", Source: disk, Options: []string{"rw", "loop"}}}
	t.Cleanup(func() {
		b.end()
		b.must(errors.Join(os.RemoveAll(b.bundle), os.Remove(disk)))
	})
	return b
}

// in is the box as another test sees it.
func (b *box) in(t *testing.T) *box {
	c := *b
	c.T = t
	i := *b.init
	i.b = &c
	c.init = &i
	return &c
}

func (b *box) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// boot starts the shim, as containerd does before anything else.
func (b *box) boot() {
	b.Helper()
	r, err := b.d.start(b.d.context(b.T), b.id, b.bundle)
	b.must(err)
	if r.Version != 3 || r.Protocol != "ttrpc" || !strings.HasPrefix(r.Address, "unix://"+b.d.sockets()) {
		b.Fatalf("shim start answers %v", r)
	}
	b.dial(r.Address)
}

func (b *box) dial(address string) {
	b.Helper()
	b.address = strings.TrimPrefix(address, "unix://")
	conn, err := net.Dial("unix", b.address)
	b.must(err)
	b.conn = ttrpc.NewClient(conn)
	b.client = taskapi.NewTTRPCTaskClient(b.conn)
	c, err := b.client.Connect(b.d.context(b.T), &taskapi.ConnectRequest{ID: b.id})
	b.must(err)
	b.shim = int(c.ShimPid)
}

// request is a Create of the command as init.
func (b *box) request(c command) *taskapi.CreateTaskRequest {
	b.Helper()
	s := spec(c.args(b.d))
	b.change(s)
	text, err := json.Marshal(s)
	b.must(err)
	b.must(os.WriteFile(filepath.Join(b.bundle, "config.json"), text, 0o600))
	if b.client == nil {
		b.boot()
	}
	b.init = &proc{b: b, streams: b.streams(false)}
	return &taskapi.CreateTaskRequest{ID: b.id, Bundle: b.bundle, Rootfs: b.rootfs,
		Stdin: b.init.stdin, Stdout: b.init.stdout, Stderr: b.init.stderr}
}

func (b *box) create(c command) *proc {
	b.Helper()
	r := b.request(c)
	resp, err := b.client.Create(b.d.within(b.T, bootLimit), r)
	b.init.opened()
	b.must(err)
	b.born(resp)
	return b.init
}

// born notes that there is a container.
func (b *box) born(r *taskapi.CreateTaskResponse) {
	b.Helper()
	b.created, b.machine = true, int(r.Pid)
	if b.machine == 0 {
		b.Error("created with pid 0")
	}
	switch b.pod.machine {
	case 0:
		b.pod.machine = b.machine
	case b.machine:
	default:
		b.Errorf("it is in machine %d, the pod's is %d", b.machine, b.pod.machine)
	}
}

func (b *box) run(c command) *proc {
	b.Helper()
	p := b.create(c)
	b.must(p.start())
	return p
}

func (b *box) events() []string { return b.d.events.of(b.id) }

// await waits for an event.
func (b *box) await(prefix string) {
	b.Helper()
	b.must(b.d.events.await(b.d.context(b.T), b.id, prefix))
}

func (b *box) exactly(want ...string) {
	b.Helper()
	b.await(want[len(want)-1])
	if got := b.events(); !slices.Equal(got, want) {
		b.Errorf("events %q, want %q", got, want)
	}
}

// end does what containerd does at a container's end, in whatever state it is, and checks that nothing is left.
func (b *box) end() {
	b.Helper()
	if b.Failed() {
		b.Logf("events of %s: %q; the shim's log:\n%s", b.id, b.events(), b.log.tail())
	}
	if b.client != nil {
		b.remove()
		b.shutdown()
		b.conn.Close()
	}
	b.clean() // also where there never was a shim
	if b.created && !b.crashed {
		if err := orderly(b.events()); err != nil {
			b.Errorf("%v: %q", err, b.events())
		}
	}
	if b.pod.boxes--; b.pod.boxes == 0 {
		b.nothingLeft()
	}
}

// remove kills and deletes the container.
func (b *box) remove() {
	b.Helper()
	if !b.created {
		return
	}
	ctx := b.d.context(b.T)
	b.client.Kill(ctx, &taskapi.KillRequest{ID: b.id, Signal: uint32(unix.SIGKILL)}) // it may have ended
	if _, err := b.client.Wait(ctx, &taskapi.WaitRequest{ID: b.id}); err != nil {
		return // it is deleted, or the shim is gone
	}
	if _, err := b.client.Delete(ctx, &taskapi.DeleteRequest{ID: b.id}); err != nil {
		b.Errorf("delete: %v", err)
	}
}

// shutdown is what containerd calls after every delete.
func (b *box) shutdown() {
	b.Helper()
	_, err := b.client.Shutdown(b.d.context(b.T), &taskapi.ShutdownRequest{ID: b.id})
	if err != nil && !errors.Is(err, ttrpc.ErrClosed) {
		b.Errorf("shutdown: %v", err)
	}
}

// clean is `shim delete`, which says nothing on stderr unless something can't be undone.
func (b *box) clean() *taskapi.DeleteResponse {
	b.Helper()
	began := time.Now()
	r, stderr, err := b.d.delete(b.d.context(b.T), b.id, b.bundle)
	b.must(err)
	if stderr != "" {
		b.Errorf("shim delete says %s", stderr)
	}
	if took := time.Since(began); took > b.d.cfg.Timeout(5*time.Second) {
		b.Errorf("shim delete took %s; containerd gives it 5 s", took)
	}
	return r
}

// nothingLeft checks the processes, and whatever carries the container's name.
func (b *box) nothingLeft() {
	b.Helper()
	for _, pid := range []int{b.shim, b.machine} {
		if pid != 0 && !ended(pid, b.d.cfg.Timeout(limit)) {
			b.Errorf("process %d is left", pid)
		}
	}
	var left []string
	place := filepath.Join(b.d.cfg.NetworkDir(), "attachments", namespace+"-"+b.group)
	for _, pattern := range []string{filepath.Join(b.d.cfg.VMDir(), b.group+"*"), b.address, place} {
		found, _ := filepath.Glob(pattern)
		left = append(left, found...)
	}
	left = append(left, stack.CgroupLeaks(b.group)...)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	b.must(err)
	if strings.Contains(string(mounts), b.bundle) {
		left = append(left, "a mount in the bundle")
	}
	if len(left) > 0 {
		b.Errorf("left behind: %q", left)
	}
}

// ended waits until a process is gone that isn't our child.
func ended(pid int, within time.Duration) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(within.Milliseconds()))
	for errors.Is(err, unix.EINTR) { // the runtime's own signals
		n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(within.Milliseconds()))
	}
	return err == nil && n == 1
}

// spec is a container's as containerd makes it, for the guest that has little more than busybox.
func spec(args []string) *specs.Spec {
	caps := []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETGID", "CAP_SETUID"}
	mount := func(dst, fstype string, opts ...string) specs.Mount {
		return specs.Mount{Destination: dst, Type: fstype, Source: fstype, Options: opts}
	}
	return &specs.Spec{
		Version: specs.Version,
		Process: &specs.Process{
			Args: args, Cwd: "/", Env: []string{"PATH=/bin"}, NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
		},
		Root: &specs.Root{Path: "rootfs"},
		Mounts: []specs.Mount{
			mount("/proc", "proc", "nosuid", "noexec", "nodev"),
			mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
			mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
			mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", "size=65536k"),
			mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
			mount("/sys/fs/cgroup", "cgroup", "ro", "nosuid", "noexec", "nodev"),
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{{Type: "pid"}, {Type: "mount"}, {Type: "ipc"}, {Type: "uts"}, {Type: "network"}, {Type: "cgroup"}},
			Resources:  &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Access: "rwm"}}},
		},
	}
}

// shimLog is containerd's end of the fifo that the shim logs to.
type shimLog struct {
	mu   sync.Mutex
	text []byte
}

func newShimLog(t *testing.T, path string) *shimLog {
	t.Helper()
	if err := unix.Mkfifo(path, 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	l := &shimLog{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		io.Copy(l, f) // ends with the file
	}()
	t.Cleanup(func() {
		f.Close()
		<-done
	})
	return l
}

// Write implements io.Writer.
func (l *shimLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, b...)
	return len(b), nil
}

func (l *shimLog) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text[max(0, len(l.text)-8<<10):])
}
