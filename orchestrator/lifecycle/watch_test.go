package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// news is what one who watches is told, a word for each.
func (s *stand) news(ctx context.Context, of string) (next func() []string, ended chan error) {
	var mu sync.Mutex
	var all []string
	ended = make(chan error, 1)
	go func() {
		ended <- s.Watch(ctx, of, func(c Change) error {
			mu.Lock()
			defer mu.Unlock()
			if c.Full {
				all = append(all, fmt.Sprintf("all %d", len(c.Sandboxes)))
				return nil
			}
			for _, sb := range c.Sandboxes {
				all = append(all, sb.ID+" "+string(sb.State))
			}
			for _, id := range c.Gone {
				all = append(all, id+" gone")
			}
			return nil
		})
	}()
	return func() []string {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		told := all
		all = nil
		return told
	}, ended
}

// TestWatch: a team is told what its sandboxes do, and nothing of others'.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		ctx, cancel := context.WithCancel(t.Context())
		first := s.create(nil)
		next, ended := s.news(ctx, team)
		others, othersEnd := s.news(t.Context(), "blue")
		if told := next(); !slices.Equal(told, []string{"all 1"}) {
			t.Errorf("first: %v", told)
		}
		second := s.create(func(c *Create) { c.Timeout = 10 * time.Second })
		if told := next(); !slices.Equal(told, []string{second.ID + " running"}) {
			t.Errorf("a create: %v", told)
		}
		must(t, s.Pause(ctx, team, first.ID, true))
		if told := next(); !slices.Contains(told, first.ID+" paused") {
			t.Errorf("a pause: %v", told)
		}
		pass(11 * time.Second)
		if told := next(); !slices.Equal(told, []string{second.ID + " gone"}) {
			t.Errorf("a deadline: %v", told)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("its end: %v", err)
		}
		if told := others(); !slices.Equal(told, []string{"all 0"}) {
			t.Errorf("another team is told %v", told)
		}
		s.stop()
		if err := <-othersEnd; !errors.Is(err, errClosing) {
			t.Errorf("the engine's end: %v", err)
		}
	})
}

// TestFollowLog: a log is followed until its sandbox is gone, and only by its team.
func TestFollowLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		defer s.stop()
		sb := s.create(nil)
		var lines []string
		each := func(e LogEntry) error { lines = append(lines, e.Message); return nil }
		must(t, s.FollowLog(t.Context(), team, sb.ID, LogStart{Tail: -1}, false, each))
		if !slices.Equal(lines, []string{sb.ID + " has begun"}) {
			t.Errorf("what there is: %q", lines)
		}
		if err := s.FollowLog(t.Context(), "blue", sb.ID, LogStart{Tail: -1}, true, each); err == nil {
			t.Error("another team reads it")
		}
		lines = nil
		ended := make(chan error, 1)
		go func() { ended <- s.FollowLog(t.Context(), team, sb.ID, LogStart{Tail: -1}, true, each) }()
		pass(time.Second)
		must(t, s.Kill(t.Context(), team, sb.ID))
		must(t, <-ended)
		if !slices.Equal(lines, []string{sb.ID + " has begun", sb.ID + " has ended"}) {
			t.Errorf("followed: %q", lines)
		}
	})
}
