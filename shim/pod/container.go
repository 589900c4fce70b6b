package pod

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/hooks"
	"github.com/cubesandbox/cube/shim/record"
	"github.com/cubesandbox/cube/shim/saved"
)

// container is a container in the machine.
type container struct {
	id, bundle string
	guestID    string           // the guest's name for it: id, or that of the container that was saved
	specSum    string           // the digest of its spec
	saved      *saved.Container // what it was when it was saved; nil for one that began here
	pod        *Pod
	claim      *claim             // on the machine, until init's exit
	on         atomic.Pointer[vm] // see vm
	init       *process
	events     *Events
	log        *slog.Logger
	timeout    func(time.Duration) time.Duration
	records    record.Bundle
	state      record.State
	hooks      specs.Hooks
	alone      bool     // it is no member of a group
	disks      []string // the serials of those that go with it
	shares     *shares
	commonPIDs bool // it has its pod's pid namespace

	lastOOM time.Time // dispatch's

	// mu guards all below, and the processes. It is never held across I/O.
	mu    sync.Mutex
	execs map[string]*process
	// initExited: no exec may start any more. initPublished: nor may one that is being started come to life.
	initExited, initPublished bool
	// doomed: a SIGKILL for init has been asked for. struck: it has been sent.
	doomed, struck bool
	// limits are those that Update has changed, nil for none.
	limits *specs.LinuxResources
}

// vm is the machine that it is in. A rollback makes it another.
func (c *container) vm() *vm { return c.on.Load() }

// watch gives everything that is running an exit when the machine goes down.
func (c *container) watch() {
	v := c.vm()
	for {
		select {
		case <-c.init.done:
			return
		case <-v.down:
		}
		c.pod.mu.Lock() // a rollback is over, or comes too late
		now := c.vm()
		c.pod.mu.Unlock()
		if now == v {
			break
		}
		v = now
	}
	c.mu.Lock()
	processes := make([]*process, 0, len(c.execs)+1)
	for _, e := range c.execs {
		processes = append(processes, e)
	}
	c.mu.Unlock()
	for _, p := range append(processes, c.init) { // settle puts init last in any case
		c.exited(p, v.lost)
	}
}

// told takes the guest's word for an exit.
func (c *container) told(e *api.Exit) {
	p := c.init
	if e.GetExecId() != "" {
		c.mu.Lock()
		p = c.execs[e.GetExecId()]
		c.mu.Unlock()
	}
	if p != nil {
		c.exited(p, e.GetStatus()&0xff)
	}
}

// remove frees all that the container had on the host, with the machine if nothing else is to use that. After an error
// the record still says what there is, and `shim delete` tries again.
func (c *container) remove() error {
	var err error
	if c.claim.end() {
		err = c.vm().stop()
	} else {
		err = c.vm().takeOut(c.guestID, c.disks)
	}
	if err := errors.Join(err, c.shares.close()); err != nil {
		return err
	}
	if err := runPoststop(c.hooks, c.id, c.bundle); err != nil {
		c.log.Warn("poststop", "error", err) // the specification wants them logged only
	}
	c.state.Undone = true
	return errors.Join(c.records.SaveState(c.state), c.pod.env.Dir.Leave(c.id))
}

func runPoststop(h specs.Hooks, id, bundle string) error {
	return hooks.Run(context.Background(), "poststop", h.Poststop, specs.State{ID: id, Status: specs.StateStopped, Bundle: bundle})
}
