package proxy

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/ingress"
)

const (
	// lookupTimeout bounds a question that the control plane answers from memory, wakeTimeout one that takes a restore.
	lookupTimeout = 5 * time.Second
	wakeTimeout   = 2 * time.Minute
	// maxQuestions bounds the lookups at a time, so that a flood of made-up ids is the proxy's trouble and not the control plane's.
	maxQuestions = 64
	// maxTurns bounds how often a request begins anew because its sandbox has changed meanwhile.
	maxTurns = 4
	// A control plane that is away is asked for again after firstRetry, then more and more seldom.
	firstRetry = 20 * time.Millisecond
	lastRetry  = time.Second
)

// table is what this process knows of the routes: the lives of those that can be used, as the control plane tells of them.
// Without the control plane it goes on with what it knows. Whatever else is asked for, the control plane is asked: one that isn't
// here may have been made, or woken, a moment ago.
type table struct {
	routes ingress.Routes
	log    *slog.Logger
	scale  func(time.Duration) time.Duration

	turns chan struct{} // lookups under way

	mu      sync.Mutex
	lives   map[string]*life
	live    bool // the control plane tells of changes
	lookups map[string]*question
	wakes   map[string]*question
}

// question is something that the control plane is being asked, for all requests that want to know it.
type question struct {
	done  chan struct{}
	route ingress.Route
	err   error

	// What has been heard of the sandbox meanwhile, which makes an older answer worthless.
	seq   uint64
	stale bool
}

func newTable(routes ingress.Routes, log *slog.Logger, scale func(time.Duration) time.Duration) *table {
	return &table{
		routes: routes, log: log, scale: scale, turns: make(chan struct{}, maxQuestions),
		lives: map[string]*life{}, lookups: map[string]*question{}, wakes: map[string]*question{},
	}
}

// watch keeps the table as the control plane says, until ctx ends.
func (t *table) watch(ctx context.Context) {
	delay := firstRetry
	for ctx.Err() == nil {
		err := t.routes.Watch(ctx, func(u ingress.Update) error {
			delay = firstRetry
			t.apply(u)
			return nil
		})
		t.mu.Lock()
		was := t.live
		t.live = false
		t.mu.Unlock()
		if was && ctx.Err() == nil {
			t.log.Warn("the control plane is away; what is known goes on", "why", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
		delay = min(2*delay, lastRetry)
	}
}

// apply takes news, and ends the lives that are over.
func (t *table) apply(u ingress.Update) {
	var over []*life
	t.mu.Lock()
	if u.Full {
		if !t.live {
			t.log.Info("the control plane tells of all routes", "count", len(u.Routes))
		}
		t.live = true
		there := make(map[string]bool, len(u.Routes))
		for _, r := range u.Routes {
			there[r.SandboxID] = true
		}
		for id := range t.lives {
			if !there[id] {
				over = append(over, t.dropLocked(id))
			}
		}
		for _, questions := range []map[string]*question{t.lookups, t.wakes} {
			for _, q := range questions {
				q.stale = true // maybe another control plane's, whose Seq says nothing here
			}
		}
	}
	for _, r := range u.Routes {
		for _, questions := range []map[string]*question{t.lookups, t.wakes} {
			if q := questions[r.SandboxID]; q != nil {
				q.seq = max(q.seq, r.Seq)
			}
		}
		if l := t.lives[r.SandboxID]; !u.Full && l != nil && r.Seq < l.route.Seq {
			continue // a lookup was faster
		}
		over = append(over, t.putLocked(r))
	}
	for _, id := range u.Gone {
		for _, questions := range []map[string]*question{t.lookups, t.wakes} {
			if q := questions[id]; q != nil {
				q.stale = true
			}
		}
		over = append(over, t.dropLocked(id))
	}
	t.mu.Unlock()
	end(over)
}

// putLocked takes a route as it is, and returns the life that it ends.
func (t *table) putLocked(r ingress.Route) (over *life) {
	l := t.lives[r.SandboxID]
	if l != nil && r.Addr == l.route.Addr && r.Carries(l.route.Epoch) {
		l.route, l.doubted = r, false
		return nil
	}
	over = t.dropLocked(r.SandboxID)
	if r.Open() {
		t.lives[r.SandboxID] = newLife(r, t.scale)
	}
	return over
}

func (t *table) dropLocked(id string) *life {
	l := t.lives[id]
	delete(t.lives, id)
	return l
}

func end(lives []*life) {
	for _, l := range lives {
		if l != nil {
			l.end()
		}
	}
}

// close ends all lives.
func (t *table) close() {
	var all []*life
	t.mu.Lock()
	for id := range t.lives {
		all = append(all, t.dropLocked(id))
	}
	t.mu.Unlock()
	end(all)
}

// usable is the life that a request can be part of, with its route as it is, if one is known.
func (t *table) usable(id string) (*life, ingress.Route) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.usableLocked(id)
}

func (t *table) usableLocked(id string) (*life, ingress.Route) {
	l := t.lives[id]
	if l == nil || !l.route.Open() || l.doubted && !t.live {
		return nil, ingress.Route{}
	}
	return l, l.route
}

// doubt notes that a sandbox couldn't be reached. While nobody tells of changes its address may have become another's:
// nothing more is sent there until the control plane has said that it is the sandbox's.
func (t *table) doubt(id string, l *life) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lives[id] == l {
		l.doubted = true
	}
}

// enter makes a request part of its sandbox's life, which it wakes if need be. admit says whether the request may go to a
// route, which wakes it or not. One that is being rolled back is waited for. The error is admit's, or of the classes of
// ingress.Routes; NotFound also for a sandbox that can't be reached and isn't woken.
func (t *table) enter(ctx context.Context, id string, s *stream, admit func(r ingress.Route, wake bool) error) (ingress.Route, error) {
	for range maxTurns {
		if l, r := t.usable(id); l != nil {
			if err := admit(r, false); err != nil {
				return r, err
			}
			if l.join(s) {
				return r, nil
			}
			continue // it has just ended
		}
		r, err := t.ask(ctx, id, t.lookups, t.lookup)
		switch {
		case err != nil:
			return r, err
		case r.Open():
			continue
		case r.State == ingress.StateRewinding:
			err = admit(r, false)
		case !r.AutoResume:
			return r, errdefs.ErrNotFound
		default:
			err = admit(r, true)
		}
		if err != nil {
			return r, err
		}
		if err := t.askToWake(ctx, id); err != nil {
			return r, err
		}
	}
	return ingress.Route{}, errRestless
}

// errRestless is of a sandbox that is another one each time.
var errRestless = errdefs.ErrUnavailable.WithMessage("the sandbox changes all the time")

func (t *table) lookup(id string) (ingress.Route, error) {
	ctx, cancel := context.WithTimeout(context.Background(), t.scale(lookupTimeout))
	defer cancel()
	select {
	case t.turns <- struct{}{}:
		defer func() { <-t.turns }()
	case <-ctx.Done():
		return ingress.Route{}, errdefs.ErrUnavailable.WithMessage("too many sandboxes are being looked up")
	}
	return unavailable(t.routes.Lookup(ctx, id))
}

func (t *table) wake(id string) (ingress.Route, error) {
	ctx, cancel := context.WithTimeout(context.Background(), t.scale(wakeTimeout))
	defer cancel()
	began := time.Now()
	r, err := unavailable(t.routes.Wake(ctx, id))
	wakeSeconds.WithLabelValues(result(err)).Observe(time.Since(began).Seconds())
	return r, err
}

// unavailable takes an answer that is too late for one that couldn't be had.
func unavailable(r ingress.Route, err error) (ingress.Route, error) {
	if errdefs.IsDeadlineExceeded(err) || errdefs.IsCanceled(err) {
		err = errdefs.ErrUnavailable.WithMessage("the control plane takes too long")
	}
	return r, err
}

// ask waits for the answer to a question about a sandbox, which is put once for all who wait. What it says of an open
// route is in the table then.
func (t *table) ask(ctx context.Context, id string, questions map[string]*question, put func(id string) (ingress.Route, error)) (ingress.Route, error) {
	t.mu.Lock()
	q := t.askLocked(id, questions, put)
	t.mu.Unlock()
	return q.wait(ctx)
}

// askToWake is ask for a sandbox that was paused a moment ago, and may have been woken since.
func (t *table) askToWake(ctx context.Context, id string) error {
	t.mu.Lock()
	if l, _ := t.usableLocked(id); l != nil {
		t.mu.Unlock()
		return nil
	}
	q := t.askLocked(id, t.wakes, t.wake)
	t.mu.Unlock()
	_, err := q.wait(ctx)
	return err
}

func (t *table) askLocked(id string, questions map[string]*question, put func(id string) (ingress.Route, error)) *question {
	q := questions[id]
	if q == nil {
		q = &question{done: make(chan struct{})}
		questions[id] = q
		go t.answer(id, q, questions, put)
	}
	return q
}

func (q *question) wait(ctx context.Context) (ingress.Route, error) {
	select {
	case <-q.done:
		return q.route, q.err
	case <-ctx.Done():
		return ingress.Route{}, ctx.Err()
	}
}

func (t *table) answer(id string, q *question, questions map[string]*question, put func(id string) (ingress.Route, error)) {
	for turn := 1; ; turn++ {
		r, err := put(id)
		t.mu.Lock()
		if (q.stale || q.seq > r.Seq) && err == nil && turn < maxTurns {
			q.stale, q.seq = false, 0
			t.mu.Unlock()
			continue
		}
		var over *life
		switch {
		case err != nil:
		case q.stale || q.seq > r.Seq:
			err = errRestless
		default:
			over = t.putLocked(r)
		}
		q.route, q.err = r, err
		delete(questions, id)
		t.mu.Unlock()
		end([]*life{over})
		close(q.done)
		return
	}
}
