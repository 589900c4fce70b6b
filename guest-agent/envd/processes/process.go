package processes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/guest-agent/envd/cgroups"
)

// past is a deadline that has passed.
var past = time.Unix(1, 0)

// lastWait is how long subscribers get to take the last output of a command that was killed: one that takes none doesn't keep it
// from having ended.
const lastWait = 2 * time.Second

// Process is a command that was started.
type Process struct {
	PID  uint32
	Spec Spec

	hub    hub
	cmd    *exec.Cmd
	own    *cgroups.Own // nil: it has no control group of its own
	input  *os.File     // the pipe's end or the terminal; nil: /dev/null
	master *os.File     // the terminal; nil: it has none
	writer chan struct{}

	cut     chan struct{} // closed: its output's end isn't waited for
	cutOnce sync.Once
	late    chan struct{} // closed: it has been killed for its deadline

	mu     sync.Mutex
	reaped bool // its number may be another's
	end    End
	done   chan struct{} // closed: end is set, and all output published
}

// End is how a process ended.
type End struct {
	Code   int32 // -1: by a signal
	Exited bool  // by itself
	Status string
	Err    string // empty: it exited with 0
}

// Done is closed when the process has ended and all its output is with the subscribers.
func (p *Process) Done() <-chan struct{} { return p.done }

// Late is closed when the process was killed because its time was over.
func (p *Process) Late() <-chan struct{} { return p.late }

// End is how it ended, once Done is closed.
func (p *Process) End() End { return p.end }

// Subscribe gets the output from here on.
func (p *Process) Subscribe() *Subscription { return p.hub.subscribe() }

// watch sees the process through to its end.
func (p *Process) watch(outputs map[Stream]*os.File) {
	var readers sync.WaitGroup
	for stream, f := range outputs {
		readers.Go(func() {
			p.hub.copyOutput(f, stream, p.cut)
			if f != p.master {
				f.Close()
			}
		})
	}
	read := make(chan struct{})
	go func() {
		readers.Wait()
		close(read)
	}()
	if p.Spec.Timeout > 0 {
		timer := time.AfterFunc(p.Spec.Timeout, p.expire)
		defer timer.Stop()
	}
	// The process isn't reaped before its output ends: those that hold the output are of its group, and the group keeps
	// its number as long as the process has its own.
	exited(int(p.PID))
	if p.Spec.Whole {
		p.endRest()
		defer time.AfterFunc(wholeWait, p.cutOutput).Stop()
	}
	<-read
	p.mu.Lock()
	p.reaped = true
	p.mu.Unlock()
	err := p.cmd.Wait()
	state := p.cmd.ProcessState
	p.end = End{Code: int32(state.ExitCode()), Exited: state.Exited(), Status: state.String()}
	if err != nil {
		p.end.Err = err.Error()
	}
	p.removeOwn()
	close(p.done)
	if p.input != nil { // the terminal, too
		p.input.Close()
	}
}

// exited returns when the process has ended. It stays a zombie.
func exited(pid int) {
	if err := poll(pid); err == nil {
		return
	}
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// poll is exited without a thread of its own, of which Go has no more than 10,000. It takes a descriptor.
func poll(pid int) error {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	c, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var wait error
	err = c.Read(func(fd uintptr) bool {
		var info unix.Siginfo
		wait = unix.Waitid(unix.P_PIDFD, int(fd), &info, unix.WEXITED|unix.WNOWAIT|unix.WNOHANG, nil)
		return wait != nil || info.Signo != 0
	})
	return errors.Join(err, wait)
}

// expire ends a process whose time is over. That it is, is known before the end is.
func (p *Process) expire() {
	p.mu.Lock()
	if !p.reaped {
		close(p.late)
	}
	p.mu.Unlock()
	_ = p.Signal(unix.SIGKILL)
}

// Signal signals the process and its group. The error is errdefs.ErrNotFound when it has ended.
func (p *Process) Signal(s unix.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return p.gone()
	}
	if err := unix.Kill(-int(p.PID), s); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.PID, err)
	}
	if s == unix.SIGKILL {
		p.cutOutput()
	}
	return nil
}

// cutOutput has the output end with what there is of it.
func (p *Process) cutOutput() {
	p.cutOnce.Do(func() {
		close(p.cut)
		time.AfterFunc(lastWait, func() { close(p.hub.over) })
	})
}

func (p *Process) gone() error {
	return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("process %d has ended", p.PID))
}

// Write writes to the process's input or, with terminal, to its terminal, and waits until it is written, the context ends
// or the process does. The error is errdefs.ErrFailedPrecondition where there is no such input.
func (p *Process) Write(ctx context.Context, b []byte, terminal bool) error {
	if err := p.checkInput(terminal); err != nil {
		return err
	}
	select {
	case p.writer <- struct{}{}:
		defer func() { <-p.writer }()
	case <-p.done:
		return p.gone()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = p.input.SetWriteDeadline(past)
		close(interrupted)
	})
	_, err := p.input.Write(b)
	if !stop() {
		<-interrupted
		_ = p.input.SetWriteDeadline(time.Time{})
	}
	switch {
	case err == nil:
		return nil
	case os.IsTimeout(err) && ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, os.ErrClosed), errors.Is(err, unix.EPIPE), errors.Is(err, unix.EIO):
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("the input of process %d is closed", p.PID))
	}
	return fmt.Errorf("write to process %d: %w", p.PID, err)
}

func (p *Process) checkInput(terminal bool) error {
	why := ""
	switch {
	case terminal && p.master == nil:
		why = "has no terminal"
	case !terminal && p.master != nil:
		why = "has a terminal: its input is the terminal's"
	case p.input == nil:
		why = "was started without input"
	default:
		return nil
	}
	return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("process %d %s", p.PID, why))
}

// CloseInput is the end of input.
func (p *Process) CloseInput() error {
	if p.master != nil {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("process %d has a terminal, which has no end of input; send it ^D", p.PID))
	}
	if err := p.checkInput(false); err != nil {
		return err
	}
	if err := p.input.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Resize changes the terminal's size.
func (p *Process) Resize(size Size) error {
	if err := p.checkInput(true); err != nil {
		return err
	}
	if err := resize(p.master, size); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// protectOthers has the kernel that is out of memory kill the process before envd.
func (p *Process) protectOthers() {
	err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.PID), []byte("100"), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		slog.Warn("a process keeps envd's protection from being killed when memory is short", "pid", p.PID, "error", err)
	}
}
