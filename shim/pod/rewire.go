package pod

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/stdio"
)

// wire opens the host's ends of a container's stdio once more, and attaches them to the processes that were saved.
func (r *rollback) wire(ctx context.Context, p *pair) error {
	for _, t := range p.processes() {
		host, err := stdio.Open(ctx, t.stdio, t.owner())
		if err != nil {
			return fmt.Errorf("stdio of %s: %w", t.name(), err)
		}
		w, names, err := t.wire(host, r.next.guest)
		if err != nil {
			return err
		}
		r.undo.Push(func() error { w.close(); return nil })
		if _, err := r.next.guest.AttachProcess(ctx, &api.AttachProcessRequest{Id: p.c.guestID, ExecId: t.execID, Stdio: names}); err != nil {
			return fmt.Errorf("attach the stdio of %s: %w", t.name(), err)
		}
		p.wires = append(p.wires, w)
	}
	return nil
}

// processes are those that run, and were saved.
func (p *pair) processes() []*process {
	if p.saved == nil {
		return nil
	}
	c := p.c
	c.mu.Lock()
	defer c.mu.Unlock()
	list := []*process{c.init}
	for _, s := range p.saved.Processes[1:] {
		if e := c.execs[s.ExecID]; e != nil && e.state == Running && e.number == s.Number {
			list = append(list, e)
		}
	}
	return list
}

// rolledBack has the processes use their streams to the machine that they are in.
func (c *container) rolledBack(wires []*wire) {
	for _, w := range wires {
		w.process.closeIO()
		w.process.take(w)
	}
}

// endOthers ends the execs that weren't there when the container was saved.
func (c *container) endOthers(wires []*wire) {
	c.mu.Lock()
	execs := slices.Collect(maps.Values(c.execs))
	c.mu.Unlock()
	for _, e := range execs {
		if !slices.ContainsFunc(wires, func(w *wire) bool { return w.process == e }) {
			c.mu.Lock()
			runs := e.state == Running
			c.mu.Unlock()
			if runs {
				c.exited(e, statusKilled)
			}
		}
	}
}
