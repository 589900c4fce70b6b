package task

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/internal/fake"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// harness is a service with fake machines, a bundle for one container and what containerd would see.
type harness struct {
	*testing.T
	*Service
	dir      string // with all that the host has
	launcher *fake.Launcher
	recorder *recorder
	events   *pod.Events
	bundle   string
	image    string
	runDir   string
	podDir   record.Pod
	shutdown *shutdownService
	network  *places
}

// testScale makes deadlines short; see config.TimeoutScale.
const testScale = "0.2"

func newHarness(t *testing.T) *harness {
	t.Helper()
	dir, err := os.MkdirTemp("", "shim") // t.TempDir's is too long for a run_dir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	h := &harness{
		T:        t,
		dir:      dir,
		launcher: &fake.Launcher{Snapshots: filepath.Join(dir, "state", "store", "snapshots")},
		recorder: &recorder{changed: make(chan struct{})},
		bundle:   filepath.Join(dir, "bundle"),
		image:    filepath.Join(dir, "root.img"),
		runDir:   filepath.Join(dir, "run"),
		podDir:   record.Pod(filepath.Join(dir, "run", "pods", "0123456789abcdef")),
		shutdown: &shutdownService{done: make(chan struct{})},
	}
	h.network = &places{T: t, launcher: h.launcher}
	cfg := filepath.Join(dir, "config.toml")
	h.must(os.WriteFile(cfg, fmt.Appendf(nil, "state_dir = %q\nrun_dir = %q\n", filepath.Join(dir, "state"), h.runDir), 0o600))
	t.Setenv(config.FileEnv, cfg)
	t.Setenv("CUBE_TIMEOUT_SCALE", testScale)
	h.must(os.MkdirAll(filepath.Join(h.bundle, "rootfs"), 0o700))
	h.must(os.WriteFile(h.image, make([]byte, 1<<20), 0o600))
	h.must(os.MkdirAll(string(h.podDir), 0o700))

	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	h.events = pod.NewEvents("testing", h.recorder, log)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := h.events.Close(ctx); err != nil {
			t.Error(err)
		}
		for _, m := range h.launcher.All() {
			if !m.Stopped() {
				t.Error("a machine was not stopped")
			}
		}
		if h.network.held {
			t.Error("a place in the network was not given back")
		}
		if left, _ := filepath.Glob(filepath.Join(h.runDir, "vm", "*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "state", "store", "disks", "*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	h.Service = h.serve(cid, h.podDir, h.network)
	return h
}

// serve makes the service of a pod, on the harness's host.
func (h *harness) serve(id string, dir record.Pod, network pod.Network) *Service {
	log := slog.New(slog.NewTextHandler(h.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	p := pod.New(pod.Env{
		ID:        id,
		Namespace: "testing",
		Dir:       dir,
		Events:    h.events,
		Log:       log,
		Launcher:  func(*config.Config) vmm.Launcher { return h.launcher },
		Cleanup:   func(_ *config.Config, dir string) error { return os.RemoveAll(dir) },
		Snapshots: func(cfg *config.Config) *snapshot.Store { return snapshot.New(cfg, log) },
		Network:   network,
	})
	h.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			h.Error(err)
		}
	})
	return NewService(p, h.shutdown, log, "")
}

func (h *harness) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatal(err)
	}
}

// spec writes config.json for a command, as ctr would.
func (h *harness) spec(args ...string) *specs.Spec {
	s := newSpec(args...)
	h.writeSpec(s)
	return s
}

func newSpec(args ...string) *specs.Spec {
	return &specs.Spec{
		Version: specs.Version,
		Process: &specs.Process{Args: args, Cwd: "/"},
		Root:    &specs.Root{Path: "rootfs"},
		Linux:   &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: "pid"}, {Type: "network"}, {Type: "ipc"}, {Type: "uts"}, {Type: "mount"}}},
	}
}

func (h *harness) writeSpec(s *specs.Spec) {
	b, err := json.Marshal(s)
	h.must(err)
	h.must(os.WriteFile(filepath.Join(h.bundle, "config.json"), b, 0o600))
}

const cid = "box"

func (h *harness) createRequest() *taskapi.CreateTaskRequest {
	return &taskapi.CreateTaskRequest{
		ID:     cid,
		Bundle: h.bundle,
		Rootfs: []*types.Mount{{Type: "ext4", Source: h.image, Options: []string{"rw", "loop"}}},
	}
}

// create makes the container.
func (h *harness) create(args ...string) {
	h.Helper()
	h.spec(args...)
	_, err := h.Service.Create(h.Context(), h.createRequest())
	h.must(err)
}

// run makes and starts it.
func (h *harness) run(args ...string) {
	h.Helper()
	h.create(args...)
	h.start("")
}

func (h *harness) start(execID string) {
	h.Helper()
	_, err := h.Service.Start(h.Context(), &taskapi.StartRequest{ID: cid, ExecID: execID})
	h.must(err)
}

func (h *harness) exec(execID string, args ...string) {
	h.Helper()
	_, err := h.Service.Exec(h.Context(), h.execRequest(execID, args...))
	h.must(err)
}

func (h *harness) execRequest(execID string, args ...string) *taskapi.ExecProcessRequest {
	b, err := json.Marshal(&specs.Process{Args: args, Cwd: "/"})
	h.must(err)
	return &taskapi.ExecProcessRequest{ID: cid, ExecID: execID, Spec: &anypb.Any{Value: b}}
}

func (h *harness) wait(execID string) *taskapi.WaitResponse {
	h.Helper()
	ctx, cancel := context.WithTimeout(h.Context(), 10*time.Second)
	defer cancel()
	r, err := h.Service.Wait(ctx, &taskapi.WaitRequest{ID: cid, ExecID: execID})
	h.must(err)
	return r
}

func (h *harness) kill(execID string, sig syscall.Signal) error {
	_, err := h.Service.Kill(h.Context(), &taskapi.KillRequest{ID: cid, ExecID: execID, Signal: uint32(sig)})
	return err
}

func (h *harness) delete(execID string) (*taskapi.DeleteResponse, error) {
	return h.Service.Delete(h.Context(), &taskapi.DeleteRequest{ID: cid, ExecID: execID})
}

func (h *harness) state(execID string) *taskapi.StateResponse {
	h.Helper()
	r, err := h.Service.State(h.Context(), &taskapi.StateRequest{ID: cid, ExecID: execID})
	h.must(err)
	return r
}

func (h *harness) record() record.State {
	h.Helper()
	s, err := record.Bundle(h.bundle).State()
	h.must(err)
	return s
}

// fifos makes the named fifos and returns their paths.
func (h *harness) fifo(name string) string {
	path := filepath.Join(h.TempDir(), name)
	h.must(syscall.Mkfifo(path, 0o600))
	return path
}

// collect reads a fifo to its end, as a client would.
func collect(path string) <-chan string {
	c := make(chan string, 1)
	go func() {
		f, err := os.Open(path)
		if err != nil {
			c <- err.Error()
			return
		}
		defer f.Close()
		b, err := io.ReadAll(f)
		if err != nil {
			c <- err.Error()
			return
		}
		c <- string(b)
	}()
	return c
}

// recorder is containerd's side of the events.
type recorder struct {
	mu      sync.Mutex
	list    []string
	changed chan struct{}
}

func (r *recorder) Publish(ctx context.Context, topic string, e events.Event) error {
	ns, _ := namespaces.Namespace(ctx)
	if ns != "testing" {
		topic = "namespace " + ns
	}
	text := topic
	switch e := e.(type) {
	case *eventsapi.TaskExit:
		text += fmt.Sprintf(" %s/%s %d", e.ContainerID, e.ID, e.ExitStatus)
	case *eventsapi.TaskExecAdded:
		text += " " + e.ContainerID + "/" + e.ExecID
	case *eventsapi.TaskExecStarted:
		text += " " + e.ContainerID + "/" + e.ExecID
	case *eventsapi.TaskPaused:
		text += " " + e.ContainerID
	case *eventsapi.TaskResumed:
		text += " " + e.ContainerID
	case *eventsapi.TaskCheckpointed:
		text += " " + e.ContainerID + " " + e.Checkpoint
	case *eventsapi.TaskOOM:
		text += " " + e.ContainerID
	case *eventsapi.TaskDelete:
		text += fmt.Sprintf(" %s %d", e.ContainerID, e.ExitStatus)
	}
	r.mu.Lock()
	r.list = append(r.list, text)
	close(r.changed)
	r.changed = make(chan struct{})
	r.mu.Unlock()
	return nil
}

// until waits until an event that begins so has been published, and returns all so far.
func (h *harness) until(prefix string) []string {
	h.Helper()
	timer := time.After(10 * time.Second)
	for {
		h.recorder.mu.Lock()
		list, changed := append([]string(nil), h.recorder.list...), h.recorder.changed
		h.recorder.mu.Unlock()
		for _, e := range list {
			if strings.HasPrefix(e, prefix) {
				return list
			}
		}
		select {
		case <-changed:
		case <-timer:
			h.Fatalf("no event %q in %q", prefix, list)
		}
	}
}

// shutdownService stands for pkg/shutdown's.
type shutdownService struct {
	once sync.Once
	done chan struct{}
}

func (s *shutdownService) Shutdown()                                    { s.once.Do(func() { close(s.done) }) }
func (s *shutdownService) RegisterCallback(func(context.Context) error) {}
func (s *shutdownService) Done() <-chan struct{}                        { return s.done }
func (s *shutdownService) Err() error                                   { return nil }
