// Package events keeps what the host has to hear of, in order and numbered, until the host says that it has it.
package events

import (
	"context"
	"log/slog"
	"sync"

	"github.com/cubesandbox/cube/guest-agent/api"
)

// limit bounds what is kept for a host that doesn't listen.
const limit = 4096

// Log is the list of events. Its zero value isn't ready; use NewLog.
type Log struct {
	mu      sync.Mutex
	last    uint64 // the newest event's number; numbers begin at 1
	kept    []*api.Event
	changed chan struct{} // closed, and replaced, when an event is added
}

// NewLog makes an empty log.
func NewLog() *Log { return &Log{changed: make(chan struct{})} }

// Add numbers an event and keeps it.
func (l *Log) Add(e *api.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	e.Sequence = l.last
	if len(l.kept) == limit {
		slog.Error("event lost: the host doesn't take them", "sequence", l.kept[0].Sequence)
		l.kept = l.kept[1:]
	}
	l.kept = append(l.kept, e)
	close(l.changed)
	l.changed = make(chan struct{})
}

// Follow forgets the events up to after, and passes all later ones to send, in order, until ctx ends or send fails.
func (l *Log) Follow(ctx context.Context, after uint64, send func(*api.Event) error) error {
	l.mu.Lock()
	l.kept = l.since(after)
	l.mu.Unlock()
	for {
		l.mu.Lock()
		pending, changed := l.since(after), l.changed
		l.mu.Unlock()
		for _, e := range pending {
			if err := send(e); err != nil {
				return err
			}
			after = e.Sequence
		}
		if len(pending) > 0 {
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// since returns the kept events with numbers > after. l.mu is held.
func (l *Log) since(after uint64) []*api.Event {
	for i, e := range l.kept {
		if e.Sequence > after {
			return l.kept[i:]
		}
	}
	return nil
}
