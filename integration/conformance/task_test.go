package conformance

import (
	"strings"
	"sync"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/task"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var taskRows = []row{
	{name: "States", test: states},
	{name: "UnknownIDs", test: unknownIDs, shared: true},
	{name: "ExecStates", test: execStates, shared: true},
	{name: "BadRequests", test: badRequests, shared: true},
	{name: "Waiters", test: waiters, shared: true},
	{name: "Connect", test: connect, shared: true},
	{name: "Pids", test: pids, shared: true},
	{name: "Stats", test: stats, shared: true},
	{name: "ResizePty", test: resizePty, shared: true},
	{name: "CloseIO", test: closeIO, shared: true},
	{name: "PauseResume", test: pauseResume, shared: true},
	{name: "Update", test: update, shared: true},
	{name: "Checkpoint", test: checkpoint, shared: true},
	{name: "ShutdownWhileRunning", test: shutdownWhileRunning, shared: true},
	{name: "KillAll", test: killAll},
	{name: "KillPaused", test: killPaused},
}

// refused checks an error's code, and that it is one line.
func (b *box) refused(what string, err error, code codes.Code) {
	b.Helper()
	if status.Code(err) != code {
		b.Errorf("%s: %v, want %v", what, err, code)
	}
	if err != nil && strings.Contains(err.Error(), "\n") {
		b.Errorf("%s: more than one line: %q", what, err)
	}
}

func second[T any](_ T, err error) error { return err }

// states goes through a container's life with what each state refuses.
func states(b *box) {
	b.init = &proc{b: b}
	b.boot()
	b.refused("start of nothing", b.init.start(), codes.NotFound)
	b.refused("state of nothing", second(b.init.state()), codes.NotFound)
	b.refused("exec in nothing", b.add("early", sleep.args(b.d), nil, false), codes.NotFound)

	p := b.create(sleep)
	b.refused("second create", second(b.client.Create(b.d.context(b.T), &taskapi.CreateTaskRequest{ID: b.id, Bundle: b.bundle, Rootfs: b.rootfs})), codes.AlreadyExists)
	b.refused("exec in a created container", b.add("early", sleep.args(b.d), nil, false), codes.FailedPrecondition)
	b.refused("pause of a created container", b.pause(), codes.FailedPrecondition)
	b.refused("resume of a created container", b.resume(), codes.FailedPrecondition)
	b.must(p.resize(80, 25))
	b.must(p.start())
	b.refused("second start", p.start(), codes.FailedPrecondition)
	b.refused("delete of a running container", p.delete(), codes.FailedPrecondition)
	b.refused("resume of a running container", b.resume(), codes.FailedPrecondition)

	b.must(p.kill(unix.SIGKILL))
	p.ends(137, "")
	p.is(task.Status_STOPPED)
	b.refused("start of a stopped container", p.start(), codes.FailedPrecondition)
	b.refused("kill of a stopped container", p.kill(unix.SIGKILL), codes.NotFound)
	b.refused("exec in a stopped container", b.add("late", sleep.args(b.d), nil, false), codes.FailedPrecondition)
	b.refused("pause of a stopped container", b.pause(), codes.FailedPrecondition)
	b.refused("resume of a stopped container", b.resume(), codes.FailedPrecondition)
	b.refused("resize of a stopped container", p.resize(80, 25), codes.NotFound)
	b.refused("stats of a stopped container", second(b.client.Stats(b.d.context(b.T), &taskapi.StatsRequest{ID: b.id})), codes.NotFound)
	b.refused("update of a stopped container", b.update(memoryLimit(64<<20)), codes.FailedPrecondition)
	b.must(p.closeIO())
	if r, err := b.client.Pids(b.d.context(b.T), &taskapi.PidsRequest{ID: b.id}); err != nil || len(r.Processes) == 0 {
		b.Errorf("pids of a stopped container: %v, %v", r, err) // containerd takes one without for a leak
	}

	b.must(p.delete())
	b.refused("second delete", p.delete(), codes.NotFound)
	b.refused("kill after the delete", p.kill(unix.SIGKILL), codes.NotFound)
	b.refused("wait after the delete", second(b.client.Wait(b.d.context(b.T), &taskapi.WaitRequest{ID: b.id})), codes.NotFound)
}

// unknownIDs: every call that names a container, or a process, says so when there is none.
func unknownIDs(b *box) {
	c := b.client
	for _, id := range []string{b.id, "unknown"} {
		execID := ""
		if id == b.id {
			execID = "unknown"
		}
		for what, call := range map[string]func() error{
			"state": func() error { return second(c.State(b.d.context(b.T), &taskapi.StateRequest{ID: id, ExecID: execID})) },
			"start": func() error { return second(c.Start(b.d.context(b.T), &taskapi.StartRequest{ID: id, ExecID: execID})) },
			"wait":  func() error { return second(c.Wait(b.d.context(b.T), &taskapi.WaitRequest{ID: id, ExecID: execID})) },
			"delete": func() error {
				return second(c.Delete(b.d.context(b.T), &taskapi.DeleteRequest{ID: id, ExecID: execID}))
			},
			"kill": func() error {
				return second(c.Kill(b.d.context(b.T), &taskapi.KillRequest{ID: id, ExecID: execID, Signal: 15}))
			},
			"resize": func() error {
				return second(c.ResizePty(b.d.context(b.T), &taskapi.ResizePtyRequest{ID: id, ExecID: execID, Width: 80, Height: 25}))
			},
			"closeIO": func() error {
				return second(c.CloseIO(b.d.context(b.T), &taskapi.CloseIORequest{ID: id, ExecID: execID, Stdin: true}))
			},
		} {
			b.refused(what+" of "+id+"/"+execID, call(), codes.NotFound)
		}
	}
	for what, err := range map[string]error{
		"pids":   second(c.Pids(b.d.context(b.T), &taskapi.PidsRequest{ID: "unknown"})),
		"stats":  second(c.Stats(b.d.context(b.T), &taskapi.StatsRequest{ID: "unknown"})),
		"pause":  second(c.Pause(b.d.context(b.T), &taskapi.PauseRequest{ID: "unknown"})),
		"resume": second(c.Resume(b.d.context(b.T), &taskapi.ResumeRequest{ID: "unknown"})),
		"update": second(c.Update(b.d.context(b.T), &taskapi.UpdateTaskRequest{ID: "unknown", Resources: memoryLimit(64 << 20)})),
		"exec":   second(c.Exec(b.d.context(b.T), &taskapi.ExecProcessRequest{ID: "unknown", ExecID: "e", Spec: processOf(sleep.args(b.d))})),
	} {
		b.refused(what, err, codes.NotFound)
	}
}

// execStates is states for an exec.
func execStates(b *box) {
	p := b.exec(sleep)
	p.is(task.Status_CREATED)
	b.refused("second exec of that id", b.add(p.execID, sleep.args(b.d), nil, false), codes.AlreadyExists)
	b.refused("kill before the start", p.kill(unix.SIGKILL), codes.FailedPrecondition)
	b.must(p.start())
	p.is(task.Status_RUNNING)
	b.refused("second start", p.start(), codes.FailedPrecondition)
	b.refused("delete while running", p.delete(), codes.FailedPrecondition)
	b.must(p.kill(unix.SIGKILL))
	if got := p.wait(); got != 137 {
		b.Errorf("status %d", got)
	}
	s := p.is(task.Status_STOPPED)
	if s.ExitStatus != 137 || s.ExitedAt == nil || s.ExecID != p.execID || s.Stdout != p.stdout {
		b.Errorf("state %v", s)
	}
	b.refused("start after the end", p.start(), codes.FailedPrecondition)
	b.refused("kill after the end", p.kill(unix.SIGKILL), codes.NotFound)
	b.must(p.delete())
	b.refused("second delete", p.delete(), codes.NotFound)

	q := b.exec(sleep)
	b.must(q.delete()) // it never ran
	b.refused("state after the delete", second(q.state()), codes.NotFound)
}

// badRequests: what can't be meant is refused as such, and Create never as NotImplemented, which containerd takes for a
// shim of an older protocol.
func badRequests(b *box) {
	ctx := b.d.context(b.T)
	create := func(change func(*taskapi.CreateTaskRequest)) error {
		r := &taskapi.CreateTaskRequest{ID: "other", Bundle: b.bundle, Rootfs: b.rootfs}
		change(r)
		return second(b.client.Create(ctx, r))
	}
	b.refused("create with an id that is a path", create(func(r *taskapi.CreateTaskRequest) { r.ID = "../other" }), codes.InvalidArgument)
	b.refused("create from a checkpoint", create(func(r *taskapi.CreateTaskRequest) { r.Checkpoint = "/checkpoint" }), codes.InvalidArgument)
	b.refused("exec with an id that is a path", b.add("../e", sleep.args(b.d), nil, false), codes.InvalidArgument)
	b.refused("exec of nothing", b.add("e", nil, nil, false), codes.InvalidArgument)
	r := &taskapi.ExecProcessRequest{ID: b.id, ExecID: "e", Spec: processOf(nil)}
	r.Spec.Value = []byte("{")
	b.refused("exec of no process", second(b.client.Exec(ctx, r)), codes.InvalidArgument)
	b.refused("update with nothing", b.update(nil), codes.InvalidArgument)
}

// waiters: all are told the same, and whoever comes later, too.
func waiters(b *box) {
	p := b.exec(sleep).started()
	var wg sync.WaitGroup
	statuses := make([]uint32, 20)
	for i := range statuses {
		wg.Go(func() {
			r, err := b.client.Wait(b.d.context(b.T), &taskapi.WaitRequest{ID: b.id, ExecID: p.execID})
			if err != nil {
				b.Errorf("wait: %v", err)
				return
			}
			statuses[i] = r.ExitStatus
		})
	}
	b.must(p.kill(unix.SIGKILL))
	wg.Wait()
	for _, s := range append(statuses, p.wait()) {
		if s != 137 {
			b.Errorf("status %d", s)
		}
	}
	b.must(p.delete())
}

func shutdownWhileRunning(b *box) {
	b.shutdown()
	b.init.is(task.Status_RUNNING)
	b.exec(exit(0)).started().ends(0, "")
}

// killAll ends every process of the container.
func killAll(b *box) {
	b.run(sleep)
	e := b.exec(sleep).started()
	b.must(second(b.client.Kill(b.d.context(b.T), &taskapi.KillRequest{ID: b.id, Signal: uint32(unix.SIGKILL), All: true})))
	e.ends(137, "")
	b.init.ends(137, "")
	b.must(b.init.delete())
	b.exactly("create", "start", "exec-added e1", "exec-started e1", "exit e1 137", "exit init 137", "delete 137")
}
