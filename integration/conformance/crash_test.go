package conformance

import (
	"strings"

	"github.com/containerd/containerd/api/types/task"
	"golang.org/x/sys/unix"
)

var crashRows = []row{
	{name: "ShimKilled", test: shimKilled},
	{name: "ShimKilledAfterExit", test: shimKilledAfterExit},
	{name: "ShimStopped", test: shimStopped},
	{name: "ShimTerminated", test: shimTerminated},
	{name: "MachineKilled", test: machineKilled, noFake: "a fake machine is the shim's own process"},
}

func (b *box) killShim(s unix.Signal) {
	b.Helper()
	b.crashed = true
	b.must(unix.Kill(b.shim, s))
}

// shimKilled: shim delete ends what the shim has left, and says so however often it is asked.
func shimKilled(b *box) {
	b.run(sleep)
	b.killShim(unix.SIGKILL)
	for range 2 {
		if r := b.clean(); r.ExitStatus != 137 || int(r.Pid) != b.machine || r.ExitedAt == nil {
			b.Errorf("shim delete answers %v", r)
		}
	}
	b.nothingLeft()
}

// shimKilledAfterExit: an exit that was known is not forgotten.
func shimKilledAfterExit(b *box) {
	b.run(exit(42)).ends(42, "")
	b.killShim(unix.SIGKILL)
	if r := b.clean(); r.ExitStatus != 42 || int(r.Pid) != b.machine {
		b.Errorf("shim delete answers %v", r)
	}
}

// shimStopped: one that doesn't react to anything is ended, too.
func shimStopped(b *box) {
	b.run(sleep)
	b.killShim(unix.SIGSTOP)
	if r := b.clean(); r.ExitStatus != 137 {
		b.Errorf("shim delete answers %v", r)
	}
	b.nothingLeft()
}

// shimTerminated: a shim that is asked to end ends its machine in order.
func shimTerminated(b *box) {
	b.run(sleep)
	b.killShim(unix.SIGTERM)
	b.await("exit init 137")
	b.nothingLeft()
}

// machineKilled: everything in it has an exit, execs first, and can be deleted.
func machineKilled(b *box) {
	b.run(sleep)
	e := b.exec(sleep).started()
	b.must(unix.Kill(b.machine, unix.SIGKILL))
	e.ends(137, "")
	b.init.ends(137, "")
	b.init.is(task.Status_STOPPED)
	if err := b.add("late", sleep.args(b.d), nil, false); err == nil || strings.Contains(err.Error(), "\n") {
		b.Errorf("exec in a dead machine: %v", err)
	}
	b.must(b.init.delete())
	b.exactly("create", "start", "exec-added e1", "exec-started e1", "exit e1 137", "exit init 137", "delete 137")
}
