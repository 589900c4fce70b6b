package task

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/cni/network"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/pod"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/spec"
)

// teller is a container that counts lines, and the client's ends of its stdio.
type teller struct {
	*harness
	*Service
	id  string
	in  *os.File
	out *bufio.Reader
}

// teller makes the container, in the service's pod, of a checkpoint or fresh.
func (h *harness) teller(s *Service, id, checkpoint string) *teller {
	h.Helper()
	c := &teller{harness: h, Service: s, id: id}
	h.must(c.try(func(r *taskapi.CreateTaskRequest) { r.Checkpoint = checkpoint }))
	return c
}

func (c *teller) try(change func(*taskapi.CreateTaskRequest)) error {
	c.Helper()
	r := c.createRequest()
	r.ID, r.Stdin, r.Stdout = c.id, c.fifo("in"), c.fifo("out")
	out, err := os.OpenFile(r.Stdout, os.O_RDONLY|syscall.O_NONBLOCK, 0) // nobody writes yet
	c.must(err)
	c.Cleanup(func() { out.Close() })
	change(r)
	if _, err := c.Service.Create(c.Context(), r); err != nil {
		return err
	}
	c.in, err = os.OpenFile(r.Stdin, os.O_WRONLY, 0)
	c.must(err)
	c.Cleanup(func() { c.in.Close() })
	c.out = bufio.NewReader(out)
	return nil
}

func (c *teller) begin() *teller {
	c.Helper()
	_, err := c.Service.Start(c.Context(), &taskapi.StartRequest{ID: c.id})
	c.must(err)
	return c
}

// counts has it count a line, which is to be that one.
func (c *teller) counts(want string) {
	c.Helper()
	_, err := io.WriteString(c.in, "line\n")
	c.must(err)
	got := make(chan string, 1)
	go func() {
		s, err := c.out.ReadString('\n')
		if err != nil {
			s = err.Error()
		}
		got <- strings.TrimSpace(s)
	}()
	select {
	case s := <-got:
		if s != want {
			c.Errorf("%s counts %q, want %s", c.id, s, want)
		}
	case <-time.After(10 * time.Second):
		c.Fatalf("%s doesn't count to %s", c.id, want)
	}
}

func (c *teller) status() tasktypes.Status {
	c.Helper()
	r, err := c.State(c.Context(), &taskapi.StateRequest{ID: c.id})
	c.must(err)
	return r.Status
}

// end kills and deletes it.
func (c *teller) end() {
	c.Helper()
	_, err := c.Kill(c.Context(), &taskapi.KillRequest{ID: c.id, Signal: uint32(syscall.SIGKILL)})
	c.must(err)
	w, err := c.Wait(c.Context(), &taskapi.WaitRequest{ID: c.id})
	c.must(err)
	if w.ExitStatus != 137 {
		c.Errorf("%s ended with %d", c.id, w.ExitStatus)
	}
	c.must(second(c.Delete(c.Context(), &taskapi.DeleteRequest{ID: c.id})))
}

// checkpoint is what containerd asks for, which pauses a container for it.
func (c *teller) checkpoint() (dir string) {
	c.Helper()
	dir = filepath.Join(c.TempDir(), "checkpoint")
	c.must(second(c.Pause(c.Context(), &taskapi.PauseRequest{ID: c.id})))
	c.must(second(c.Checkpoint(c.Context(), &taskapi.CheckpointTaskRequest{ID: c.id, Path: dir})))
	c.must(second(c.Resume(c.Context(), &taskapi.ResumeRequest{ID: c.id})))
	return dir
}

// clone is a pod of its own for a clone.
func (h *harness) clone(id string) *Service {
	h.Helper()
	dir := record.Pod(filepath.Join(h.runDir, "pods", id))
	h.must(os.MkdirAll(string(dir), 0o700))
	return h.serve(id, dir, nowhere{})
}

// nowhere is a host without a network.
type nowhere struct{}

func (nowhere) Attach(context.Context, *config.Config, network.Pod, spec.Network, bool, *slog.Logger) (*pod.Attachment, error) {
	return nil, nil
}
func (nowhere) Release(context.Context, *config.Config, network.Pod) error { return nil }

func (h *harness) snapshots() []string {
	h.Helper()
	all, err := h.store().List()
	h.must(err)
	var ids []string
	for _, s := range all {
		if s.Damage != "" {
			h.Error(s.Damage)
		}
		ids = append(ids, s.ID)
	}
	return ids
}

// TestCheckpoint: a container goes on from its checkpoint, and so does the one that it was made of.
func TestCheckpoint(t *testing.T) {
	h := newHarness(t)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	c.counts("1")
	c.counts("2")
	dir := c.checkpoint()
	c.counts("3")
	c.end()
	h.until("/tasks/checkpointed box " + dir)
	if ids := h.snapshots(); len(ids) != 1 || !strings.HasPrefix(ids[0], cid+"-") {
		t.Fatalf("snapshots %q", ids)
	}

	c = h.teller(h.Service, cid, dir)
	if s := c.status(); s != tasktypes.Status_CREATED {
		t.Errorf("state %s before the start", s)
	}
	m := h.launcher.Last()
	if q := h.network.quiet; !slices.Equal(q, []bool{false, true}) {
		t.Errorf("nothing passes before the network is opened: %v", q)
	}
	if calls := m.Guest.Calls(); slices.ContainsFunc(calls, func(s string) bool { return strings.HasSuffix(s, "/Thaw") || strings.HasSuffix(s, "/CreateContainer") }) {
		t.Errorf("calls %q before the start", calls)
	}
	c.begin()
	if s := c.status(); s != tasktypes.Status_RUNNING {
		t.Errorf("state %s", s)
	}
	c.counts("3")
	h.exec("e", "echo", "hi", "7")
	h.start("e")
	if w := h.wait("e"); w.ExitStatus != 7 {
		t.Errorf("exec ended with %d", w.ExitStatus)
	}
	calls := m.Guest.Calls()
	identified := slices.IndexFunc(calls, func(s string) bool { return strings.HasSuffix(s, "/Configure") })
	thawn := slices.IndexFunc(calls, func(s string) bool { return strings.HasSuffix(s, "/Thaw") })
	if identified < 0 || thawn < identified {
		t.Errorf("calls %q", calls)
	}
	again := c.checkpoint() // of what is of one itself
	c.counts("4")
	c.end()
	c = h.teller(h.Service, cid, again).begin()
	c.counts("4")
	c.end()
}

// TestClones: several containers of one checkpoint, under other names, each for itself.
func TestClones(t *testing.T) {
	h := newHarness(t)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	c.counts("1")
	dir := c.checkpoint()
	one, two := h.teller(h.clone("one"), "one", dir).begin(), h.teller(h.clone("two"), "two", dir).begin()
	one.counts("2")
	one.counts("3")
	two.counts("2")
	c.counts("2")
	one.counts("4")
	if id := h.launcher.All()[1].Guest.Identity().SandboxId; id != "one" {
		t.Errorf("the first clone takes itself for %q", id)
	}
	third := two.checkpoint()
	c.end() // the clones don't need it
	one.end()
	three := h.teller(h.clone("three"), "three", third).begin()
	three.counts("3")
	two.counts("3")
	e := h.execRequest("e", "exit", "7")
	e.ID = "three"
	h.must(second(three.Exec(t.Context(), e)))
	h.must(second(three.Start(t.Context(), &taskapi.StartRequest{ID: "three", ExecID: "e"})))
	within, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if w, err := three.Wait(within, &taskapi.WaitRequest{ID: "three", ExecID: "e"}); err != nil || w.ExitStatus != 7 {
		t.Errorf("an exec in a clone: %v, %v", w, err)
	}
	h.must(second(three.Pause(t.Context(), &taskapi.PauseRequest{ID: "three"})))
	h.must(second(three.Resume(t.Context(), &taskapi.ResumeRequest{ID: "three"})))
	h.must(second(three.Stats(t.Context(), &taskapi.StatsRequest{ID: "three"})))
	three.end()
	two.end()
	h.until("/tasks/delete two 137")
}

// TestCheckpointAndExit: the container ends with its checkpoint.
func TestCheckpointAndExit(t *testing.T) {
	h := newHarness(t)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	c.counts("1")
	o, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{Exit: true})
	h.must(err)
	dir := t.TempDir()
	h.must(second(h.Checkpoint(t.Context(), &taskapi.CheckpointTaskRequest{ID: cid, Path: dir, Options: o})))
	if w := h.wait(""); w.ExitStatus != 137 {
		t.Errorf("status %d", w.ExitStatus)
	}
	h.must(second(h.delete("")))
	c = h.teller(h.Service, cid, dir).begin()
	c.counts("2")
	c.end()
}

// TestUnstarted: what is made of a checkpoint and never started ends without having run.
func TestUnstarted(t *testing.T) {
	h := newHarness(t)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	dir := c.checkpoint()
	c.end()
	h.teller(h.Service, cid, dir)
	if err := second(h.Checkpoint(t.Context(), &taskapi.CheckpointTaskRequest{ID: cid, Path: t.TempDir()})); !errdefs.IsFailedPrecondition(errgrpc.ToNative(err)) {
		t.Errorf("checkpoint before the start: %v", err)
	}
	d, err := h.delete("")
	if err != nil || d.ExitStatus != 137 {
		t.Errorf("deleted with %v, %v", d, err)
	}
	for _, call := range h.launcher.Last().Guest.Calls() {
		if strings.HasSuffix(call, "/Thaw") || strings.HasSuffix(call, "/Shutdown") {
			t.Errorf("%s was called", call)
		}
	}
}

// TestNoCheckpoint: what can't be saved is refused, and nothing is left.
func TestNoCheckpoint(t *testing.T) {
	for what, test := range map[string]struct {
		make func(h *harness) (id string)
		want string
	}{
		"of a created container": {func(h *harness) string { h.create("sleep"); return cid }, "start it first"},
		"with another in the machine": {func(h *harness) string {
			h.member(cid, nil, "sleep").run()
			h.member("other", nil, "sleep").run()
			return "other"
		}, "only the pod as a whole"},
		"with files of the host": {func(h *harness) string {
			dir := h.TempDir()
			s := newSpec("sleep")
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/host", Type: "bind", Source: dir, Options: []string{"rbind"}})
			h.writeSpec(s)
			if err := second(h.Service.Create(h.Context(), h.createRequest())); err != nil {
				h.Skip(err) // the helper isn't built
			}
			h.start("")
			return cid
		}, "of the host mounted"},
	} {
		t.Run(what, func(t *testing.T) {
			h := newHarness(t)
			id := test.make(h)
			dir := t.TempDir()
			err := second(h.Checkpoint(t.Context(), &taskapi.CheckpointTaskRequest{ID: id, Path: dir}))
			if !errdefs.IsFailedPrecondition(errgrpc.ToNative(err)) || !strings.Contains(err.Error(), test.want) {
				t.Error(err)
			}
			if left, _ := os.ReadDir(dir); len(left) > 0 || len(h.snapshots()) > 0 {
				t.Errorf("left: %v, %v", left, h.snapshots())
			}
		})
	}
}

// TestCheckpointThatCantBeWritten: no snapshot stays that nothing names.
func TestCheckpointThatCantBeWritten(t *testing.T) {
	h := newHarness(t)
	h.run("sleep")
	if err := second(h.Checkpoint(t.Context(), &taskapi.CheckpointTaskRequest{ID: cid, Path: h.image})); err == nil {
		t.Error("a file is a directory")
	}
	if ids := h.snapshots(); len(ids) > 0 {
		t.Errorf("left: %q", ids)
	}
	if h.launcher.Last().Guest.Resting() {
		t.Error("the guest is still at rest")
	}
}

// TestNoRestore: a container that can't be the one in the checkpoint isn't made, and leaves nothing.
func TestNoRestore(t *testing.T) {
	h := newHarness(t)
	h.spec("tally")
	c := h.teller(h.Service, cid, "").begin()
	dir := c.checkpoint()
	c.end()
	gone := filepath.Join(t.TempDir(), "gone")
	h.must(os.MkdirAll(gone, 0o700))
	name := filepath.Join(dir, "cube-checkpoint.json")
	b, err := os.ReadFile(name)
	h.must(err)
	write := func(dir, text string) string {
		h.must(os.MkdirAll(dir, 0o700))
		h.must(os.WriteFile(filepath.Join(dir, filepath.Base(name)), []byte(text), 0o600))
		return dir
	}
	dirs := t.TempDir()
	for what, change := range map[string]func(*taskapi.CreateTaskRequest){
		"no checkpoint":         func(r *taskapi.CreateTaskRequest) { r.Checkpoint = gone },
		"a checkpoint of later": func(r *taskapi.CreateTaskRequest) { r.Checkpoint = write(dirs+"/1", `{"format":2}`) },
		"an empty checkpoint":   func(r *taskapi.CreateTaskRequest) { r.Checkpoint = write(dirs+"/5", "") },
		"half a checkpoint":     func(r *taskapi.CreateTaskRequest) { r.Checkpoint = write(dirs+"/6", string(b[:len(b)/2])) },
		"a path for a snapshot": func(r *taskapi.CreateTaskRequest) {
			r.Checkpoint = write(dirs+"/7", strings.Replace(string(b), `"box-`, `"../box-`, 1))
		},
		"a strange checkpoint": func(r *taskapi.CreateTaskRequest) {
			r.Checkpoint = write(dirs+"/2", strings.Replace(string(b), "{", `{"x":1,`, 1))
		},
		"a snapshot that's gone": func(r *taskapi.CreateTaskRequest) {
			r.Checkpoint = write(dirs+"/3", strings.Replace(string(b), `"box-`, `"fox-`, 1))
		},
		"another container": func(r *taskapi.CreateTaskRequest) {
			r.Checkpoint = write(dirs+"/4", strings.Replace(string(b), `"box"`, `"fox"`, 1))
		},
		"a terminal": func(r *taskapi.CreateTaskRequest) { r.Checkpoint, r.Terminal = dir, true },
	} {
		before := len(h.launcher.All())
		c := &teller{harness: h, Service: h.Service, id: cid}
		if err := c.try(change); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", what, err)
		} else {
			t.Logf("%s: %v", what, err)
		}
		if len(h.launcher.All()) != before {
			t.Errorf("%s: a machine was made", what)
		}
	}
	h.teller(h.Service, cid, dir).begin().end()
}
