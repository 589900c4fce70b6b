package faults

import (
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/integration/stack"
)

// victim is a process that is killed.
type victim struct {
	name string
	// first and last are the steps between which there is one.
	first, last step
	// sample are the steps that are tried in the short form.
	sample []step
	// find returns the pids, none if there isn't one.
	find func(r *runner) []int
	// repair brings the stack back.
	repair func(t *testing.T, r *runner, pids []int)
	// harmless: the container doesn't notice.
	harmless bool
	// orphans: nobody is called to clean up then, so something may be left, which is for the doctor to find.
	orphans bool
}

func one(pid int) []int {
	if pid == 0 {
		return nil
	}
	return []int{pid}
}

var victims = []victim{
	{
		name: "shim", first: shimStarted, last: taskDelete, sample: []step{qemuStarted, exitNoted},
		find: func(r *runner) []int { return one(r.shim()) },
	},
	{
		name: "shim start", first: bundleMade, last: bundleMade, orphans: true,
		find: func(r *runner) []int { return action("start", r.id) },
	},
	{
		name: "shim delete", first: undone, last: bundleGone, orphans: true,
		find: func(r *runner) []int { return action("delete", r.id) },
	},
	{
		name: "QEMU", first: qemuStarted, last: exitNoted, sample: []step{machineThere},
		find: func(r *runner) []int { return one(r.qemu()) },
	},
	{
		name: "containerd", first: bundleMade, last: bundleGone, sample: []step{podNoted},
		find:   func(*runner) []int { return one(containerd()) },
		repair: func(t *testing.T, r *runner, pids []int) { awaitReady(t, r.cube, pids) },
	},
	{
		name: "cube", first: bundleMade, last: bundleGone, sample: []step{machineDir}, harmless: true,
		find:   func(r *runner) []int { return one(r.cube) },
		repair: func(t *testing.T, _ *runner, _ []int) { mustUp(t) },
	},
	{
		name: "client", first: bundleMade, last: taskDelete, sample: []step{guestAsked},
		find: func(r *runner) []int { return one(r.cmd.Process.Pid) },
	},
}

// TestKillMatrix kills every part at every step of a container's life. Whatever it hits: the client returns, what there
// is can be deleted, nothing is left, an exit is told once, and a container of that name can run again.
func TestKillMatrix(t *testing.T) {
	for _, v := range victims {
		for at := v.first; at <= v.last; at++ {
			t.Run(v.name+" at "+at.String(), func(t *testing.T) {
				if !slices.Contains(v.sample, at) {
					oneOfMany(t)
				}
				killAt(t, v, at)
			})
		}
	}
}

// code is what the container ends with by itself.
const code = 7

// networked is the annotation by which its shim opens a place in the network, and closes it.
const networked = `io.cube.network={"policy":{"default":"allow"}}`

// runner is a client that runs a container, which ends as soon as it has been told to.
type runner struct {
	*life
	cmd   *exec.Cmd
	stdin io.Writer
	text  strings.Builder // of stderr
	cube  int             // pid
	ended chan struct{}
}

// finish lets the container end by itself. Whenever that is asked, it is kept for the container; the client may be gone.
func (r *runner) finish() { _, _ = io.WriteString(r.stdin, "go\n") }

// returns waits for the client's end.
func (r *runner) returns(t *testing.T) {
	t.Helper()
	select {
	case <-r.ended:
	case <-time.After(s.Config.Timeout(30 * time.Second)):
		t.Errorf("the client doesn't return")
		s.End(t, r.cmd.Process.Pid, unix.SIGKILL)
		<-r.ended
	}
}

// run starts the client.
func run(t *testing.T, id string) *runner {
	t.Helper()
	r := &runner{life: watch(t, id), ended: make(chan struct{}), cube: readiness().PID}
	r.cmd = s.Command("ctr", "run", "--runtime", "io.cube.v2", "--snapshotter", "cube", "--annotation", networked, stack.Image, id,
		"sh", "-c", fmt.Sprintf("echo up; read line; exit %d", code))
	stdin, err := r.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.stdin, r.cmd.Stderr = stdin, &r.text
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		b := make([]byte, 16)
		for {
			n, err := out.Read(b)
			if n > 0 {
				r.output <- struct{}{}
			}
			if err != nil {
				break
			}
		}
		_ = r.cmd.Wait()
		close(r.ended)
	}()
	return r
}

// killAt is one cell of the matrix.
func killAt(t *testing.T, v victim, at step) {
	id := s.ID(t, "kill")
	r := run(t, id)
	if at > running {
		r.await(running, r.ended)
		r.finish()
	}
	r.await(at, r.ended)
	pids := v.find(r)
	// Nothing tells when a process begins.
	for end := time.Now().Add(s.Config.Timeout(2 * time.Second)); len(pids) == 0 && time.Now().Before(end); pids = v.find(r) {
		r.look()
	}
	r.catchUp()
	hit := r.furthest
	for _, pid := range pids {
		s.End(t, pid, unix.SIGKILL)
	}
	t.Logf("%s killed (%v) at step %q", v.name, pids, hit)
	if v.repair != nil {
		v.repair(t, r, pids)
	}
	if at <= running {
		r.finish()
	}
	r.returns(t)
	message := strings.TrimSpace(r.text.String())
	t.Logf("the client ended with %d: %s", r.cmd.ProcessState.ExitCode(), message)
	if v.harmless && (r.cmd.ProcessState.ExitCode() != code || message != "") {
		t.Error("the container has noticed it")
	}
	remove(t, id)
	// containerd has nothing cleaned up after a shim that it couldn't start; and when a client is killed, it gives up what it
	// was doing for it, be it the shim's start or its end. Then a file or two are for the doctor.
	if v.orphans || strings.Contains(message, "failed to start shim") || v.name == "client" && (hit <= shimStarted || hit >= undone) {
		defer doctor(t)
		s.Eventually(t, 15*time.Second, "the bundle is removed", func() bool { r.look(); return r.furthest == bundleGone })
	} else {
		nothingLeft(t, id)
	}
	r.judge(t, v, hit)
	if again := s.Ctr("run", "--rm", "--runtime", "io.cube.v2", "--snapshotter", "cube", stack.Image, id, "echo", "again"); again.Stdout != "again\n" || again.Err != nil {
		t.Errorf("it doesn't run again: %+v", again)
	}
}

// doctor removes what is left, and sees that it is gone.
func doctor(t *testing.T) {
	t.Helper()
	if found := left(s.ID(t, "kill")); len(found) > 0 {
		t.Logf("left for the doctor: %q", found)
	}
	s.Eventually(t, 60*time.Second, "the doctor removes what is left", func() bool { // which has to be of some age
		r := s.Cube("doctor", "--fix")
		return r.Err == nil && len(left(s.ID(t, "kill"))) == 0
	})
}

// judge looks at the exits. containerd tells that of a shim which ends by itself once more, as it does for all shims: of one
// that is killed, or that ends because its client was killed before it told it to. What it tells must be the same. While
// there is no containerd, or no subscriber, events get lost.
func (r *runner) judge(t *testing.T, v victim, hit step) {
	t.Helper()
	r.catchUp()
	told := map[string]int{}
	for _, e := range r.exits {
		if e.ID == r.id {
			told[fmt.Sprintf("status %d at %v", e.ExitStatus, e.ExitedAt.AsTime())]++
		}
	}
	if len(told) > 1 {
		t.Errorf("different exits were told: %v", told)
	}
	// A client that deletes the task of a dead shim may be faster than containerd with telling the exit.
	if r.started && len(told) == 0 && v.name != "containerd" && !strings.Contains(r.text.String(), "ttrpc: closed") {
		t.Error("no exit was told")
	}
	for what, n := range told {
		if n > 1 && !strings.HasPrefix(v.name, "shim") && !(v.name == "client" && hit >= undone) {
			t.Errorf("an exit was told %d times: %s", n, what)
		}
		if hit >= exitNoted && !strings.HasPrefix(what, fmt.Sprintf("status %d ", code)) {
			t.Errorf("its exit was known, but told was %s", what)
		}
	}
}
