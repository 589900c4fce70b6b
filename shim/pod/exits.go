package pod

import (
	"slices"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cubesandbox/cube/shim/record"
)

const (
	// drainLimit is how long an exit waits for output that is still on its way. containerd's CRI plugin gives an exit
	// 10 s in all.
	drainLimit = 3 * time.Second
	// execsLimit is how long init's exit waits for those of the execs, which die with it.
	execsLimit = 5 * time.Second
	// restLimit is how long the last exit waits for the machine to stop, which delete waits for in any case.
	restLimit = 3 * time.Second
)

// The order that everyone relies on: a process's exit after its start, init's after the container's creation too, and
// after the exits of all execs. An exit that comes while a creation or start is under way waits in process.early; init's
// waits for the execs in settle.

// exited takes a process's end. Later ends of the same process change nothing.
func (c *container) exited(p *process, status uint32) {
	c.mu.Lock()
	switch {
	case p.state == Starting:
		if p.early == nil {
			p.early = &Exit{Status: status, At: time.Now()}
		}
		c.mu.Unlock()
		return
	case p.state.hasProcess(), p.state == Created && p.execID == "":
	default:
		c.mu.Unlock()
		return
	}
	ran := p.state != Created
	p.state = Stopped
	p.exit = Exit{Status: status, At: time.Now()}
	var execs []*process
	if p.execID == "" {
		execs = c.endExecs()
	}
	c.mu.Unlock()
	go c.settle(p, execs, ran)
}

// endExecs lets no further exec start and returns those whose exits must come before init's. c.mu is held.
func (c *container) endExecs() []*process {
	c.initExited = true
	var execs []*process
	for _, e := range c.execs {
		if e.state == Created {
			e.state = Stopped
			e.exit = Exit{Status: statusNotStarted, At: time.Now()}
			e.finish()
			continue
		}
		execs = append(execs, e)
	}
	return execs
}

// settle brings an exit to its end: output, if it ran, execs, record, event, waiters.
func (c *container) settle(p *process, execs []*process, ran bool) {
	c.mu.Lock()
	w, exit := p.wired, p.exit
	c.mu.Unlock()
	switch {
	case w == nil:
	case ran:
		w.host.Drain(c.timeout(drainLimit))
	default:
		w.host.Cut()
	}
	if p.execID == "" {
		c.awaitExecs(execs)
		if err := c.records.SaveExit(record.Exit{PID: c.vm().PID(), Status: exit.Status, At: exit.At}); err != nil {
			c.log.Warn("record the exit", "error", err)
		}
		if c.claim.end() {
			// Nobody needs the machine any more. Whoever sees the exit may rely on it that the task's pid is gone
			// and that its disks are at rest, with all data on them.
			c.vm().stopWithin(c.timeout(restLimit))
		}
	}
	c.events.Send(&eventsapi.TaskExit{
		ContainerID: c.id,
		ID:          p.eventID(),
		Pid:         uint32(c.vm().PID()),
		ExitStatus:  exit.Status,
		ExitedAt:    timestamppb.New(exit.At),
	})
	c.mu.Lock()
	p.finish()
	c.mu.Unlock()
}

// awaitExecs waits for the execs' exits, and ends those that the guest says nothing of. Starts that are still under way
// by then fail: started sees that init's exit has been published.
func (c *container) awaitExecs(execs []*process) {
	timer := time.NewTimer(c.timeout(execsLimit))
	defer timer.Stop()
	late := false
	for {
		c.mu.Lock()
		i := slices.IndexFunc(execs, func(e *process) bool { return !e.isDone && !(late && e.state == Starting) })
		c.initPublished = i < 0
		c.mu.Unlock()
		if i < 0 {
			return
		}
		select {
		case <-execs[i].done:
		case <-timer.C:
			late = true
			for _, e := range execs {
				c.exited(e, statusKilled) // its settling is bounded
			}
		}
	}
}

// created lets an early exit of a container that has been created follow.
func (c *container) created() {
	c.mu.Lock()
	c.init.state = Created
	early := c.init.early
	c.init.early = nil
	c.mu.Unlock()
	if early != nil {
		c.exited(c.init, early.Status)
	}
}

// started publishes a start and lets an early exit follow. It fails for an exec whose container has ended meanwhile.
func (c *container) started(p *process, event any) error {
	c.mu.Lock()
	if p.execID != "" && c.initPublished {
		c.mu.Unlock()
		return Stopped.check(opExec, "container "+c.id)
	}
	p.state = Running
	c.events.Send(event)
	early := p.early
	p.early = nil
	c.mu.Unlock()
	if early != nil {
		c.exited(p, early.Status)
	}
	return nil
}

// notStarted is the end of a process that never ran: no events, nobody waits, delete works.
func (c *container) notStarted(p *process, status uint32) {
	c.mu.Lock()
	p.state = Stopped
	p.early = nil
	p.exit = Exit{Status: status, At: time.Now()}
	if p.execID == "" {
		c.endExecs()
	}
	p.finish()
	c.mu.Unlock()
	p.closeIO()
}
