package manager_test

import (
	"testing"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/snapshots"
)

// TestSnapshots: the shim is found by its pod's id, and saves it, puts it back and holds it.
func TestSnapshots(t *testing.T) {
	d := newDaemon(t)
	cfg, err := config.Load(d.dir + "/config.toml")
	d.must(err)
	if _, err := snapshots.Dial(t.Context(), cfg, "ns", id); !errdefs.IsNotFound(err) {
		t.Errorf("before it is there: %v", err)
	}
	r, err := d.start()
	d.must(err)
	task := d.connect(r.Address)
	d.create(task)
	if _, err := snapshots.Dial(t.Context(), cfg, "other", id); !errdefs.IsNotFound(err) {
		t.Errorf("in another namespace: %v", err)
	}
	c, err := snapshots.Dial(t.Context(), cfg, "ns", id)
	d.must(err)
	defer c.Close()
	name, err := c.Save(t.Context(), "", "")
	d.must(err)
	if _, err := c.Save(t.Context(), name, ""); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a second one of that name: %v", err)
	}
	pid, err := c.Rollback(t.Context(), name)
	d.must(err)
	if state, err := task.State(t.Context(), &taskapi.StateRequest{ID: id}); err != nil || int(state.Pid) != pid {
		t.Errorf("state %v, %v, rolled back to pid %d", state, err, pid)
	}
	if _, err := c.Rollback(t.Context(), "none"); !errdefs.IsNotFound(err) {
		t.Errorf("to nothing: %v", err)
	}
	d.must(c.Hold(t.Context()))
	if _, err := c.Save(t.Context(), "", ""); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("saved while it is held: %v", err)
	}
	d.must(c.Release(t.Context()))
	shim := d.shimPID()
	d.must(unix.Kill(shim, unix.SIGKILL))
	d.ended(shim)
	if err := c.Hold(t.Context()); !errdefs.IsUnavailable(err) || err.Error() != "the shim of "+id+" has ended meanwhile" {
		t.Errorf("when it is there no more: %v", err)
	}
	if _, warnings := d.delete(); warnings != "" {
		t.Errorf("delete: %s", warnings)
	}
	d.nothingLeft()
}
