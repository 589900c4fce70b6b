package manager_test

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/shim/record"
)

// newPod makes bundles for containers of one pod. Each has its own part in what containerd does.
func newPod(t *testing.T, ids ...string) (members []*daemon) {
	t.Helper()
	first := newDaemon(t)
	for i, id := range ids {
		d := first
		if i > 0 {
			d = &daemon{T: t, dir: first.dir, sockets: first.sockets, env: first.env}
			t.Cleanup(d.cleanUp)
		}
		d.id, d.bundle = id, filepath.Join(first.dir, "ns", id)
		d.annotations = map[string]string{"io.containerd.runc.v2.group": "pod"}
		d.makeBundle()
		d.spec("sleep")
		members = append(members, d)
	}
	return members
}

// up starts all of them.
func up(t *testing.T, members []*daemon) (c taskapi.TTRPCTaskService, shim int) {
	t.Helper()
	var address string
	for _, d := range members {
		r, err := d.start()
		d.must(err)
		if address != "" && r.Address != address {
			t.Fatalf("addresses %s and %s", address, r.Address)
		}
		address = r.Address
		c = d.connect(address)
		d.create(c)
	}
	return c, members[0].shimPID()
}

func state(c taskapi.TTRPCTaskService, d *daemon) error {
	_, err := c.State(d.Context(), &taskapi.StateRequest{ID: d.id})
	return err
}

// TestPodHasOneShim: whoever starts first makes it, also when all start at once.
func TestPodHasOneShim(t *testing.T) {
	members := newPod(t, "a", "b", "c", "d")
	addresses := make([]string, len(members))
	var wg sync.WaitGroup
	for i, d := range members {
		wg.Go(func() {
			r, err := d.start()
			if err != nil {
				t.Error(err)
			}
			addresses[i] = r.GetAddress()
		})
	}
	wg.Wait()
	for i, d := range members {
		if addresses[i] != addresses[0] || d.shimPID() != members[0].shimPID() {
			t.Errorf("%s has shim %d at %s, the first one %d at %s", d.id, d.shimPID(), addresses[i], members[0].shimPID(), addresses[0])
		}
	}
	pid := members[0].shimPID()
	for _, d := range members {
		if del, warnings := d.delete(); del.ExitStatus != 137 || warnings != "" {
			t.Errorf("delete: %v, %q", del, warnings)
		}
	}
	members[0].ended(pid)
	members[0].nothingLeft()
}

// TestDeleteOfAMember: containerd has given one container up, which ends; the pod goes on.
func TestDeleteOfAMember(t *testing.T) {
	members := newPod(t, "a", "b")
	a, b := members[0], members[1]
	c, pid := up(t, members)
	if del, warnings := a.delete(); del.ExitStatus != 137 || del.Pid == 0 || warnings != "" {
		t.Errorf("delete: %v, %q", del, warnings)
	}
	a.must(os.RemoveAll(a.bundle)) // as containerd does; of the pod nothing was in it
	if state(c, a) == nil {
		t.Error("the container is still there")
	}
	b.must(state(c, b))
	if b.shimPID() != pid {
		t.Error("another shim")
	}
	if del, warnings := b.delete(); del.ExitStatus != 137 || warnings != "" {
		t.Errorf("delete: %v, %q", del, warnings)
	}
	b.ended(pid)
	b.nothingLeft()
}

// TestDeleteAfterDelete: what a shim has deleted itself needs nothing more, and the pod doesn't notice.
func TestDeleteAfterDelete(t *testing.T) {
	members := newPod(t, "a", "b")
	a, b := members[0], members[1]
	c, pid := up(t, members)
	_, err := c.Kill(t.Context(), &taskapi.KillRequest{ID: "a", Signal: 15})
	a.must(err)
	_, err = c.Wait(t.Context(), &taskapi.WaitRequest{ID: "a"})
	a.must(err)
	_, err = c.Delete(t.Context(), &taskapi.DeleteRequest{ID: "a"})
	a.must(err)
	_, err = c.Shutdown(t.Context(), &taskapi.ShutdownRequest{ID: "a"})
	a.must(err)
	if del, warnings := a.delete(); del.ExitStatus != 143 || warnings != "" {
		t.Errorf("delete: %v, %q", del, warnings)
	}
	b.must(state(c, b))
	if b.shimPID() != pid {
		t.Error("another shim")
	}
}

// TestKilledShimOfAPod: each container is told its own exit, what they had in common is undone once.
func TestKilledShimOfAPod(t *testing.T) {
	members := newPod(t, "a", "b", "c")
	members[1].spec("exit", "42")
	c, pid := up(t, members)
	_, err := c.Wait(t.Context(), &taskapi.WaitRequest{ID: "b"})
	members[1].must(err)
	members[0].must(unix.Kill(pid, unix.SIGKILL))
	members[0].ended(pid)
	want := map[string]uint32{"a": 137, "b": 42, "c": 137}
	var wg sync.WaitGroup
	for _, d := range members {
		wg.Go(func() {
			if del, warnings := d.delete(); del.ExitStatus != want[d.id] || warnings != "" {
				t.Errorf("delete of %s: %v, %q", d.id, del, warnings)
			}
		})
	}
	wg.Wait()
	members[0].nothingLeft()
	for _, d := range members {
		if s, err := record.Bundle(d.bundle).State(); err != nil || !s.Undone {
			t.Errorf("record of %s: %+v, %v", d.id, s, err)
		}
	}
}

// TestStalledShimOfAPod: one that doesn't answer ends with all that it has.
func TestStalledShimOfAPod(t *testing.T) {
	members := newPod(t, "a", "b")
	_, pid := up(t, members)
	members[0].must(unix.Kill(pid, unix.SIGSTOP))
	began := time.Now()
	for _, d := range members {
		if del, _ := d.delete(); del.ExitStatus != 137 {
			t.Errorf("delete: %v", del)
		}
	}
	t.Logf("took %s", time.Since(began))
	members[0].ended(pid)
	members[0].nothingLeft()
}

// TestStartAfterAKill: a container that is started while others of a killed shim are still to be deleted has a new shim,
// which their deletes leave alone.
func TestStartAfterAKill(t *testing.T) {
	members := newPod(t, "a", "b", "late")
	late := members[2]
	_, pid := up(t, members[:2])
	late.must(unix.Kill(pid, unix.SIGKILL))
	late.ended(pid)
	r, err := late.start()
	late.must(err)
	c := late.connect(r.Address)
	late.create(c)
	for _, d := range members[:2] {
		if del, warnings := d.delete(); del.ExitStatus != 137 || warnings != "" {
			t.Errorf("delete: %v, %q", del, warnings)
		}
	}
	late.must(state(c, late))
	late.delete()
	late.nothingLeft()
}

// TestStartDuringShutdown: a shim that is on its way out serves no container more, and the next one has all to itself.
func TestStartDuringShutdown(t *testing.T) {
	members := newPod(t, "a", "b")
	a, b := members[0], members[1]
	a.spec("exit", "0")
	c, pid := up(t, members[:1])
	_, err := c.Wait(t.Context(), &taskapi.WaitRequest{ID: "a"})
	a.must(err)
	_, err = c.Delete(t.Context(), &taskapi.DeleteRequest{ID: "a"})
	a.must(err)
	c.Shutdown(t.Context(), &taskapi.ShutdownRequest{ID: "a"}) // the connection may end before the answer
	c, next := up(t, members[1:])
	if next == pid {
		t.Error("the same shim")
	}
	a.ended(pid)
	if del, warnings := a.delete(); del.ExitStatus != 0 || warnings != "" {
		t.Errorf("delete: %v, %q", del, warnings)
	}
	b.must(state(c, b))
}

// TestBadGroup: a name that would become part of a path is refused.
func TestBadGroup(t *testing.T) {
	d := newPod(t, "a")[0]
	d.annotations["io.containerd.runc.v2.group"] = "../pod"
	d.spec("sleep")
	if _, err := d.start(); err == nil || !strings.Contains(err.Error(), "io.containerd.runc.v2.group") {
		t.Errorf("error %v", err)
	}
}
