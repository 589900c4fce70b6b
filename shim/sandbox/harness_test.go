package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	sandboxapi "github.com/containerd/containerd/api/runtime/sandbox/v1"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/internal/fake"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/sandbox/cri"
	"github.com/cubesandbox/cube/shim/spec"
	"github.com/cubesandbox/cube/shim/task"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// id is the sandbox's.
const id = "web"

// harness is a shim's two services, with fake machines.
type harness struct {
	*testing.T
	*Service
	task     *task.Service
	launcher *fake.Launcher
	dir      string
	podDir   record.Pod
	shutdown *shutdownService
	network  *places
}

func newHarness(t *testing.T) *harness {
	t.Helper()
	dir, err := os.MkdirTemp("", "shim") // t.TempDir's is too long for a run_dir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	h := &harness{
		T:        t,
		launcher: &fake.Launcher{},
		dir:      dir,
		podDir:   record.Pod(filepath.Join(dir, "run", "pods", "0123456789abcdef")),
		shutdown: &shutdownService{done: make(chan struct{})},
		network:  &places{},
	}
	cfg := filepath.Join(dir, "config.toml")
	h.must(os.WriteFile(cfg, fmt.Appendf(nil, "state_dir = %q\nrun_dir = %q\n[vm]\nmax_vcpus = 4\nmax_memory = \"4GiB\"\n", dir+"/state", dir+"/run"), 0o600))
	h.must(os.WriteFile(filepath.Join(dir, "socket"), nil, 0o600))
	h.must(os.MkdirAll(string(h.podDir), 0o700))
	t.Setenv(config.FileEnv, cfg)
	t.Setenv("CUBE_TIMEOUT_SCALE", "0.2")

	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	queue := pod.NewEvents("testing", nobody{}, log)
	p := pod.New(pod.Env{
		ID:        id,
		Namespace: "testing",
		Dir:       h.podDir,
		Events:    queue,
		Log:       log,
		Launcher:  func(*config.Config) vmm.Launcher { return h.launcher },
		Cleanup:   func(_ *config.Config, dir string) error { return os.RemoveAll(dir) },
		Snapshots: func(cfg *config.Config) *snapshot.Store { return snapshot.New(cfg, log) },
		Network:   h.network,
	})
	h.Service = NewService(p, "", h.shutdown, log, dir+"/socket")
	h.task = task.NewService(p, h.shutdown, log, dir+"/socket")
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Error(err)
		}
		if err := queue.Close(ctx); err != nil {
			t.Error(err)
		}
		for _, m := range h.launcher.All() {
			if !m.Stopped() {
				t.Error("a machine was not stopped")
			}
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "run", "vm", "*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	return h
}

func (h *harness) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatal(err)
	}
}

// refused checks an error's class.
func (h *harness) refused(what string, err error, want codes.Code) {
	h.Helper()
	if got := status.Code(err); got != want {
		h.Errorf("%s: %v, want %v", what, err, want)
	}
}

func second[T any](_ T, err error) error { return err }

func (h *harness) request(c *cri.PodSandboxConfig) *sandboxapi.CreateSandboxRequest {
	h.Helper()
	r := &sandboxapi.CreateSandboxRequest{SandboxID: id, BundlePath: h.dir}
	if c != nil {
		b, err := proto.Marshal(c)
		h.must(err)
		r.Options = &anypb.Any{TypeUrl: configType, Value: b}
	}
	return r
}

func (h *harness) create(c *cri.PodSandboxConfig) {
	h.Helper()
	h.must(second(h.CreateSandbox(h.Context(), h.request(c))))
}

func (h *harness) start() *sandboxapi.StartSandboxResponse {
	h.Helper()
	r, err := h.StartSandbox(h.Context(), &sandboxapi.StartSandboxRequest{SandboxID: id})
	h.must(err)
	return r
}

func (h *harness) stopped() error {
	return second(h.StopSandbox(h.Context(), &sandboxapi.StopSandboxRequest{SandboxID: id}))
}

func (h *harness) status(verbose bool) *sandboxapi.SandboxStatusResponse {
	h.Helper()
	r, err := h.SandboxStatus(h.Context(), &sandboxapi.SandboxStatusRequest{SandboxID: id, Verbose: verbose})
	h.must(err)
	return r
}

// member makes and starts a container, as containerd does in a sandbox: without another shim.
func (h *harness) member(name string, change func(*specs.Spec), args ...string) {
	h.Helper()
	h.must(h.tryMember(name, change, args...))
	h.must(second(h.task.Start(h.Context(), &taskapi.StartRequest{ID: name})))
}

func (h *harness) tryMember(name string, change func(*specs.Spec), args ...string) error {
	h.Helper()
	bundle, image := filepath.Join(h.dir, name), filepath.Join(h.dir, name+".img")
	h.must(os.MkdirAll(filepath.Join(bundle, "rootfs"), 0o700))
	h.must(os.WriteFile(image, make([]byte, 1<<20), 0o600))
	s := &specs.Spec{
		Version: specs.Version,
		Process: &specs.Process{Args: args, Cwd: "/"},
		Root:    &specs.Root{Path: "rootfs"},
		Linux:   &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: "pid"}, {Type: "network"}, {Type: "ipc"}, {Type: "uts"}, {Type: "mount"}}},
	}
	if change != nil {
		change(s)
	}
	b, err := json.Marshal(s)
	h.must(err)
	h.must(os.WriteFile(filepath.Join(bundle, "config.json"), b, 0o600))
	_, err = h.task.Create(h.Context(), &taskapi.CreateTaskRequest{ID: name, Bundle: bundle,
		Rootfs: []*types.Mount{{Type: "ext4", Source: image, Options: []string{"rw", "loop"}}}})
	return err
}

// joins has a container name the pod's namespaces by the pid of its machine.
func joins(kinds ...specs.LinuxNamespaceType) func(*specs.Spec) {
	return func(s *specs.Spec) {
		for i, ns := range s.Linux.Namespaces {
			for _, k := range kinds {
				if ns.Type == k {
					s.Linux.Namespaces[i].Path = fmt.Sprintf("/proc/%d/ns/%s", os.Getpid(), k)
				}
			}
		}
	}
}

func (h *harness) wait(name string) uint32 {
	h.Helper()
	ctx, cancel := context.WithTimeout(h.Context(), 10*time.Second)
	defer cancel()
	r, err := h.task.Wait(ctx, &taskapi.WaitRequest{ID: name})
	h.must(err)
	return r.ExitStatus
}

func (h *harness) delete(name string) {
	h.Helper()
	h.must(second(h.task.Delete(h.Context(), &taskapi.DeleteRequest{ID: name})))
	h.must(second(h.task.Shutdown(h.Context(), &taskapi.ShutdownRequest{ID: name})))
}

// shutDown shuts the sandbox down, with a context that ends with the answer, as a server's does.
func (h *harness) shutDown(id string) error {
	ctx, cancel := context.WithCancel(h.Context())
	defer cancel()
	_, err := h.ShutdownSandbox(ctx, &sandboxapi.ShutdownSandboxRequest{SandboxID: id})
	if h.ended() {
		h.Error("the shim has ended before the answer")
	}
	return err
}

// ends checks that the shim has been told to end.
func (h *harness) ends() {
	h.Helper()
	select {
	case <-h.shutdown.done:
	case <-time.After(10 * time.Second):
		h.Error("the shim hasn't ended")
	}
}

// ended tells whether the shim has been told to end.
func (h *harness) ended() bool {
	select {
	case <-h.shutdown.done:
		return true
	default:
		return false
	}
}

// places is a network that has no place for anybody.
type places struct {
	asked    []spec.Network
	released int
}

func (p *places) Attach(_ context.Context, _ *config.Config, _ network.Pod, asked spec.Network, _ bool, _ *slog.Logger) (*pod.Attachment, error) {
	p.asked = append(p.asked, asked)
	return nil, nil
}

func (p *places) Release(context.Context, *config.Config, network.Pod) error {
	p.released++
	return nil
}

// nobody takes events.
type nobody struct{}

func (nobody) Publish(context.Context, string, events.Event) error { return nil }

// shutdownService stands for pkg/shutdown's.
type shutdownService struct {
	once sync.Once
	done chan struct{}
}

func (s *shutdownService) Shutdown()                                    { s.once.Do(func() { close(s.done) }) }
func (s *shutdownService) RegisterCallback(func(context.Context) error) {}
func (s *shutdownService) Done() <-chan struct{}                        { return s.done }
func (s *shutdownService) Err() error                                   { return nil }
