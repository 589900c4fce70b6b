package qmp

import (
	"encoding/json"
	"slices"
	"sync/atomic"
	"time"
)

// eventBuffer is how many events a subscriber may be behind before it loses some.
const eventBuffer = 64

// Event is something that QEMU says unasked.
type Event struct {
	Name string
	Data json.RawMessage // nil where the event has none
	Time time.Time       // by QEMU's clock
}

// Subscription receives events until it or the session is closed.
type Subscription struct {
	client *Client
	names  []string
	c      chan Event
	lost   atomic.Uint64
}

// Subscribe asks for the events of those names, of all without any. On a session that has ended, C is closed.
func (c *Client) Subscribe(names ...string) *Subscription {
	s := &Subscription{client: c, names: names, c: make(chan Event, eventBuffer)}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		close(s.c)
		return s
	}
	c.subs[s] = struct{}{}
	return s
}

// C delivers the events, and is closed after the last one.
func (s *Subscription) C() <-chan Event { return s.c }

// Lost counts the events that came while the buffer was full.
func (s *Subscription) Lost() uint64 { return s.lost.Load() }

// Close ends the subscription. Idempotent.
func (s *Subscription) Close() {
	s.client.mu.Lock()
	defer s.client.mu.Unlock()
	if _, ok := s.client.subs[s]; ok {
		delete(s.client.subs, s)
		close(s.c)
	}
}

// offer is called by the reader, which must not wait for anyone. The client's lock is held.
func (s *Subscription) offer(m message) {
	if len(s.names) > 0 && !slices.Contains(s.names, m.Event) {
		return
	}
	e := Event{
		Name: m.Event,
		Data: m.Data,
		Time: time.Unix(m.Timestamp.Seconds, m.Timestamp.Microseconds*int64(time.Microsecond)),
	}
	select {
	case s.c <- e:
	default:
		s.lost.Add(1)
	}
}
