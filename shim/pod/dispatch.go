package pod

import (
	"context"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/guest"
)

const (
	// oomInterval bounds how often a guest can have containerd told of a container's out-of-memory kills.
	oomInterval = time.Second
	// streamRetries is how often in a row the stream of events may break before the machine is given up. One that has
	// lasted for streamLife has not broken at once.
	streamRetries = 5
	streamLife    = 10 * time.Second
)

// dispatch reads the agent's events until the machine is down, and hands them to the containers that they are about. A
// broken stream goes on where it was; the agent keeps what hasn't been acknowledged.
func (p *Pod) dispatch(v *vm) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-v.down:
			cancel()
		case <-ctx.Done():
		}
	}()
	after := v.lastEvent.Load()
	for broken := 0; broken < streamRetries; broken++ {
		began := time.Now()
		stream, err := v.guest.Events(ctx, &api.EventsRequest{After: after})
		for err == nil {
			var e *api.Event
			if e, err = stream.Recv(); err != nil {
				break
			}
			if e.Sequence <= after {
				continue
			}
			after = e.Sequence
			p.event(v, e)
			v.lastEvent.Store(after)
		}
		select {
		case <-ctx.Done():
			return
		case <-v.guest.Done(): // which the latch hears of, too
			return
		default:
		}
		v.log.Warn("the agent's stream of events broke", "error", err)
		if time.Since(began) > v.timeout(streamLife) {
			broken = 0
		}
	}
	v.kill("its agent's stream of events doesn't work")
}

// event handles one event. Its content is the guest's: ids that the host doesn't know mean nothing. Some of them are of
// containers that have just been deleted.
func (p *Pod) event(v *vm, e *api.Event) {
	switch e := e.Event.(type) {
	case *api.Event_Exit:
		if c := p.known(v, e.Exit.GetId()); c != nil {
			c.told(e.Exit)
		}
	case *api.Event_Oom:
		if c := p.known(v, e.Oom.GetId()); c != nil && time.Since(c.lastOOM) >= oomInterval {
			c.lastOOM = time.Now()
			c.events.Send(&eventsapi.TaskOOM{ContainerID: c.id})
		}
	}
}

// known finds the container that an event is about.
func (p *Pod) known(v *vm, id string) *container {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.slots {
		if s.c != nil && s.c.vm() == v && s.c.guestID == id {
			return s.c
		}
	}
	v.strange.Do(func() { v.log.Debug("the guest tells of a container that isn't here", "id", guest.Text(id)) })
	return nil
}
