package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

const (
	// pingEvery is how long a stream of events may be silent, for the proxies on its way, and how long a revoked key may go on.
	pingEvery = 15 * time.Second
	// maxStreams is how many a team may have at once.
	maxStreams = 64
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

// streams are what answers with events, by pattern. Of Cube's own, beside E2B's.
func (s *Server) streams() map[string]func(*call, *events) error {
	return map[string]func(*call, *events) error{
		"GET /sandboxes/events":                  s.watch,
		"GET /sandboxes/{sandboxID}/logs/events": s.followLog,
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

// events is an answer in server-sent events (HTML, 9.2). It begins with the first of them, until which it can be refused.
type events struct {
	s  *Server
	x  *exchange
	mu sync.Mutex
}

// send sends an event. A client that doesn't take it in time is given up.
func (e *events) send(name string, data any) error { return e.sendAt("", name, data) }

// sendAt is send, for an event after which the client can go on by another stream: id is what it says then; "" is none.
func (e *events) sendAt(id, name string, data any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(data); err != nil { // one line
		panic(fmt.Errorf("encode an event: %w", err)) // it is made of our own types
	}
	text := fmt.Sprintf("event: %s\ndata: %s\n", name, b.Bytes())
	if id != "" {
		text = "id: " + id + "\n" + text
	}
	return e.write(text)
}

func (e *events) write(text string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	rc := http.NewResponseController(e.x)
	_ = rc.SetWriteDeadline(time.Now().Add(e.s.timeout(answerTimeout))) // there is none where it isn't known
	if e.x.status == 0 {
		e.x.streams = time.Now()
		e.s.counters.pending.Dec()
		h := e.x.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-store")
		e.x.WriteHeader(http.StatusOK)
	}
	if _, err := e.x.Write([]byte(text)); err != nil {
		return err
	}
	return rc.Flush()
}

// stream makes a handler of what tells events. It ends with the server, the client or the key.
func (s *Server) stream(f func(*call, *events) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := w.(*exchange)
		c, err := s.receive(x, r)
		if err == nil {
			err = s.beginStream(c.team)
		}
		if err != nil {
			s.refuse(x, r, err)
			return
		}
		defer s.endStream(c.team)
		ctx, cancel := context.WithCancelCause(c.ctx)
		c.ctx = ctx
		to := &events{s: s, x: x}
		var beside sync.WaitGroup
		beside.Go(func() { cancel(s.attend(ctx, c, to)) })
		err = f(c, to)
		cancel(nil)
		beside.Wait()
		switch {
		case err == nil || r.Context().Err() != nil:
		case x.streams.IsZero():
			s.refuse(x, r, err)
		default:
			body, _ := explain(err, x.id)
			if body.Code >= http.StatusInternalServerError {
				x.cause = err
			}
			_ = to.send(eventError, body) // the client may be what has failed
		}
	})
}

// beginStream counts a team's streams.
func (s *Server) beginStream(team string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streaming[team] >= maxStreams {
		return errdefs.ErrResourceExhausted.WithMessage(fmt.Sprintf("the team has %d streams of events open, which is the most it may have", maxStreams))
	}
	s.streaming[team]++
	return nil
}

func (s *Server) endStream(team string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streaming[team]--; s.streaming[team] == 0 {
		delete(s.streaming, team)
	}
}

var errStopping = errdefs.ErrUnavailable.WithMessage("cube is being stopped")

// attend keeps a stream from being silent, and tells why it has to end before ctx does.
func (s *Server) attend(ctx context.Context, c *call, to *events) error {
	tick := time.NewTicker(s.timeout(pingEvery))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.stopping:
			return errStopping
		case <-tick.C:
		}
		if _, err := s.keys.Authenticate(ctx, c.key); errdefs.IsUnauthorized(err) {
			return unauthorized(err)
		}
		if err := to.write(":\n\n"); err != nil {
			return err
		}
	}
}
