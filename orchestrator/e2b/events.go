package e2b

import (
	"fmt"
	"net/http"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// Names of events.
const (
	eventAll     = "sandboxes" // all that there are, whatever was told before
	eventChanged = "changed"
	eventGone    = "gone"
	eventLog     = "log"
	eventEnd     = "end"   // there is nothing more to tell
	eventError   = "error" // why there is nothing more to tell
)

// streams are what answers bit by bit, by pattern. Of Cube's own, beside E2B's.
func (s *Server) streams() map[string]http.Handler {
	return map[string]http.Handler{
		"GET /sandboxes/events":                  stream(s, newEvents, s.watch),
		"GET /sandboxes/{sandboxID}/logs/events": stream(s, newEvents, s.followLog),
		"POST /batch":                            stream(s, newBatchLines, s.batch),
	}
}

// watch tells of the team's sandboxes as long as the client listens.
func (s *Server) watch(c *call, to *events) error {
	if err := c.checked(); err != nil {
		return err
	}
	return s.engine.Watch(c.ctx, c.team, func(change lifecycle.Change) error {
		if change.Full {
			return to.send(eventAll, listedAll([]listedBody{}, change.Sandboxes))
		}
		for _, id := range change.Gone {
			if err := to.send(eventGone, map[string]string{"sandboxID": id}); err != nil {
				return err
			}
		}
		for _, sb := range change.Sandboxes {
			if err := to.send(eventChanged, listed(sb)); err != nil {
				return err
			}
		}
		return nil
	})
}

// followLog tells of a sandbox's log.
func (s *Server) followLog(c *call, to *events) error {
	id, err := c.sandbox()
	c.note(err)
	from := lifecycle.LogStart{Tail: int(c.query.number("tail", -1, 0, logsMostV1)), After: c.lastEvent}
	follow := c.query.choice("follow", "false", "true") == "true"
	if err := c.checked(); err != nil {
		return err
	}
	if err := s.engine.FollowLog(c.ctx, c.team, id, from, follow, func(e lifecycle.LogEntry) error {
		return to.sendAt(e.Place, eventLog, entry(e))
	}); err != nil {
		return err
	}
	return to.send(eventEnd, struct{}{})
}

// events is an answer in server-sent events (HTML, 9.2).
type events struct{ *output }

func newEvents(o *output) *events {
	o.kind = "text/event-stream"
	return &events{o}
}

// send sends an event.
func (e *events) send(name string, data any) error { return e.sendAt("", name, data) }

// sendAt is send, for an event after which the client can go on by another stream: id is what it says then; "" is none.
func (e *events) sendAt(id, name string, data any) error {
	text := fmt.Sprintf("event: %s\ndata: %s\n", name, oneLine(data))
	if id != "" {
		text = "id: " + id + "\n" + text
	}
	return e.write(text)
}

func (e *events) ping() error               { return e.write(":\n\n") }
func (e *events) fail(body errorBody) error { return e.send(eventError, body) }
