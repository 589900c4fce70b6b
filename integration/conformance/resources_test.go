package conformance

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	cgroupstats "github.com/containerd/cgroups/v3/cgroup2/stats"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

// ociType is where the types of OCI specs are in an Any, as JSON.
const ociType = "types.containerd.io/opencontainers/runtime-spec/1/"

func processOf(args []string) *anypb.Any {
	text, _ := json.Marshal(&specs.Process{Args: args, Cwd: "/", Env: []string{"PATH=/bin"}}) // has nothing that can't be
	return &anypb.Any{TypeUrl: ociType + "Process", Value: text}
}

func memoryLimit(bytes int64) *anypb.Any {
	text, _ := json.Marshal(&specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &bytes}}) // likewise
	return &anypb.Any{TypeUrl: ociType + "LinuxResources", Value: text}
}

func (b *box) pause() error {
	return second(b.client.Pause(b.d.context(b.T), &taskapi.PauseRequest{ID: b.id}))
}

func (b *box) resume() error {
	return second(b.client.Resume(b.d.context(b.T), &taskapi.ResumeRequest{ID: b.id}))
}

func (b *box) update(resources *anypb.Any) error {
	return second(b.client.Update(b.d.context(b.T), &taskapi.UpdateTaskRequest{ID: b.id, Resources: resources}))
}

// pauseResume: nothing moves while the container is paused, and everything goes on after that.
func pauseResume(b *box) {
	p := b.exec(cat).started()
	_, err := p.in.WriteString("before\n")
	b.must(err)
	b.must(p.out.until("before\n", b.d.cfg.Timeout(limit)))
	b.must(b.pause())
	b.Cleanup(func() { b.resume() }) // for the other rows, if this one fails
	b.init.is(task.Status_PAUSED)
	b.refused("second pause", b.pause(), codes.FailedPrecondition)
	b.refused("exec while paused", b.add("paused", sleep.args(b.d), nil, false), codes.FailedPrecondition)
	b.refused("delete while paused", b.init.delete(), codes.FailedPrecondition)
	_, err = p.in.WriteString("meanwhile\n")
	b.must(err)
	// There is no event for what doesn't happen.
	if err := p.out.until("meanwhile\n", 500*time.Millisecond); err == nil {
		b.Error("a paused process goes on")
	}
	b.must(b.resume())
	b.init.is(task.Status_RUNNING)
	b.must(p.out.until("meanwhile\n", b.d.cfg.Timeout(limit)))
	b.must(p.closeIO())
	p.ends(0, "before\nmeanwhile\n")
	b.await("paused")
	b.await("resumed")
}

// killPaused: SIGKILL works on a paused container.
func killPaused(b *box) {
	b.run(sleep)
	b.must(b.pause())
	b.must(b.init.kill(unix.SIGKILL))
	b.init.ends(137, "")
	b.must(b.init.delete())
	b.exactly("create", "start", "paused", "exit init 137", "delete 137")
}

func update(b *box) {
	const bytes = 96 << 20
	b.must(b.update(memoryLimit(bytes)))
	b.exec(memory).started().ends(0, fmt.Sprintln(bytes))
	b.refused("more memory than the machine has", b.update(memoryLimit(1<<40)), codes.FailedPrecondition)
	b.exec(memory).started().ends(0, fmt.Sprintln(bytes))
}

func stats(b *box) {
	r, err := b.client.Stats(b.d.context(b.T), &taskapi.StatsRequest{ID: b.id})
	b.must(err)
	if u := r.Stats.GetTypeUrl(); u != "io.containerd.cgroups.v2.Metrics" {
		b.Fatalf("type %q", u)
	}
	var m cgroupstats.Metrics
	b.must(proto.Unmarshal(r.Stats.Value, &m))
	if m.GetMemory().GetUsage() == 0 {
		b.Errorf("metrics %v", &m)
	}
}

func pids(b *box) {
	p := b.exec(sleep).started()
	r, err := b.client.Pids(b.d.context(b.T), &taskapi.PidsRequest{ID: b.id})
	b.must(err)
	var execs []string
	for _, info := range r.Processes {
		if int(info.Pid) != b.machine {
			b.Errorf("pid %d, and the machine's is %d", info.Pid, b.machine)
		}
		if info.Info != nil {
			var details options.ProcessDetails
			b.must(typeurl.UnmarshalTo(info.Info, &details))
			execs = append(execs, details.ExecID)
		}
	}
	if len(r.Processes) != 2 || len(execs) != 1 || execs[0] != p.execID {
		b.Errorf("processes %v", r.Processes)
	}
	b.must(p.kill(unix.SIGKILL))
	p.ends(137, "")
}

func connect(b *box) {
	for id, machine := range map[string]int{b.id: b.machine, "unknown": 0} {
		r, err := b.client.Connect(b.d.context(b.T), &taskapi.ConnectRequest{ID: id})
		b.must(err)
		if int(r.ShimPid) != b.shim || int(r.TaskPid) != machine || r.Version != "3" {
			b.Errorf("connect to %s: %v, want pids %d and %d", id, r, b.shim, machine)
		}
	}
}

func resizePty(b *box) {
	p := b.execWith(cat, true)
	b.must(p.resize(80, 25)) // as ctr does right after the creation
	p.started()
	b.must(p.resize(132, 43))
	b.must(p.kill(unix.SIGKILL))
	if got := p.wait(); got != 137 {
		b.Errorf("status %d", got)
	}
	b.refused("resize after the end", p.resize(80, 25), codes.NotFound)
	b.must(p.delete())
}

// closeIO may come at any time, and as often as one likes.
func closeIO(b *box) {
	early := b.exec(cat)
	b.must(early.closeIO())
	early.started().ends(0, "")

	p := b.exec(cat).started()
	_, err := p.in.WriteString("all of it\n")
	b.must(err)
	for range 3 {
		b.must(p.closeIO())
	}
	if got := p.wait(); got != 0 {
		b.Errorf("status %d", got)
	}
	b.must(p.closeIO())
	p.ends(0, "all of it\n")
}

// checkpoint leaves what names a snapshot, and the container goes on.
func checkpoint(b *box) {
	dir := filepath.Join(b.bundle, "checkpoint")
	_, err := b.client.Checkpoint(b.d.context(b.T), &taskapi.CheckpointTaskRequest{ID: b.id, Path: dir})
	b.must(err)
	c, err := saved.ReadCheckpoint(dir)
	b.must(err)
	if c.Container != b.id {
		b.Errorf("checkpoint %+v", c)
	}
	p := b.exec(cat).started()
	b.must(p.closeIO())
	p.ends(0, "")
	_, err = snapshot.New(b.d.cfg, slog.New(slog.DiscardHandler)).Delete(c.Snapshot)
	b.must(err)
	b.refused("checkpoint of nothing", second(b.client.Checkpoint(b.d.context(b.T), &taskapi.CheckpointTaskRequest{ID: "nothing", Path: dir})), codes.NotFound)
}
