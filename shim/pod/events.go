package pod

import (
	"context"
	"log/slog"
	"sync"

	eventsapi "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/core/events"
	"github.com/containerd/containerd/v2/pkg/namespaces"
)

// Events publishes to containerd, one event after the other in the order of Send. Send never waits, so that containerd
// being slow or away holds nothing up here.
type Events struct {
	ctx  context.Context
	to   events.Publisher
	log  *slog.Logger
	done chan struct{}

	mu     sync.Mutex
	queue  []any
	closed bool
	wake   chan struct{} // holds one token when there is something to do
}

// NewEvents starts publishing for the containers of a namespace.
func NewEvents(namespace string, to events.Publisher, log *slog.Logger) *Events {
	e := &Events{
		ctx:  namespaces.WithNamespace(context.Background(), namespace),
		to:   to,
		log:  log,
		done: make(chan struct{}),
		wake: make(chan struct{}, 1),
	}
	go e.run()
	return e
}

// Send publishes an event after all those before it.
func (e *Events) Send(event any) {
	e.mu.Lock()
	if !e.closed {
		e.queue = append(e.queue, event)
	}
	e.mu.Unlock()
	e.poke()
}

// Close publishes what is queued and ends; it waits for that until ctx ends.
func (e *Events) Close(ctx context.Context) error {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.poke()
	select {
	case <-e.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *Events) poke() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

func (e *Events) run() {
	defer close(e.done)
	for range e.wake {
		for {
			event, more := e.next()
			if event == nil {
				if !more {
					return
				}
				break
			}
			if err := e.to.Publish(e.ctx, topic(event), event); err != nil {
				// The publisher tries again by itself.
				e.log.Warn("publish event", "topic", topic(event), "error", err)
			}
		}
	}
}

// next takes the oldest event; without one, more says whether any may come.
func (e *Events) next() (event any, more bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.queue) == 0 {
		return nil, !e.closed
	}
	event, e.queue = e.queue[0], e.queue[1:]
	return event, true
}

// topic is containerd's for an event.
func topic(event any) string {
	switch event.(type) {
	case *eventsapi.TaskCreate:
		return "/tasks/create"
	case *eventsapi.TaskStart:
		return "/tasks/start"
	case *eventsapi.TaskOOM:
		return "/tasks/oom"
	case *eventsapi.TaskExit:
		return "/tasks/exit"
	case *eventsapi.TaskDelete:
		return "/tasks/delete"
	case *eventsapi.TaskExecAdded:
		return "/tasks/exec-added"
	case *eventsapi.TaskExecStarted:
		return "/tasks/exec-started"
	case *eventsapi.TaskPaused:
		return "/tasks/paused"
	case *eventsapi.TaskResumed:
		return "/tasks/resumed"
	case *eventsapi.TaskCheckpointed:
		return "/tasks/checkpointed"
	}
	return "/tasks/?"
}
