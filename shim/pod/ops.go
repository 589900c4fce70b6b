package pod

import (
	"context"
	"errors"
	"fmt"
	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/guest"
	"golang.org/x/sys/unix"
	"time"
)

// killLimit is how long a SIGKILL for init may go unanswered before it goes to the machine instead.
const killLimit = 5 * time.Second

// exitLimit is how long init may outlive a SIGKILL: it may be in the middle of a system call, but not for ever.
const exitLimit = 20 * time.Second

// Kill sends a signal to a process, or with all to every process of the container. While the guest stands still for a save
// or a rollback, it waits; a SIGKILL for init doesn't wait long. A machine that is held is ended by any.
func (p *Pod) Kill(ctx context.Context, id, execID string, signal uint32, all bool) error {
	t, err := p.process(id, execID)
	if err != nil {
		return err
	}
	c := t.c
	ends := execID == "" && signal == uint32(unix.SIGKILL)
	c.mu.Lock()
	state := t.state
	if err = state.check(opKill, t.name()); err == nil && ends {
		c.doomed = true
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	if execID != "" && state < Running {
		return Created.check(opExec, t.name()) // there is no process yet
	}
	r := &api.SignalProcessRequest{Id: c.guestID, ExecId: execID, Signal: signal, All: all}
	if ends {
		return c.strike(ctx, r)
	}
	for {
		if err := p.goesOn(ctx, 0, t.name()+" got a signal"); err != nil {
			return err
		}
		v := c.vm()
		_, err := v.guest.SignalProcess(ctx, r)
		switch {
		case errors.Is(err, guest.ErrGone) && c.vm() != v: // it has been put back
			continue
		case err != nil && !errors.Is(err, guest.ErrGone):
			return fmt.Errorf("signal %s: %w", t.name(), err)
		}
		return nil // also of a machine that is gone: this process is, too
	}
}

// strikes is how often a SIGKILL is sent whose answer a save or a rollback has kept away.
const strikes = 3

// strike sends init a SIGKILL and sees to it that it ends.
func (c *container) strike(ctx context.Context, r *api.SignalProcessRequest) (err error) {
	limit := c.timeout(killLimit)
	var v *vm
	for range strikes {
		if err = c.pod.goesOn(ctx, limit, c.init.name()+" is to be killed"); err != nil {
			break
		}
		v = c.vm()
		err = v.signal(ctx, limit, r)
		if errors.Is(err, guest.ErrGone) && c.vm() != v || errors.Is(err, context.DeadlineExceeded) && (c.pod.stands() != nil || c.vm() != v) {
			continue
		}
		break
	}
	silent := errors.Is(err, context.DeadlineExceeded)
	switch {
	case silent && v != nil && (c.claim.alone() || !v.answers(killLimit)):
		v.kill("its agent doesn't answer a SIGKILL for " + c.init.name())
		return nil
	case errors.Is(err, guest.ErrGone):
		// The machine has ended with the answer under way, as it does soon after its last process: this one has, too.
		return nil
	case err == nil || silent:
		c.mustEnd()
	default:
		c.mu.Lock()
		c.doomed = false
		c.mu.Unlock()
	}
	if err != nil {
		return fmt.Errorf("signal %s: %w", c.init.name(), err)
	}
	return nil
}

// signal is SignalProcess with a limit.
func (v *vm) signal(ctx context.Context, limit time.Duration, r *api.SignalProcessRequest) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	_, err := v.guest.SignalProcess(ctx, r)
	return err
}

// mustEnd ends the machine if init doesn't end in time. One that others use goes on until they have outlived a SIGKILL,
// too, or the sandbox has.
func (c *container) mustEnd() {
	c.mu.Lock()
	already := c.struck
	c.struck = true
	c.mu.Unlock()
	if already {
		return
	}
	v := c.vm()
	go func() {
		limit := c.timeout(exitLimit)
		timer := time.NewTimer(limit)
		defer timer.Stop()
		for {
			select {
			case <-c.init.done:
				return
			case <-v.down:
				return
			case <-timer.C:
			}
			// A machine that waits for room on the host's disk can't be blamed.
			if !v.machine.Waiting() && !v.held.Load() && c.claim.outlived() {
				v.kill(c.init.name() + " has outlived its SIGKILL")
				return
			}
			timer.Reset(limit)
		}
	}()
}

// Resize sets the size of a process's terminal.
func (p *Pod) Resize(ctx context.Context, id, execID string, cols, rows uint32) error {
	t, err := p.process(id, execID)
	if err != nil {
		return err
	}
	t.c.mu.Lock()
	state := t.state
	t.cols, t.rows = cols, rows
	t.c.mu.Unlock()
	if err := state.check(opResize, t.name()); err != nil {
		return err
	}
	if execID != "" && state < Running {
		return nil // it starts with that size
	}
	if _, err := t.c.vm().guest.ResizePty(ctx, &api.ResizePtyRequest{Id: t.c.guestID, ExecId: execID, Columns: cols, Rows: rows}); err != nil {
		return fmt.Errorf("resize the terminal of %s: %w", t.name(), err)
	}
	return nil
}

// CloseIO ends a process's input after what is in its fifo. It returns at once.
func (p *Pod) CloseIO(id, execID string) error {
	t, err := p.process(id, execID)
	if err != nil {
		return err
	}
	t.c.mu.Lock()
	state, w := t.state, t.wired
	t.stdinClosed = true
	t.c.mu.Unlock()
	if err := state.check(opCloseIO, t.name()); err != nil {
		return err
	}
	if w != nil {
		w.host.CloseStdin()
	}
	return nil
}
