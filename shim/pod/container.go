package pod

import (
	"context"
	"log/slog"
	"sync"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/shim/hooks"
	"github.com/cubesandbox/cube/shim/record"
)

const (
	// oomInterval bounds how often a guest can have containerd told of out-of-memory kills.
	oomInterval = time.Second
	// streamRetries is how often in a row the stream of events may break at once before the machine is given up.
	streamRetries = 5
)

// container is a container in the machine.
type container struct {
	id, bundle string
	vm         *vm
	init       *process
	events     *Events
	log        *slog.Logger
	timeout    func(time.Duration) time.Duration
	records    record.Dir
	state      record.State
	hooks      specs.Hooks
	strange    sync.Once // an event that is logged no more than once

	// mu guards all below, and the processes. It is never held across I/O.
	mu    sync.Mutex
	execs map[string]*process
	// initExited: no exec may start any more. initPublished: nor may one that is being started come to life.
	initExited, initPublished bool
}

// follow handles what the guest tells, and the machine's death. It ends with the machine.
func (c *container) follow() {
	ctx, cancel := context.WithCancel(context.Background())
	go c.readEvents(ctx)
	<-c.vm.down
	cancel()
	c.machineDown()
}

// machineDown gives everything that was running an exit.
func (c *container) machineDown() {
	status := c.vm.status()
	if !c.vm.ended.Load() {
		c.log.Error("the virtual machine is down", "reason", c.vm.why())
	}
	c.mu.Lock()
	processes := make([]*process, 0, len(c.execs)+1)
	for _, e := range c.execs {
		processes = append(processes, e)
	}
	c.mu.Unlock()
	for _, p := range append(processes, c.init) { // settle puts init last in any case
		c.exited(p, status)
	}
}

// readEvents reads the agent's events until ctx ends. A broken stream goes on where it was; the agent keeps what hasn't
// been acknowledged.
func (c *container) readEvents(ctx context.Context) {
	var after uint64
	var lastOOM time.Time
	for broken := 0; broken < streamRetries; broken++ {
		stream, err := c.vm.guest.Events(ctx, &api.EventsRequest{After: after})
		for err == nil {
			var e *api.Event
			if e, err = stream.Recv(); err != nil {
				break
			}
			if e.Sequence <= after {
				continue
			}
			after, broken = e.Sequence, 0
			c.event(e, &lastOOM)
		}
		select {
		case <-ctx.Done():
			return
		case <-c.vm.guest.Done(): // which follow hears of, too
			return
		default:
		}
		c.log.Warn("the agent's stream of events broke", "error", err)
	}
	c.vm.kill("its agent's stream of events doesn't work")
}

// event handles one event. Its content is the guest's: ids that the host doesn't know mean nothing.
func (c *container) event(e *api.Event, lastOOM *time.Time) {
	switch e := e.Event.(type) {
	case *api.Event_Exit:
		if p := c.known(e.Exit.GetId(), e.Exit.GetExecId()); p != nil {
			c.exited(p, e.Exit.GetStatus()&0xff)
		}
	case *api.Event_Oom:
		if c.known(e.Oom.GetId(), "") == nil || time.Since(*lastOOM) < oomInterval {
			return
		}
		*lastOOM = time.Now()
		c.events.Send(&eventsapi.TaskOOM{ContainerID: c.id})
	}
}

// known finds the process that an event is about.
func (c *container) known(id, execID string) *process {
	if id != c.id {
		c.strange.Do(func() { c.log.Warn("the guest tells of a container that it doesn't have", "id", guest.Text(id)) })
		return nil
	}
	if execID == "" {
		return c.init
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.execs[execID]
}

// remove stops the machine, of which this is the last container, and frees all that the container had on the host. The
// guest kills what is left, syncs and unmounts before. After an error the record still says what there is, and `shim
// delete` tries again.
func (c *container) remove() error {
	if err := c.vm.stop(); err != nil {
		return err
	}
	if err := runPoststop(c.hooks, c.id, c.bundle); err != nil {
		c.log.Warn("poststop", "error", err) // the specification wants them logged only
	}
	c.state.Undone = true
	return c.records.SaveState(c.state)
}

func runPoststop(h specs.Hooks, id, bundle string) error {
	return hooks.Run(context.Background(), "poststop", h.Poststop, specs.State{ID: id, Status: specs.StateStopped, Bundle: bundle})
}
