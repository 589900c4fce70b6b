package lifecycle

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// alarms have something happen to sandboxes at a time, each one's latest.
type alarms struct {
	mu   sync.Mutex
	heap alarmHeap
	of   map[string]*alarm
	// sooner has room for one: there is an alarm before the one that is waited for.
	sooner chan struct{}
}

type alarm struct {
	id    string
	at    time.Time
	index int // in the heap
}

func newAlarms() *alarms {
	return &alarms{of: map[string]*alarm{}, sooner: make(chan struct{}, 1)}
}

// set sets a sandbox's alarm; a zero time has none.
func (a *alarms) set(id string, at time.Time) {
	// Deadlines are of the wall clock, as the database has them: one that is read and one that was set are the same.
	at = at.Round(0)
	a.mu.Lock()
	defer a.mu.Unlock()
	old := a.of[id]
	switch {
	case old == nil && at.IsZero():
		return
	case at.IsZero():
		heap.Remove(&a.heap, old.index)
		delete(a.of, id)
		return
	case old == nil:
		old = &alarm{id: id, at: at}
		a.of[id] = old
		heap.Push(&a.heap, old)
	default:
		old.at = at
		heap.Fix(&a.heap, old.index)
	}
	if a.heap[0] == old {
		select {
		case a.sooner <- struct{}{}:
		default:
		}
	}
}

// next takes the alarms that are due, and tells how long it is to the first that isn't.
func (a *alarms) next(now time.Time) (due []string, wait time.Duration, more bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.heap) > 0 && !a.heap[0].at.After(now) {
		one := heap.Pop(&a.heap).(*alarm)
		delete(a.of, one.id)
		due = append(due, one.id)
	}
	if len(a.heap) == 0 {
		return due, 0, false
	}
	return due, a.heap[0].at.Sub(now), true
}

// longestWait bounds a wait, for when the wall clock is set meanwhile: timers don't know.
const longestWait = time.Minute

// run calls ring with each sandbox whose alarm is due, until ctx ends. ring returns soon.
func (a *alarms) run(ctx context.Context, ring func(id string)) {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		due, wait, more := a.next(time.Now().Round(0))
		for _, id := range due {
			ring(id)
		}
		if more {
			t.Reset(min(wait, longestWait))
		} else {
			t.Stop()
		}
		select {
		case <-t.C:
		case <-a.sooner:
		case <-ctx.Done():
			return
		}
	}
}

type alarmHeap []*alarm

func (h alarmHeap) Len() int           { return len(h) }
func (h alarmHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h alarmHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}
func (h *alarmHeap) Push(x any) {
	one := x.(*alarm)
	one.index = len(*h)
	*h = append(*h, one)
}
func (h *alarmHeap) Pop() any {
	old := *h
	one := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return one
}
