package hostile

import (
	"context"
	"math"
	"strings"

	"github.com/cubesandbox/cube/guest-agent/api"
)

// longID is longer than any id is.
var longID = strings.Repeat("\x1b\n", 16<<10)

// Events implements the API.
func (s *service) Events(_ context.Context, r *api.EventsRequest, to api.Agent_EventsServer) error {
	switch {
	case s.is(Silent + "Events"):
		<-s.session.Done()
		return nil
	case s.is(Die + "Events"):
		s.Die()
	}
	begun := s.begun
	for n := r.After + 1; ; n++ {
		var e *api.Event
		select {
		case e = <-s.exits:
		default:
			if s.armed.Load() && (s.is(Events) || s.is(Restless)) {
				e = s.lie(n)
				break
			}
			select {
			case e = <-s.exits:
			case <-begun:
				begun, n = nil, n-1
				continue
			case <-s.session.Done():
				return nil
			}
		}
		if e.Sequence == 0 {
			e.Sequence = n
		}
		if err := to.Send(e); err != nil || s.armed.Load() && s.is(Restless) {
			return err
		}
	}
}

// lie is an event that never was.
func (s *service) lie(n uint64) *api.Event {
	id := s.anyBox()
	switch n % 6 {
	case 0:
		return &api.Event{Event: &api.Event_Exit{Exit: &api.Exit{Id: longID, ExecId: longID, Status: math.MaxUint32}}}
	case 1:
		return &api.Event{Event: &api.Event_Exit{Exit: &api.Exit{Id: id, ExecId: "never-started", Status: math.MaxUint32}}}
	case 2:
		return &api.Event{Sequence: n / 2, Event: &api.Event_Exit{Exit: &api.Exit{Id: id, Status: 7}}}
	case 3:
		return &api.Event{}
	case 4:
		return &api.Event{Event: &api.Event_Exit{}}
	}
	return &api.Event{Event: &api.Event_Oom{Oom: &api.OOM{Id: id}}}
}

// anyBox is the id of a container that there is.
func (s *service) anyBox() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.boxes {
		return id
	}
	return "none"
}
