// Package builds has templates be built for those who ask for it: a build is written down before anything is done for it, waits for
// its client to say what is to be built, then for its turn, and becomes a version of its template or an error that says why. It keeps
// the files that clients upload for it, and its log. How a template is made of an image is not its concern.
package builds

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// Builder makes a machine's snapshot of a recipe, which is to have that name, and proves it: a templates.Builder. What a user has to
// know of an error is a *templates.Failure. After an error, or when ctx ends, nothing of it is left but maybe the snapshot.
type Builder interface {
	Make(ctx context.Context, r templates.Recipe, files templates.Files, tell templates.Report, snapshot string) (templates.Made, error)
}

// Engine owns machines' snapshots: a lifecycle.Engine.
type Engine interface {
	Ready() error
	Begin(ctx context.Context, b db.Build) (snapshot string, done func(), err error)
	Keep(ctx context.Context, build string) (done func(), err error)
	Snapshot(ctx context.Context, team, id, name string) (lifecycle.Snapshot, error)
	DeleteSnapshot(ctx context.Context, team, id string) error
	Tidy()
	SignUpload(to string) string
}

// Options are a service's.
type Options struct {
	Log *slog.Logger
	// Audit has each build that was started in the record, and none is started that couldn't be.
	Audit audit.Recorder
	// Timeout scales deadlines for this host.
	Timeout func(time.Duration) time.Duration
	// Concurrency is how many builds go on at once, others wait.
	Concurrency int
	// Limits bound how many templates a team has, and how many of its builds are under way.
	Limits *config.Limits
	// MaxCPUs and MaxMemoryMB are the most that a machine may have here; 0 is any.
	MaxCPUs, MaxMemoryMB int
	// DiskMB is the size of a sandbox's disk.
	DiskMB int
	// Carrier takes templates from registries and has them there.
	Carrier Carrier
	// Version is what the builder says that templates are made by, and Digest that of an image that is here.
	Version string
	Digest  func(ctx context.Context, image string) (string, error)
}

// Service has templates be built. All methods may be called from many goroutines.
type Service struct {
	Options
	db       *db.DB
	engine   Engine
	builder  Builder
	uploads  *Uploads
	measured collectors

	life    context.Context
	endLife context.CancelCauseFunc
	group   sync.WaitGroup // of builds that go on, and of what follows them

	mu     sync.Mutex // not held while anything else is waited for
	open   bool
	queue  []*work
	going  map[string]*work // by id, those of the queue that have their turn
	follow map[string]chan struct{}
}

// work is a build that waits for its turn or goes on.
type work struct {
	id, team string
	plan     Plan
	registry *templates.Registry     // of the plan, which isn't written down
	release  func()                  // lets its uploads go
	stop     context.CancelCauseFunc // nil before its turn
}

var (
	errClosing  = errdefs.ErrUnavailable.WithMessage("cube is being stopped")
	errCanceled = errdefs.ErrAborted.WithMessage("the build was canceled")
)

// New makes a service, which does nothing until it is open.
func New(d *db.DB, e Engine, b Builder, u *Uploads, o Options) *Service {
	s := &Service{Options: o, db: d, engine: e, builder: b, uploads: u, measured: newCollectors(), going: map[string]*work{}, follow: map[string]chan struct{}{}}
	s.life, s.endLife = context.WithCancelCause(context.Background())
	return s
}

// Open puts in order what the service of before has left: a build that was going on has come to nothing, and so has one whose
// registry wants a password, which is nowhere any more, or whose sandbox was being saved; others have their turn.
func (s *Service) Open(ctx context.Context) error {
	jobs, err := s.db.JobsUnderWay(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.open = true
	s.mu.Unlock()
	for _, j := range jobs {
		plan, err := decodePlan(j.Plan)
		if j.State == db.JobWaiting && plan.Sandbox == "" {
			continue
		}
		var w *work
		if err == nil && j.State == db.JobQueued && !plan.Secret {
			w, err = s.prepare(j, plan, nil)
		}
		if w != nil {
			s.enqueue(w)
			continue
		}
		reason := Reason{Message: interrupted}
		if err != nil {
			reason.Message = err.Error()
		}
		if err := s.db.EndJob(ctx, j.ID, reason.encode(), nil); err != nil {
			return err
		}
		s.leave(ctx, j.Team, plan)
		s.Log.Warn("a build that was under way has come to nothing", "build", j.ID, "team", j.Team, "reason", reason.Message)
	}
	return nil
}

// canceled is why a build is an error that somebody has given up.
const canceled = "canceled"

// interrupted is why a build is an error that was going on when cube was stopped, or died.
const interrupted = "interrupted: cube was stopped while it was under way: build again"

// Close gives up what goes on and returns when nothing of it is left. What waits for its turn has it after the next Open.
func (s *Service) Close() {
	s.mu.Lock()
	s.open = false
	for _, w := range s.queue {
		w.release()
	}
	s.queue = nil
	s.mu.Unlock()
	s.endLife(errClosing)
	s.group.Wait()
}

// ready tells what keeps the service from doing anything, nil if nothing does.
func (s *Service) ready() error {
	s.mu.Lock()
	open := s.open
	s.mu.Unlock()
	if !open {
		return errClosing
	}
	return s.engine.Ready()
}

// enqueue has a build wait for its turn.
func (s *Service) enqueue(w *work) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open {
		w.release() // it is written down, and has its turn after the next Open
		return
	}
	s.queue = append(s.queue, w)
	s.next()
}

// next gives builds their turns: first those of the teams of which the fewest go on, then those that have waited longest. mu is
// held.
func (s *Service) next() {
	for s.open && len(s.queue) > 0 && len(s.going) < s.Concurrency {
		count := map[string]int{}
		for _, w := range s.going {
			count[w.team]++
		}
		first := 0
		for i, w := range s.queue {
			if count[w.team] < count[s.queue[first].team] {
				first = i
			}
		}
		w := s.queue[first]
		s.queue = slices.Delete(slices.Clone(s.queue), first, first+1)
		ctx, stop := context.WithCancelCause(s.life)
		w.stop = stop
		s.going[w.id] = w
		s.group.Go(func() {
			s.build(ctx, w)
			s.leave(context.WithoutCancel(ctx), w.team, w.plan)
			stop(nil)
			w.release()
			s.mu.Lock()
			defer s.mu.Unlock()
			delete(s.going, w.id)
			s.next()
		})
	}
}

// cancel takes a build from the queue, or gives it up, which goes on then until it is undone.
func (s *Service) cancel(ctx context.Context, id string) (going bool) {
	var queued *work
	s.mu.Lock()
	w := s.going[id]
	if i := slices.IndexFunc(s.queue, func(w *work) bool { return w.id == id }); i >= 0 {
		queued = s.queue[i]
		s.queue = slices.Delete(slices.Clone(s.queue), i, i+1)
	}
	s.mu.Unlock()
	if queued != nil {
		queued.release()
		s.leave(ctx, queued.team, queued.plan)
	}
	if w != nil {
		w.stop(errCanceled)
	}
	return w != nil
}

// news is closed when there is something new of a build under way.
func (s *Service) news(id string) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.follow[id]
	if c == nil {
		c = make(chan struct{})
		s.follow[id] = c
	}
	return c
}

// tell tells those who follow a build that there is something new.
func (s *Service) tell(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.follow[id]; c != nil {
		close(c)
		delete(s.follow, id)
	}
}
