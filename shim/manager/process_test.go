package manager_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	eventsapi "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/internal/fake"
	"github.com/cubesandbox/cube/shim/manager"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/server"
	"github.com/cubesandbox/cube/vmm"
)

// shimEnv makes this test binary a shim whose machines live in its own process, so that the tests can start it the way
// containerd does.
const shimEnv = "CUBE_TEST_SHIM"

func TestMain(m *testing.M) {
	if os.Getenv(shimEnv) == "" {
		os.Exit(m.Run())
	}
	launcher := &fake.Launcher{}
	if os.Getenv(killEnv) != "" {
		launcher.Before = func(context.Context) { unix.Kill(os.Getpid(), unix.SIGKILL) }
	}
	server.Register(server.Machines{
		Launcher: func(cfg *config.Config, _ *slog.Logger) vmm.Launcher {
			launcher.Snapshots = cfg.SnapshotDir()
			return launcher
		},
		Cleanup: cleanup,
	})
	shim.RunShim(context.Background(), &manager.Manager{Runtime: "io.cube.v2", Cleanup: cleanup, Sweep: sweep},
		func(c *shim.Config) { c.NoReaper, c.NoSubreaper = true, true })
	os.Exit(0)
}

func cleanup(_ *config.Config, dir string) error { return os.RemoveAll(dir) }

// sweep removes what the tests call orphans.
func sweep(cfg *config.Config) error { return os.RemoveAll(filepath.Join(cfg.VMDir(), "orphan")) }

// daemon is what a shim sees of containerd.
type daemon struct {
	*testing.T
	dir, id, bundle, sockets string
	env                      []string
	annotations              map[string]string
	options                  proto.Message // the runtime's

	mu     sync.Mutex
	topics []string
	logged bytes.Buffer
}

const id = "box"

func newDaemon(t *testing.T) *daemon {
	t.Helper()
	dir, err := os.MkdirTemp("", "shim")
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{T: t, dir: dir, id: id, bundle: filepath.Join(dir, "ns", id), sockets: filepath.Join(dir, "s")}
	t.Cleanup(func() {
		d.cleanUp()
		os.RemoveAll(dir)
	})
	d.makeBundle()
	cfg := filepath.Join(dir, "config.toml")
	d.must(os.WriteFile(cfg, fmt.Appendf(nil, "state_dir = %q\nrun_dir = %q\n", dir+"/state", dir+"/run"), 0o600))
	d.must(os.WriteFile(filepath.Join(dir, "root.img"), make([]byte, 1<<20), 0o600))
	d.env = append(os.Environ(), shimEnv+"=1", config.FileEnv+"="+cfg, "TTRPC_ADDRESS="+dir+"/events", "GORACE=atexit_sleep_ms=0", "CUBE_TIMEOUT_SCALE=0.2")
	d.serveEvents(dir + "/events")
	d.spec("sleep")
	return d
}

// makeBundle makes the bundle, and reads the shim's log.
func (d *daemon) makeBundle() {
	d.must(os.MkdirAll(filepath.Join(d.bundle, "rootfs"), 0o700))
	d.must(unix.Mkfifo(filepath.Join(d.bundle, "log"), 0o700))
	logs, err := os.OpenFile(filepath.Join(d.bundle, "log"), os.O_RDWR, 0)
	d.must(err)
	d.Cleanup(func() { logs.Close() })
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := logs.Read(buf)
			if err != nil {
				return
			}
			d.mu.Lock()
			d.logged.Write(buf[:n])
			d.mu.Unlock()
		}
	}()
	d.Cleanup(func() {
		if d.Failed() {
			d.mu.Lock()
			d.Logf("the shim's log:\n%s", d.logged.String())
			d.mu.Unlock()
		}
	})
}

// cleanUp ends what a test has left, whatever happened in it.
func (d *daemon) cleanUp() {
	if _, err := os.Stat(d.bundle); err == nil {
		d.delete()
	}
}

func (d *daemon) must(err error) {
	d.Helper()
	if err != nil {
		d.Fatal(err)
	}
}

func (d *daemon) spec(args ...string) {
	b, err := json.Marshal(&specs.Spec{
		Version:     specs.Version,
		Annotations: d.annotations,
		Process:     &specs.Process{Args: args, Cwd: "/"},
		Root:        &specs.Root{Path: "rootfs"},
		Linux:       &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: "pid"}, {Type: "network"}, {Type: "ipc"}, {Type: "uts"}, {Type: "mount"}}},
	})
	d.must(err)
	d.must(os.WriteFile(filepath.Join(d.bundle, "config.json"), b, 0o600))
}

func (d *daemon) serveEvents(path string) {
	server, err := ttrpc.NewServer()
	d.must(err)
	eventsapi.RegisterTTRPCEventsService(server, d)
	l, err := net.Listen("unix", path)
	d.must(err)
	go server.Serve(context.Background(), l) // ends with the test
	d.Cleanup(func() { server.Close() })
}

// Forward implements containerd's events service.
func (d *daemon) Forward(_ context.Context, r *eventsapi.ForwardRequest) (*emptypb.Empty, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.topics = append(d.topics, r.Envelope.Namespace+r.Envelope.Topic)
	return &emptypb.Empty{}, nil
}

// command is one call of the binary.
func (d *daemon) command(action string) *exec.Cmd {
	self, err := os.Executable()
	d.must(err)
	cmd := exec.Command(self, "-namespace", "ns", "-address", d.dir+"/containerd.sock", "-publish-binary", "/none", "-id", d.id, action)
	if action == "delete" {
		cmd.Args = append(cmd.Args[:len(cmd.Args)-1], "-bundle", d.bundle, action)
	}
	cmd.Dir, cmd.Env = d.bundle, d.env
	return cmd
}

// start is containerd's: stdout and stderr together must be one message.
func (d *daemon) start() (*bootapi.BootstrapResult, error) {
	d.Helper()
	params := &bootapi.BootstrapParams{
		InstanceID: d.id, Namespace: "ns", ContainerdGrpcAddress: d.dir + "/containerd.sock", ContainerdTtrpcAddress: d.dir + "/events",
		SocketDir: &d.sockets, LogLevel: bootapi.LogLevel_LOG_LEVEL_DEBUG,
	}
	if d.options != nil {
		d.must(params.AddExtension(d.options))
	}
	b, err := proto.Marshal(params)
	d.must(err)
	cmd := d.command("start")
	cmd.Stdin = bytes.NewReader(b)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	r := &bootapi.BootstrapResult{}
	d.must(proto.Unmarshal(out, r))
	return r, nil
}

func (d *daemon) delete() (*taskapi.DeleteResponse, string) {
	d.Helper()
	cmd := d.command("delete")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		d.Errorf("delete: %v: %s", err, errs.String())
	}
	r := &taskapi.DeleteResponse{}
	d.must(proto.Unmarshal(out.Bytes(), r))
	return r, errs.String()
}

func (d *daemon) connect(address string) taskapi.TTRPCTaskService {
	d.Helper()
	return taskapi.NewTTRPCTaskClient(d.dial(address))
}

func (d *daemon) dial(address string) *ttrpc.Client {
	d.Helper()
	conn, err := net.Dial("unix", strings.TrimPrefix(address, "unix://"))
	d.must(err)
	client := ttrpc.NewClient(conn)
	d.Cleanup(func() { client.Close() })
	return client
}

func (d *daemon) createRequest() *taskapi.CreateTaskRequest {
	return &taskapi.CreateTaskRequest{ID: d.id, Bundle: d.bundle,
		Rootfs: []*types.Mount{{Type: "ext4", Source: d.dir + "/root.img", Options: []string{"rw", "loop"}}}}
}

func (d *daemon) create(c taskapi.TTRPCTaskService) {
	d.Helper()
	_, err := c.Create(d.Context(), d.createRequest())
	d.must(err)
	_, err = c.Start(d.Context(), &taskapi.StartRequest{ID: d.id})
	d.must(err)
}

// pod is the directory of the container's pod.
func (d *daemon) pod() record.Pod {
	d.Helper()
	pod, err := record.Bundle(d.bundle).Pod()
	d.must(err)
	return pod
}

func (d *daemon) shimPID() int {
	d.Helper()
	b, err := os.ReadFile(filepath.Join(string(d.pod()), "shim.pid"))
	d.must(err)
	pid, err := strconv.Atoi(string(b))
	d.must(err)
	return pid
}

// ended waits until a process that isn't our child is gone.
func (d *daemon) ended(pid int) {
	d.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err == unix.ESRCH {
		return
	}
	d.must(err)
	defer unix.Close(fd)
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10000)
	if err != nil || n != 1 {
		d.Fatalf("process %d lives: %v", pid, err)
	}
}

// nothingLeft checks that of the shim there are only files in the bundle.
func (d *daemon) nothingLeft() {
	d.Helper()
	for _, dir := range []string{d.sockets, d.dir + "/run/vm", d.dir + "/run/pods"} {
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			d.Errorf("left in %s: %v", dir, left)
		}
	}
}

func TestWholeLife(t *testing.T) {
	d := newDaemon(t)
	r, err := d.start()
	d.must(err)
	if r.Version != 3 || r.Protocol != "ttrpc" || !strings.HasPrefix(r.Address, "unix://"+d.sockets) {
		t.Fatalf("result %v", r)
	}
	var caps types.MountCapabilities
	if found, err := r.FindExtension(&caps); err != nil || !found || len(caps.Types) == 0 {
		t.Errorf("mount capabilities: %v, %v", found, err)
	}
	pid := d.shimPID()
	again, err := d.start()
	d.must(err)
	if again.Address != r.Address || d.shimPID() != pid {
		t.Errorf("a second start: %v", again)
	}
	c := d.connect(r.Address)
	d.create(c)
	conn, err := c.Connect(t.Context(), &taskapi.ConnectRequest{ID: id})
	d.must(err)
	if int(conn.ShimPid) != pid || conn.TaskPid == 0 {
		t.Errorf("connect: %v", conn)
	}
	_, err = c.Kill(t.Context(), &taskapi.KillRequest{ID: id, Signal: 15})
	d.must(err)
	w, err := c.Wait(t.Context(), &taskapi.WaitRequest{ID: id})
	d.must(err)
	if w.ExitStatus != 143 {
		t.Errorf("wait: %v", w)
	}
	_, err = c.Delete(t.Context(), &taskapi.DeleteRequest{ID: id})
	d.must(err)
	began := time.Now()
	// containerd, too, takes a connection that ends with the process for an answer.
	if _, err = c.Shutdown(t.Context(), &taskapi.ShutdownRequest{ID: id}); !errors.Is(err, ttrpc.ErrClosed) {
		d.must(err)
	}
	del, warnings := d.delete()
	if del.ExitStatus != 143 || del.Pid == 0 || warnings != "" {
		t.Errorf("delete: %v, %q", del, warnings)
	}
	t.Logf("shutdown and delete took %s", time.Since(began))
	d.ended(pid)
	d.nothingLeft()
	d.mu.Lock()
	defer d.mu.Unlock()
	if got := strings.Join(d.topics, " "); got != "ns/tasks/create ns/tasks/start ns/tasks/exit ns/tasks/delete" {
		t.Errorf("events %s", got)
	}
}

// TestKilledShim: delete ends and undoes by the record, says so twice, and two at a time are fine.
func TestKilledShim(t *testing.T) {
	d := newDaemon(t)
	r, err := d.start()
	d.must(err)
	d.create(d.connect(r.Address))
	pid := d.shimPID()
	d.must(os.Mkdir(d.dir+"/run/vm/orphan", 0o700))
	// As of a machine that was made from a snapshot.
	state, err := d.pod().State()
	d.must(err)
	state.DiskDir = d.dir + "/disks"
	d.must(errors.Join(os.Mkdir(state.DiskDir, 0o700), d.pod().SaveState(state)))
	d.must(unix.Kill(pid, unix.SIGKILL))
	d.ended(pid)
	began := time.Now()
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if del, warnings := d.delete(); del.ExitStatus != 137 || del.Pid == 0 || warnings != "" {
				t.Errorf("delete: %v, %q", del, warnings)
			}
		})
	}
	wg.Wait()
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("took %s", took)
	}
	first, _ := d.delete()
	second, _ := d.delete()
	if !proto.Equal(first, second) {
		t.Errorf("%v and %v", first, second)
	}
	d.nothingLeft()
	if _, err := os.Stat(state.DiskDir); err == nil {
		t.Error("the machine's disks are left")
	}
}

// TestKilledAfterExit: what is known of the exit is what delete tells.
func TestKilledAfterExit(t *testing.T) {
	d := newDaemon(t)
	d.spec("exit", "42")
	r, err := d.start()
	d.must(err)
	c := d.connect(r.Address)
	d.create(c)
	_, err = c.Wait(t.Context(), &taskapi.WaitRequest{ID: id})
	d.must(err)
	d.must(unix.Kill(d.shimPID(), unix.SIGKILL))
	if del, _ := d.delete(); del.ExitStatus != 42 {
		t.Errorf("delete: %v", del)
	}
	d.nothingLeft()
}

// TestDeleteOfALivingShim: containerd has lost the connection, so the shim has to go.
func TestDeleteOfALivingShim(t *testing.T) {
	d := newDaemon(t)
	r, err := d.start()
	d.must(err)
	d.create(d.connect(r.Address))
	pid := d.shimPID()
	if del, warnings := d.delete(); del.ExitStatus != 137 || warnings != "" {
		t.Errorf("delete: %v, %q", del, warnings)
	}
	d.ended(pid)
	d.nothingLeft()
}

// TestStoppedShim: one that doesn't react to anything is killed all the same.
func TestStoppedShim(t *testing.T) {
	d := newDaemon(t)
	r, err := d.start()
	d.must(err)
	d.create(d.connect(r.Address))
	pid := d.shimPID()
	d.must(unix.Kill(pid, unix.SIGSTOP))
	d.delete()
	d.ended(pid)
	d.nothingLeft()
}

// TestTerminatedShim ends its machine in order.
func TestTerminatedShim(t *testing.T) {
	d := newDaemon(t)
	r, err := d.start()
	d.must(err)
	d.create(d.connect(r.Address))
	pid := d.shimPID()
	d.must(unix.Kill(pid, unix.SIGTERM))
	d.ended(pid)
	d.mu.Lock()
	got := strings.Join(d.topics, " ")
	d.mu.Unlock()
	if !strings.Contains(got, "ns/tasks/exit") {
		t.Errorf("events %s", got)
	}
	d.delete()
	d.nothingLeft()
}

func TestDeleteOfNothing(t *testing.T) {
	d := newDaemon(t)
	if del, warnings := d.delete(); del.ExitStatus != 137 || warnings != "" {
		t.Errorf("delete: %v, %q", del, warnings)
	}
}

// TestStartWithoutSpec: sandboxes have no config.json.
func TestStartWithoutSpec(t *testing.T) {
	d := newDaemon(t)
	d.must(os.Remove(filepath.Join(d.bundle, "config.json")))
	_, err := d.start()
	d.must(err)
}

func TestFailedStartLeavesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		breakIt func(*daemon)
		says    string
	}{
		"configuration":         {func(d *daemon) { d.must(os.WriteFile(d.dir+"/config.toml", []byte("nonsense = 1"), 0o600)) }, "nonsense"},
		"socket directory":      {func(d *daemon) { d.must(os.WriteFile(d.sockets, nil, 0o600)) }, "socket"},
		"long socket directory": {func(d *daemon) { d.sockets += strings.Repeat("x", 100) }, "socket"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDaemon(t)
			c.breakIt(d)
			_, err := d.start()
			if err == nil || !strings.Contains(err.Error(), c.says) || strings.Count(strings.TrimSpace(err.Error()), "\n") > 0 {
				t.Errorf("error %v", err)
			}
			if pods, _ := os.ReadDir(d.dir + "/run/pods"); len(pods) > 0 {
				t.Errorf("left: %v", pods)
			}
			if name == "configuration" {
				d.must(os.WriteFile(d.dir+"/config.toml", nil, 0o600))
			}
		})
	}
}

func TestInfo(t *testing.T) {
	d := newDaemon(t)
	cmd := d.command("")
	cmd.Args = []string{cmd.Path, "-info"}
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var info types.RuntimeInfo
	d.must(proto.Unmarshal(out, &info))
	var f features.Features
	if u := info.Features.TypeUrl; u != "types.containerd.io/opencontainers/runtime-spec/1/features/Features" {
		t.Errorf("type %s", u)
	}
	d.must(json.Unmarshal(info.Features.Value, &f))
	if info.Name != "io.cube.v2" || info.Version.GetVersion() == "" || *f.Linux.MountExtensions.IDMap.Enabled {
		t.Errorf("%v %v", &info, f)
	}
	if !*f.Linux.Cgroup.V2 || !*f.Linux.Seccomp.Enabled || !slices.Contains(f.Linux.Capabilities, "CAP_NET_ADMIN") {
		t.Errorf("features %s", info.Features.Value)
	}
}

// TestInheritance: the server's children get neither its socket nor its lock.
func TestInheritance(t *testing.T) {
	d := newDaemon(t)
	hook := d.dir + "/fds"
	b, err := os.ReadFile(filepath.Join(d.bundle, "config.json"))
	d.must(err)
	var s specs.Spec
	d.must(json.Unmarshal(b, &s))
	s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c", "ls -l /proc/$$/fd > " + hook}, Env: []string{"PATH=/bin:/usr/bin"}}}}
	b, err = json.Marshal(s)
	d.must(err)
	d.must(os.WriteFile(filepath.Join(d.bundle, "config.json"), b, 0o600))
	r, err := d.start()
	d.must(err)
	d.create(d.connect(r.Address))
	f, err := os.Open(hook)
	d.must(err)
	defer f.Close()
	fds, err := io.ReadAll(f)
	d.must(err)
	if strings.Contains(string(fds), "socket") || strings.Contains(string(fds), "shim.pid") {
		t.Errorf("a child inherits\n%s", fds)
	}
}
