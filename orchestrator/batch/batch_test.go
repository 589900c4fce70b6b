package batch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// host has room for some sandboxes.
type host struct {
	mu    sync.Mutex
	room  int
	boxes map[string]lifecycle.Create
	made  int
	most  int // that there were at once
	asked int // creates that were refused
	// takes is how long a create and a command take.
	takes time.Duration
	// fails is asked before each create.
	fails func(n int) error
}

func newHost(room int) *host {
	return &host{room: room, boxes: map[string]lifecycle.Create{}, takes: time.Second}
}

func (h *host) Create(ctx context.Context, c lifecycle.Create) (lifecycle.Sandbox, error) {
	h.mu.Lock()
	h.made++
	id := fmt.Sprintf("i%d", h.made)
	var err error
	if h.fails != nil {
		err = h.fails(h.made)
	}
	if err == nil && len(h.boxes) >= h.room {
		h.asked++
		err = errdefs.ErrResourceExhausted.WithMessage("the team has its share")
	}
	if err != nil {
		h.mu.Unlock()
		return lifecycle.Sandbox{}, err
	}
	h.boxes[id] = c
	h.most = max(h.most, len(h.boxes))
	h.mu.Unlock()
	select {
	case <-time.After(h.takes):
		return lifecycle.Sandbox{ID: id}, nil
	case <-ctx.Done():
		h.mu.Lock()
		delete(h.boxes, id)
		h.mu.Unlock()
		return lifecycle.Sandbox{}, context.Cause(ctx)
	}
}

// Exec does what the variable DO says: work, fail, break or hang.
func (h *host) Exec(ctx context.Context, team, id, line string, out func(lifecycle.Output)) (lifecycle.Exit, error) {
	h.mu.Lock()
	c := h.boxes[id]
	h.mu.Unlock()
	out(lifecycle.Output{Bytes: []byte(c.Env["ITEM"] + " in " + id)})
	switch do := c.Env["DO"]; do {
	case "fail":
		out(lifecycle.Output{Stderr: true, Bytes: []byte("why")})
		return lifecycle.Exit{Code: 7, Status: "exit status 7"}, nil
	case "break":
		return lifecycle.Exit{}, errdefs.ErrUnavailable.WithMessage("its machine has ended")
	case "hang":
		<-ctx.Done()
		return lifecycle.Exit{}, context.Cause(ctx)
	}
	select {
	case <-time.After(h.takes):
		return lifecycle.Exit{}, nil
	case <-ctx.Done():
		return lifecycle.Exit{}, context.Cause(ctx)
	}
}

func (h *host) Kill(ctx context.Context, _, id string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.boxes[id]; !ok {
		return errdefs.ErrNotFound
	}
	delete(h.boxes, id)
	return nil
}

func (h *host) left() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.boxes)
}

func newBatch(h *host, n int) *Batch {
	b := &Batch{
		Request: Request{Create: lifecycle.Create{Team: "blue", Template: "base", Env: map[string]string{"DO": "work", "ALL": "1"}},
			Command: "work", Timeout: time.Minute, Deadline: time.Hour, Concurrency: 16},
		Sandboxes: h, Metrics: NewMetrics(prometheus.NewRegistry()), Log: slog.New(slog.DiscardHandler), Scale: func(d time.Duration) time.Duration { return d },
	}
	for i := range n {
		b.Envs = append(b.Envs, map[string]string{"ITEM": fmt.Sprint(i)})
	}
	return b
}

// collect runs a batch, and sees that each item has one result.
func collect(t *testing.T, ctx context.Context, b *Batch) (map[int]Result, Summary) {
	t.Helper()
	all := map[int]Result{}
	sum, err := b.Run(ctx, func(r Result) error {
		if _, twice := all[r.Index]; twice {
			t.Errorf("item %d has two results", r.Index)
		}
		all[r.Index] = r
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	counted := 0
	for _, n := range sum.Count {
		counted += n
	}
	if len(all) != len(b.Envs) || counted != len(b.Envs) || b.Progress() != (Progress{Done: len(b.Envs)}) {
		t.Errorf("%d results, %d counted, %+v, of %d items", len(all), counted, b.Progress(), len(b.Envs))
	}
	return all, sum
}

// TestWaitsForRoom: there are never more sandboxes than there is room for, nobody is refused for that, and whoever waits has one as soon
// as there can be.
func TestWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(5)
		all, sum := collect(t, t.Context(), newBatch(h, 200))
		for i, r := range all {
			if r.Status != OK || r.Exit == nil || r.SandboxID == "" || r.Made != time.Second || r.Ran != time.Second || !strings.HasPrefix(r.Stdout.String(), fmt.Sprintf("%d in %s", i, r.SandboxID)) {
				t.Errorf("item %d: %+v", i, r)
			}
		}
		if h.most != 5 || h.left() != 0 {
			t.Errorf("%d sandboxes at once, %d left", h.most, h.left())
		}
		// 40 times 5 of them, two seconds each.
		if sum.Took > 82*time.Second || h.asked > 3*200 {
			t.Errorf("it took %v and asked %d times in vain", sum.Took, h.asked)
		}
	})
}

// TestRoomOfOthers: where others have all the room, one item asks when its refusal has said, and all have their turn when there is some.
func TestRoomOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(0)
		time.AfterFunc(10*time.Minute, func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.room = 8
		})
		_, sum := collect(t, t.Context(), newBatch(h, 16))
		if sum.Count[OK] != 16 || h.most != 8 {
			t.Errorf("%+v, %d at once", sum, h.most)
		}
		if h.asked > 16+600+3*16 || sum.Took > 11*time.Minute {
			t.Errorf("it asked %d times in vain, and took %v", h.asked, sum.Took)
		}
	})
}

// TestOutcomes: each item has its own.
func TestOutcomes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(100)
		b := newBatch(h, 4)
		for i, do := range []string{"work", "fail", "break", "hang"} {
			b.Envs[i]["DO"] = do
		}
		all, sum := collect(t, t.Context(), b)
		if want := map[Status]int{OK: 1, Failed: 2, Timeout: 1}; !maps.Equal(sum.Count, want) || sum.Took != time.Second+time.Minute {
			t.Errorf("%+v", sum)
		}
		if r := all[1]; r.Exit.Code != 7 || r.Err != nil || r.Stderr.String() != "why" {
			t.Errorf("%+v", r)
		}
		if r := all[2]; r.Exit != nil || !errdefs.IsUnavailable(r.Err) {
			t.Errorf("%+v", r)
		}
		if r := all[3]; r.Exit != nil || !strings.Contains(r.Err.Error(), "longer than its timeout") || r.Ran != time.Minute {
			t.Errorf("%+v", r)
		}
		if h.left() != 0 {
			t.Errorf("%d left", h.left())
		}
	})
}

// TestNoSandbox: what can't be had is refused at once, what may pass is tried again, but not for ever.
func TestNoSandbox(t *testing.T) {
	errNone, errGone, errBroken := errdefs.ErrNotFound.WithMessage("template 'base' not found"), errdefs.ErrUnavailable.WithMessage("containerd has gone"), errors.New("disk error")
	for _, tc := range []struct {
		name   string
		fails  func(n int) error
		status Status
		err    error
		made   int
	}{
		{"for good", func(int) error { return errNone }, Refused, errNone, 1},
		{"broken", func(int) error { return errBroken }, Failed, errBroken, 1},
		{"for ever", func(int) error { return errGone }, Failed, errGone, mostTries},
		{"for a while", func(n int) error {
			if n < mostTries {
				return errGone
			}
			return nil
		}, OK, nil, mostTries},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := newHost(1)
			h.fails = tc.fails
			all, _ := collect(t, t.Context(), newBatch(h, 1))
			if r := all[0]; r.Status != tc.status || !errors.Is(r.Err, tc.err) || h.made != tc.made {
				t.Errorf("%s: %+v after %d creates", tc.name, r, h.made)
			}
		})
	}
}

// TestDeadline: at the batch's deadline, what runs is ended, and what hasn't had a sandbox is refused, with the reason that it had.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(2)
		b := newBatch(h, 50)
		b.Deadline, b.Timeout, b.Create.Env["DO"] = 10*time.Second, time.Hour, "hang"
		all, sum := collect(t, t.Context(), b)
		if want := map[Status]int{Timeout: 2, Refused: 48}; !maps.Equal(sum.Count, want) || sum.Took != b.Deadline || h.left() != 0 {
			t.Errorf("%+v, %d left", sum, h.left())
		}
		said := 0
		for _, r := range all {
			switch {
			case !strings.Contains(r.Err.Error(), "the batch's deadline has passed"):
				t.Errorf("%+v", r)
			case strings.Contains(r.Err.Error(), "the last refusal: the team has its share"):
				said++
			}
		}
		if said < 14 { // those that had a worker
			t.Errorf("%d say what they were refused for", said)
		}
	})
}

// TestGivenUp: when whoever wanted it is gone, nothing goes on, and nothing is left.
func TestGivenUp(t *testing.T) {
	gone := errors.New("the client has gone")
	for _, at := range []time.Duration{0, 500 * time.Millisecond, 1500 * time.Millisecond, 4500 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			h := newHost(10)
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(at, func() { cancel(gone) })
			began := time.Now()
			_, err := newBatch(h, 200).Run(ctx, func(Result) error { return nil })
			if !errors.Is(err, gone) || h.left() != 0 || time.Since(began) != at {
				t.Errorf("%v: %v after %v, %d left", at, err, time.Since(began), h.left())
			}
			h.takes = 0 // nothing more comes
			made := h.made
			time.Sleep(time.Minute)
			if h.made != made {
				t.Errorf("%v: creates go on", at)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		h, told := newHost(10), 0
		_, err := newBatch(h, 200).Run(t.Context(), func(Result) error {
			if told++; told == 3 {
				return gone
			}
			return nil
		})
		if !errors.Is(err, gone) || told != 3 || h.left() != 0 {
			t.Errorf("%v after %d results, %d left", err, told, h.left())
		}
	})
}

// TestAskedFor: what each sandbox is made with.
func TestAskedFor(t *testing.T) {
	b := newBatch(newHost(1), 2)
	b.Envs[1] = map[string]string{"ALL": "2"}
	b.MaxTimeout = 90 * time.Second
	first, second := b.create(0), b.create(1)
	if !first.Ephemeral || first.Timeout != 90*time.Second || first.Env["ALL"] != "1" || second.Env["ALL"] != "2" || b.Create.Env["ALL"] != "1" {
		t.Errorf("%+v, %+v", first, second)
	}
}

// TestText: the end of much output is kept, and whole characters.
func TestText(t *testing.T) {
	var x Text
	want := strings.Repeat("0123456789é", 20_000)
	for part := range slices.Chunk([]byte(want), 30_001) {
		x.add(part)
	}
	got := x.String()
	if !strings.HasSuffix(want, got) || len(got) < MaxText-3 || len(got) > MaxText || x.Omitted() != int64(len(want)-MaxText) {
		t.Errorf("%d bytes and %d omitted", len(got), x.Omitted())
	}
	var y Text
	y.add([]byte("a\xff\x00b"))
	if got := y.String(); got != "a\uFFFD\x00b" || y.Omitted() != 0 {
		t.Errorf("%q", got)
	}
}

// TestTextOfBytes: what comes byte by byte isn't moved with each of them, and doesn't grow.
func TestTextOfBytes(t *testing.T) {
	var x Text
	moved := 0
	for i := range 5*MaxText + 7 {
		before := len(x.end)
		x.add([]byte{byte('a' + i%26)})
		if len(x.end) <= before {
			moved++
		}
		if len(x.end) > 2*MaxText {
			t.Fatalf("%d bytes are held", len(x.end))
		}
	}
	if got := x.String(); moved > 5 || len(got) != MaxText || got[len(got)-1] != byte('a'+(5*MaxText+6)%26) || x.Omitted() != 4*MaxText+7 {
		t.Errorf("moved %d times, %d bytes are kept, %d omitted", moved, len(got), x.Omitted())
	}
}
