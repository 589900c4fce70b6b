package processes

import (
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/cgroups"
	"github.com/cubesandbox/cube/internal/undo"
)

// WholeHeader, with any value, has the command that a request starts take with it, when it has ended, what it has started: none of
// that holds its output open, or does anything afterwards.
const WholeHeader = "X-Cube-Whole"

// wholeWait is how long what was killed of a command may take to be gone, and its output to end. What holds that open then has got
// out of its control group.
const wholeWait = 10 * time.Second

// makeOwn makes the control group of a process that is to end as a whole, below the one of its kind. Where there is none of that kind,
// its group of processes stands for it.
func (p *Process) makeOwn(kind *os.File, u *undo.Stack) (err error) {
	if !p.Spec.Whole || kind == nil {
		return nil
	}
	if p.own, err = cgroups.NewOwn(kind); err != nil {
		return err
	}
	u.Push(func() error { return p.own.Remove(0) })
	p.cmd.SysProcAttr.CgroupFD = int(p.own.Dir.Fd())
	return nil
}

// endRest kills what a process has left, when it has ended itself.
func (p *Process) endRest() {
	if p.own != nil {
		err := p.own.Kill()
		if err == nil {
			return
		}
		slog.Warn("what a command has left may go on", "pid", p.PID, "error", err)
	}
	_ = unix.Kill(-int(p.PID), unix.SIGKILL) // or there is none
}

// removeOwn removes the process's control group, once it has been reaped.
func (p *Process) removeOwn() {
	if p.own == nil {
		return
	}
	if err := p.own.Remove(wholeWait); err != nil {
		slog.Warn("the control group of a command is left", "pid", p.PID, "error", err)
	}
}
