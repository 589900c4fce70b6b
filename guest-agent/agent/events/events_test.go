package events

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cubesandbox/cube/guest-agent/api"
)

var errEnough = errors.New("enough")

// take follows the log for n events.
func take(t *testing.T, l *Log, after uint64, n int) (got []uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	err := l.Follow(ctx, after, func(e *api.Event) error {
		if got = append(got, e.Sequence); len(got) == n {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		t.Fatalf("got %v, then %v", got, err)
	}
	return got
}

func TestFollowFromAnywhere(t *testing.T) {
	l := NewLog()
	for range 5 {
		l.Add(&api.Event{})
	}
	if got := take(t, l, 0, 5); fmt.Sprint(got) != "[1 2 3 4 5]" {
		t.Errorf("all: %v", got)
	}
	if got := take(t, l, 0, 5); fmt.Sprint(got) != "[1 2 3 4 5]" {
		t.Errorf("again, not acknowledged: %v", got)
	}
	if got := take(t, l, 3, 2); fmt.Sprint(got) != "[4 5]" {
		t.Errorf("after 3: %v", got)
	}
	if got := take(t, l, 0, 2); fmt.Sprint(got) != "[4 5]" {
		t.Errorf("the acknowledged are still there: %v", got)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := l.Follow(ctx, 5, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("nothing to send: %v", err)
	}
	if l.Add(&api.Event{}); len(l.kept) != 1 {
		t.Errorf("%d events are kept", len(l.kept))
	}
}

func TestFollowWhileAdding(t *testing.T) {
	l := NewLog()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 250 {
				l.Add(&api.Event{})
			}
		})
	}
	for i, n := range take(t, l, 0, 1000) {
		if n != uint64(i+1) {
			t.Fatalf("event %d has number %d", i+1, n)
		}
	}
	wg.Wait()
}

func TestBounded(t *testing.T) {
	l := NewLog()
	for range limit + 3 {
		l.Add(&api.Event{})
	}
	if got := take(t, l, 0, limit); got[0] != 4 || len(l.kept) != limit {
		t.Errorf("the first kept event is %d of %d", got[0], len(l.kept))
	}
}
