package sandbox

import (
	"context"
	"fmt"
	"time"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/typeurl/v2"
)

// hailInterval is how often the own event is sent until it comes back: containerd doesn't say when it begins to listen.
const hailInterval = 100 * time.Millisecond

// Watch calls changed with each container of which a task has begun or ended, until ctx ends or containerd does. It calls ready
// when nothing from then on is left out.
func (c *Client) Watch(ctx context.Context, ready func(), changed func(id string)) error {
	ctx, cancel := context.WithCancel(c.context(ctx))
	defer cancel()
	own := "/cube/watch/" + randomID()
	told, errs := c.ctrd.Subscribe(ctx, fmt.Sprintf("namespace==%q,topic~=%q", c.cfg.Containerd.Namespace, "^/tasks/(start|exit|delete)$"), fmt.Sprintf("topic==%q", own))
	hail := time.NewTicker(c.cfg.Timeout(hailInterval))
	defer hail.Stop()
	waits := hail.C
	for {
		if waits != nil {
			if err := c.ctrd.EventService().Publish(ctx, own, &eventsapi.NamespaceUpdate{Name: c.cfg.Containerd.Namespace}); err != nil {
				return fmt.Errorf("listen to containerd: %w", err)
			}
		}
		select {
		case e := <-told:
			if e.Topic != own {
				if id := about(e); id != "" {
					changed(id)
				}
			} else if waits != nil {
				waits = nil
				ready()
			}
		case <-waits:
		case err := <-errs:
			if err == nil {
				err = context.Cause(ctx)
			}
			return fmt.Errorf("listen to containerd: %w", err)
		}
	}
}

// about is the container that an event is about; "" if it is about one of its further processes.
func about(e *events.Envelope) string {
	v, err := typeurl.UnmarshalAny(e.Event)
	if err != nil {
		return ""
	}
	switch v := v.(type) {
	case *eventsapi.TaskStart:
		return v.ContainerID
	case *eventsapi.TaskExit:
		if v.ID == v.ContainerID {
			return v.ContainerID
		}
	case *eventsapi.TaskDelete:
		if v.ID == "" || v.ID == v.ContainerID {
			return v.ContainerID
		}
	}
	return ""
}
