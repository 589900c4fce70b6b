package task

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/vmm"
)

// member is a container of a pod, with a bundle of its own.
type member struct {
	*harness
	id     string
	bundle string
	image  string
}

// member makes a bundle; change may change its spec.
func (h *harness) member(id string, change func(*specs.Spec), args ...string) *member {
	h.Helper()
	dir := filepath.Dir(h.bundle)
	m := &member{harness: h, id: id, bundle: filepath.Join(dir, "bundle-"+id), image: filepath.Join(dir, id+".img")}
	h.must(os.MkdirAll(filepath.Join(m.bundle, "rootfs"), 0o700))
	h.must(os.WriteFile(m.image, make([]byte, 1<<20), 0o600))
	s := newSpec(args...)
	s.Annotations = map[string]string{"io.containerd.runc.v2.group": cid}
	if change != nil {
		change(s)
	}
	b, err := json.Marshal(s)
	h.must(err)
	h.must(os.WriteFile(filepath.Join(m.bundle, "config.json"), b, 0o600))
	return m
}

func (m *member) tryCreate(ctx context.Context) error {
	r := m.createRequest()
	r.ID, r.Bundle, r.Rootfs[0].Source = m.id, m.bundle, m.image
	_, err := m.Service.Create(ctx, r)
	return err
}

func (m *member) create() *member {
	m.Helper()
	m.must(m.tryCreate(m.Context()))
	return m
}

func (m *member) run() *member {
	m.Helper()
	m.create()
	m.must(second(m.Service.Start(m.Context(), &taskapi.StartRequest{ID: m.id})))
	return m
}

func (m *member) exec(execID string, args ...string) {
	m.Helper()
	r := m.execRequest(execID, args...)
	r.ID = m.id
	m.must(second(m.Service.Exec(m.Context(), r)))
	m.must(second(m.Service.Start(m.Context(), &taskapi.StartRequest{ID: m.id, ExecID: execID})))
}

func (m *member) kill(sig syscall.Signal) {
	m.Helper()
	m.must(second(m.Service.Kill(m.Context(), &taskapi.KillRequest{ID: m.id, Signal: uint32(sig), All: true})))
}

func (m *member) wait(execID string) uint32 {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.Context(), 10*time.Second)
	defer cancel()
	r, err := m.Service.Wait(ctx, &taskapi.WaitRequest{ID: m.id, ExecID: execID})
	m.must(err)
	return r.ExitStatus
}

func (m *member) delete() {
	m.Helper()
	m.must(second(m.Service.Delete(m.Context(), &taskapi.DeleteRequest{ID: m.id})))
	if s, err := record.Bundle(m.bundle).State(); err != nil || !s.Undone {
		m.Errorf("record of %s after its delete: %+v, %v", m.id, s, err)
	}
}

func (m *member) status() tasktypes.Status {
	m.Helper()
	r, err := m.Service.State(m.Context(), &taskapi.StateRequest{ID: m.id})
	m.must(err)
	return r.Status
}

// podState is the pod's record.
func (h *harness) podState() record.PodState {
	h.Helper()
	s, err := h.podDir.State()
	h.must(err)
	return s
}

// TestPod: three containers have one machine, which goes with the last of them that runs, and not with the one that made it.
func TestPod(t *testing.T) {
	h := newHarness(t)
	a := h.member("a", nil, "sleep").run()
	b := h.member("b", nil, "sleep").run()
	c := h.member("c", nil, "sleep").create()
	machine := h.launcher.Last()
	if n := len(h.launcher.All()); n != 1 || machine.ID != cid {
		t.Fatalf("%d machines, the last one's id is %s", n, machine.ID)
	}
	if s := machine.Serials(); len(s) != 3 || !slices.Contains(s, vmm.RootSerial) {
		t.Fatalf("disks %q", s)
	}
	if s := h.podState(); s.Undone || s.PID == 0 || s.MachineDir != machine.Dir {
		t.Fatalf("record %+v", s)
	}
	if ids, err := h.podDir.Members(); err != nil || len(ids) != 3 {
		t.Fatalf("members %q, %v", ids, err)
	}
	b.exec("e", "sleep")

	a.kill(syscall.SIGKILL)
	if s := a.wait(""); s != 137 || b.status() != tasktypes.Status_RUNNING || c.status() != tasktypes.Status_CREATED {
		t.Fatalf("status %d; the others are %s and %s", s, b.status(), c.status())
	}
	a.delete()
	if s := machine.Serials(); len(s) != 2 || slices.Contains(s, vmm.RootSerial) {
		t.Fatalf("disks after the delete of the first %q", s)
	}
	h.must(os.RemoveAll(a.bundle))
	a = h.member("a", nil, "exit", "5").run() // of a machine that is there
	if s := a.wait(""); s != 5 {
		t.Fatalf("status %d", s)
	}
	c.kill(syscall.SIGKILL)
	c.wait("")
	if machine.Stopped() {
		t.Fatal("stopped while a container runs")
	}
	b.kill(syscall.SIGKILL)
	if s := b.wait("e"); s != 137 {
		t.Fatalf("status of the exec %d", s)
	}
	b.wait("")
	if !machine.Stopped() || !h.podState().Undone {
		t.Fatalf("stopped %v, record %+v", machine.Stopped(), h.podState())
	}
	err := h.member("d", nil, "sleep").tryCreate(t.Context())
	if !errdefs.IsFailedPrecondition(errgrpc.ToNative(err)) {
		t.Fatalf("one more: %v", err)
	}
	for _, m := range []*member{c, b, a} {
		m.delete()
	}
	// What has begun anew has a machine of its own.
	d := h.member("d", nil, "exit", "0").run()
	d.wait("")
	d.delete()
	if n := len(h.launcher.All()); n != 2 {
		t.Fatalf("%d machines", n)
	}
}

// TestBusyNeighbour: nothing that is asked of a container waits for another one that is stuck.
func TestBusyNeighbour(t *testing.T) {
	h := newHarness(t)
	a := h.member("a", nil, "sleep").run()
	release := h.launcher.Last().Guest.HoldCreate("b")
	defer release()
	b := h.member("b", nil, "sleep")
	created := make(chan error, 1)
	go func() { created <- b.tryCreate(context.Background()) }()
	for strings.Count(strings.Join(h.launcher.Last().Guest.Calls(), " "), "/CreateContainer") < 2 {
		time.Sleep(time.Millisecond)
	}
	a.isQuick()
	if err := h.tryState("b"); !errdefs.IsNotFound(errgrpc.ToNative(err)) {
		t.Errorf("state of what is being created: %v", err)
	}
	select {
	case err := <-created:
		t.Fatalf("created: %v", err)
	default:
	}
	release()
	h.must(<-created)
	b.kill(syscall.SIGKILL)
	b.wait("")
}

// TestCopyingNeighbour: nor for one that keeps the channel to the guest busy.
func TestCopyingNeighbour(t *testing.T) {
	h := newHarness(t)
	a := h.member("a", nil, "sleep").run()
	b := h.member("b", nil, "sleep").run()
	fifo := h.fifo("out")
	copied := make(chan int64, 1)
	go func() {
		f, err := os.Open(fifo)
		if err != nil {
			t.Error(err)
		}
		defer f.Close()
		n, _ := io.Copy(io.Discard, f)
		copied <- n
	}()
	r := b.execRequest("copy", "spew", strconv.Itoa(1<<30))
	r.ID, r.Stdout = "b", fifo
	h.must(second(h.Service.Exec(t.Context(), r)))
	h.must(second(h.Service.Start(t.Context(), &taskapi.StartRequest{ID: "b", ExecID: "copy"})))
	a.isQuick()
	select {
	case n := <-copied:
		t.Errorf("the copy of %d bytes was over too soon to tell", n)
	default:
	}
	b.kill(syscall.SIGKILL)
	b.wait("")
	<-copied
}

// isQuick asks everything of a container, and for its end.
func (m *member) isQuick() {
	m.Helper()
	quick := func(what string, f func()) {
		m.Helper()
		began := time.Now()
		f()
		if took := time.Since(began); took > time.Second {
			m.Errorf("%s took %s", what, took)
		}
	}
	ctx := m.Context()
	quick("state", func() { m.status() })
	quick("stats", func() { m.must(second(m.Stats(ctx, &taskapi.StatsRequest{ID: m.id}))) })
	quick("pids", func() { m.must(second(m.Pids(ctx, &taskapi.PidsRequest{ID: m.id}))) })
	quick("connect", func() { m.must(second(m.Connect(ctx, &taskapi.ConnectRequest{ID: m.id}))) })
	quick("exec", func() { m.exec("e", "sleep") })
	quick("kill", func() { m.kill(syscall.SIGKILL) })
	quick("wait", func() { m.wait("") })
	quick("delete", func() { m.delete() })
}

func (h *harness) tryState(id string) error {
	return second(h.Service.State(h.Context(), &taskapi.StateRequest{ID: id}))
}

// TestFailedMember breaks the creation of a second container at each of its steps: of it nothing is left, and the first
// one doesn't notice.
func TestFailedMember(t *testing.T) {
	for name, c := range map[string]struct {
		change   func(*specs.Spec)
		sabotage func(*harness, *member)
		says     string
	}{
		"memory": {change: func(s *specs.Spec) {
			limit := int64(1 << 40)
			s.Linux.Resources = &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &limit}}
			s.Annotations["io.cube.memory"] = "256MiB"
		}, says: "io.cube.memory"},
		"sandbox": {change: func(s *specs.Spec) { s.Annotations["io.kubernetes.cri.container-type"] = "sandbox" }, says: "exists already"},
		"hook": {change: func(s *specs.Spec) {
			s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/bin/false"}}}
		}, says: "createRuntime"},
		"image": {sabotage: func(_ *harness, m *member) { m.image += ".missing" }, says: "missing"},
		"disk": {sabotage: func(h *harness, _ *member) {
			h.launcher.Disks = func(vmm.Disk) error { return fmt.Errorf("boom") }
		}, says: "boom"},
		"guest": {sabotage: func(h *harness, m *member) {
			// The guest has one of that id, of which the shim knows nothing.
			h.must(second(h.launcher.Last().Guest.CreateContainer(h.Context(), &api.CreateContainerRequest{
				Id: m.id, Spec: []byte(`{"process":{"args":["sleep"]}}`), Rootfs: &api.Rootfs{},
			})))
		}, says: "exists"},
		"deadline": {sabotage: func(h *harness, m *member) {
			h.Cleanup(h.launcher.Last().Guest.HoldCreate(m.id))
		}, says: "deadline"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			a := h.member("a", nil, "sleep").run()
			b := h.member("b", c.change, "sleep")
			if c.sabotage != nil {
				c.sabotage(h, b)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			err := b.tryCreate(ctx)
			if err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v", err)
			}
			if s, err := record.Bundle(b.bundle).State(); err == nil && !s.Undone {
				t.Errorf("record %+v", s)
			}
			if ids, err := h.podDir.Members(); err != nil || !slices.Equal(ids, []string{"a"}) {
				t.Errorf("members %q, %v", ids, err)
			}
			if s := h.launcher.Last().Serials(); !slices.Equal(s, []string{vmm.RootSerial}) {
				t.Errorf("disks %q", s)
			}
			if a.status() != tasktypes.Status_RUNNING || h.podState().Undone {
				t.Errorf("the first one is %s; record %+v", a.status(), h.podState())
			}
			a.kill(syscall.SIGKILL)
			a.wait("")
			for _, e := range h.until("/tasks/exit a/a") {
				if strings.HasPrefix(e, "/tasks/exit b/") {
					t.Errorf("event %s", e)
				}
			}
			if !h.launcher.Last().Stopped() {
				t.Error("the machine goes on without containers")
			}
		})
	}
}

// TestFailedLeader: whoever waits for a machine that can't be made fails too; the next one tries again.
func TestFailedLeader(t *testing.T) {
	h := newHarness(t)
	launched, release := make(chan struct{}), make(chan struct{})
	h.launcher.Disks = func(vmm.Disk) error {
		close(launched)
		<-release
		return fmt.Errorf("boom")
	}
	errs := make(chan error, 3)
	go func() { errs <- h.member("a", nil, "sleep").tryCreate(context.Background()) }()
	<-launched
	for _, id := range []string{"b", "c"} {
		m := h.member(id, nil, "sleep")
		go func() { errs <- m.tryCreate(context.Background()) }()
	}
	for ids, _ := h.podDir.Members(); len(ids) < 3; ids, _ = h.podDir.Members() {
		time.Sleep(time.Millisecond)
	}
	close(release)
	for range 3 {
		if err := <-errs; err == nil || !strings.Contains(err.Error(), "boom") {
			t.Errorf("error %v", err)
		}
	}
	if ids, err := h.podDir.Members(); err != nil || len(ids) > 0 || !h.podState().Undone {
		t.Errorf("members %q, %v; record %+v", ids, err, h.podState())
	}
	h.launcher.Disks = nil
	m := h.member("d", nil, "exit", "3").run()
	if s := m.wait(""); s != 3 {
		t.Errorf("status %d", s)
	}
}

// TestSandboxContainer: the machine is there as long as the container that stands for the pod, and all end with that.
func TestSandboxContainer(t *testing.T) {
	for name, end := range map[string]struct {
		how    func(*harness, *member)
		status uint32
	}{
		"exit":  {func(_ *harness, pause *member) { pause.kill(syscall.SIGTERM) }, 137},
		"death": {func(h *harness, _ *member) { h.launcher.Last().Crash("exit status 1") }, 255},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			cri := func(kind string) func(*specs.Spec) {
				return func(s *specs.Spec) {
					s.Annotations = map[string]string{"io.kubernetes.cri.sandbox-id": cid, "io.kubernetes.cri.container-type": kind}
				}
			}
			pause := h.member(cid, cri("sandbox"), "sleep").run()
			once := h.member("once", cri("container"), "exit", "0").run()
			once.wait("")
			once.delete()
			if h.launcher.Last().Stopped() {
				t.Fatal("the machine has ended with a member")
			}
			app := h.member("app", cri("container"), "sleep").run()
			app.exec("e", "sleep")
			created := h.member("created", cri("container"), "sleep").create()
			end.how(h, pause)
			for _, m := range []*member{app, created} {
				if s := m.wait(""); s != end.status {
					t.Errorf("%s: status %d", m.id, s)
				}
			}
			pause.wait("")
			if !h.launcher.Last().Stopped() {
				t.Error("the machine goes on")
			}
			err := h.member("late", cri("container"), "sleep").tryCreate(t.Context())
			if !errdefs.IsFailedPrecondition(errgrpc.ToNative(err)) {
				t.Errorf("one more: %v", err)
			}
			list := h.until("/tasks/exit app/app")
			exec := fmt.Sprintf("/tasks/exit app/e %d", end.status)
			if slices.Index(list, exec) < 0 {
				t.Errorf("no %q before that of init in %q", exec, list)
			}
			for _, m := range []*member{app, pause, created} {
				m.delete()
			}
		})
	}
}

// TestJoin: containers of a pod have the namespaces in common that their specs name.
func TestJoin(t *testing.T) {
	h := newHarness(t)
	join := func(s *specs.Spec) {
		for i, ns := range s.Linux.Namespaces {
			if ns.Type == specs.IPCNamespace || ns.Type == specs.UTSNamespace {
				s.Linux.Namespaces[i].Path = "/proc/1234/ns/" + string(ns.Type)
			}
		}
	}
	h.member("first", join, "sleep").run()
	h.member("second", join, "sleep").run()
	guest := h.launcher.Last().Guest
	if ns := guest.Request("first").Namespaces; len(ns) > 0 {
		t.Errorf("the first one joins %v", ns)
	}
	var got []string
	for _, ns := range guest.Request("second").Namespaces {
		got = append(got, ns.Type+" of "+ns.Container)
	}
	slices.Sort(got)
	if want := []string{"ipc of first", "uts of first"}; !slices.Equal(got, want) {
		t.Errorf("the second one joins %q", got)
	}
}

// TestEventsOfAPod: exits and kills for want of memory are of the container that the guest names, and no other's.
func TestEventsOfAPod(t *testing.T) {
	h := newHarness(t)
	a := h.member("a", nil, "sleep").run()
	b := h.member("b", nil, "sleep").run()
	guest := h.launcher.Last().Guest
	a.exec("e", "sleep")
	b.exec("e", "sleep")
	guest.Emit(&api.Event{Event: &api.Event_Oom{Oom: &api.OOM{Id: "b"}}})
	guest.Emit(&api.Event{Event: &api.Event_Exit{Exit: &api.Exit{Id: "b", ExecId: "e", Status: 4}}})
	if s := b.wait("e"); s != 4 {
		t.Errorf("status %d", s)
	}
	b.kill(syscall.SIGKILL)
	b.wait("")
	list := h.until("/tasks/exit b/b")
	if !slices.Contains(list, "/tasks/oom b") || slices.Contains(list, "/tasks/oom a") {
		t.Errorf("events %q", list)
	}
	for _, e := range list {
		if strings.HasPrefix(e, "/tasks/exit a/") {
			t.Errorf("event %s", e)
		}
	}
	if st, err := h.Service.State(t.Context(), &taskapi.StateRequest{ID: "a", ExecID: "e"}); err != nil || st.Status != tasktypes.Status_RUNNING {
		t.Errorf("exec of the other one: %v, %v", st, err)
	}
}

// TestAnnouncedMember: a shim doesn't end while a container has been announced by a start and is still to be created.
func TestAnnouncedMember(t *testing.T) {
	h := newHarness(t)
	a := h.member("a", nil, "exit", "0").run()
	a.wait("")
	b := h.member("b", nil, "sleep")
	h.must(h.podDir.Join("b", record.Bundle(b.bundle)))
	a.delete()
	h.must(second(h.Service.Shutdown(t.Context(), &taskapi.ShutdownRequest{ID: "a"})))
	select {
	case <-h.shutdown.Done():
		t.Fatal("shut down")
	default:
	}
	b.run()
	b.kill(syscall.SIGKILL)
	b.wait("")
	b.delete()
	h.must(second(h.Service.Shutdown(t.Context(), &taskapi.ShutdownRequest{ID: "b"})))
	<-h.shutdown.Done()
}
