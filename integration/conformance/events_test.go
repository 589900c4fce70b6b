package conformance

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	apievents "github.com/containerd/containerd/api/events"
	eventsapi "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/emptypb"
)

// recorder is containerd's events service: it keeps what the shims tell, in order.
type recorder struct {
	mu      sync.Mutex
	byID    map[string][]string
	strange []string
	changed chan struct{} // closed, and replaced, with every event
}

func newRecorder() *recorder {
	return &recorder{byID: map[string][]string{}, changed: make(chan struct{})}
}

// Forward implements the service.
func (r *recorder) Forward(_ context.Context, req *eventsapi.ForwardRequest) (*emptypb.Empty, error) {
	e := req.Envelope
	id, text, err := describe(e.Event, e.Topic)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err != nil:
		r.strange = append(r.strange, fmt.Sprintf("%s: %v", e.Topic, err))
	case e.Namespace != namespace || e.Timestamp == nil:
		r.strange = append(r.strange, fmt.Sprintf("%s in namespace %q at %v", text, e.Namespace, e.Timestamp))
	}
	r.byID[id] = append(r.byID[id], text)
	close(r.changed)
	r.changed = make(chan struct{})
	return &emptypb.Empty{}, nil
}

// describe is an event in a few words: what, of the container's init or which exec, and the exit status.
func describe(a typeurl.Any, topic string) (id, text string, err error) {
	v, err := typeurl.UnmarshalAny(a)
	if err != nil {
		return "", "", err
	}
	var want string
	pid := uint32(1)
	switch e := v.(type) {
	case *apievents.TaskCreate:
		id, pid, want, text = e.ContainerID, e.Pid, "create", "create"
	case *apievents.TaskStart:
		id, pid, want, text = e.ContainerID, e.Pid, "start", "start"
	case *apievents.TaskExecAdded:
		id, want, text = e.ContainerID, "exec-added", "exec-added "+e.ExecID
	case *apievents.TaskExecStarted:
		id, pid, want, text = e.ContainerID, e.Pid, "exec-started", "exec-started "+e.ExecID
	case *apievents.TaskExit:
		who := e.ID
		if who == e.ContainerID {
			who = "init"
		}
		id, pid, want, text = e.ContainerID, e.Pid, "exit", fmt.Sprintf("exit %s %d", who, e.ExitStatus)
		if at := e.ExitedAt.AsTime(); time.Since(at).Abs() > time.Hour {
			err = fmt.Errorf("exited at %v", at)
		}
	case *apievents.TaskDelete:
		id, pid, want, text = e.ContainerID, e.Pid, "delete", fmt.Sprintf("delete %d", e.ExitStatus)
	case *apievents.TaskOOM:
		id, want, text = e.ContainerID, "oom", "oom"
	case *apievents.TaskPaused:
		id, want, text = e.ContainerID, "paused", "paused"
	case *apievents.TaskResumed:
		id, want, text = e.ContainerID, "resumed", "resumed"
	case *apievents.TaskCheckpointed:
		id, want, text = e.ContainerID, "checkpointed", "checkpointed"
	default:
		return "", "", fmt.Errorf("event %T", v)
	}
	switch {
	case topic != "/tasks/"+want:
		err = fmt.Errorf("%q has this topic", text)
	case pid == 0:
		err = fmt.Errorf("%q has no pid", text)
	}
	return id, text, err
}

// of are the events of a container so far.
func (r *recorder) of(id string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.byID[id])
}

// await waits for an event of a container that begins so.
func (r *recorder) await(ctx context.Context, id, prefix string) error {
	for {
		r.mu.Lock()
		seen, changed := slices.Clone(r.byID[id]), r.changed
		r.mu.Unlock()
		if slices.ContainsFunc(seen, func(e string) bool { return strings.HasPrefix(e, prefix) }) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("no event %q among %q", prefix, seen)
		}
	}
}

// orderly checks what holds for the events of every container: each happens once, starts before ends, init's end after
// those of the execs, and nothing after the delete.
func orderly(events []string) error {
	at := func(prefix string) int {
		return slices.IndexFunc(events, func(e string) bool { return e == prefix || strings.HasPrefix(e, prefix+" ") })
	}
	initExit, deleted := at("exit init"), at("delete")
	for i, e := range events {
		what, who, _ := strings.Cut(e, " ")
		who, _, _ = strings.Cut(who, " ")
		key := what
		if what == "exit" || what == "exec-added" || what == "exec-started" {
			key += " " + who
		}
		if what == "paused" || what == "resumed" || what == "oom" {
			continue
		}
		after := ""
		switch {
		case at(key) != i:
			return fmt.Errorf("%q comes twice", key)
		case what == "create" && i != 0, what != "create" && i == 0:
			return fmt.Errorf("%q is number %d", e, i)
		case what == "delete" && i != len(events)-1:
			return fmt.Errorf("%q comes after the delete", events[i+1])
		case what == "exec-started":
			after = "exec-added " + who
		case what == "exit" && who != "init":
			after = "exec-started " + who
			if initExit >= 0 && initExit < i {
				return fmt.Errorf("%q comes after init's", e)
			}
		}
		if after != "" && (at(after) < 0 || at(after) > i) {
			return fmt.Errorf("%q comes before %q", e, after)
		}
	}
	if started := at("start"); started >= 0 && (initExit < started || deleted >= 0 && deleted < initExit) {
		return fmt.Errorf("start, exit or delete is missing or out of order")
	}
	return nil
}
