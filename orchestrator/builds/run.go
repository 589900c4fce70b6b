package builds

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

const (
	// buildTimeout bounds a build from its turn on.
	buildTimeout = time.Hour
	// writeTimeout bounds what is written of a build when it ends.
	writeTimeout = 10 * time.Second
)

// late says that a limit has passed.
type late struct{ limit time.Duration }

func (l late) Error() string { return fmt.Sprintf("not done within %v", l.limit) }
func (l late) Unwrap() error { return context.DeadlineExceeded }

// Product is what is known of a build that is ready.
type Product struct {
	Digest  string `json:"digest,omitempty"` // of the image that it was made of
	Base    string `json:"base,omitempty"`   // the build that it was made of
	Builder string `json:"builder,omitempty"`
	Inputs  string `json:"inputs,omitempty"`
}

// Reason is why a build is an error.
type Reason struct {
	Message string `json:"message"`
	// Step is "base", "finalize", or a step's number from 1 on; "" is none of them.
	Step string `json:"step,omitempty"`
	// Last are the last lines of what the step has written.
	Last []string `json:"last,omitempty"`
}

func (r Reason) encode() json.RawMessage {
	b, err := json.Marshal(r)
	if err != nil {
		panic(fmt.Errorf("encode a reason: %w", err)) // it is made of strings
	}
	return b
}

// reasonOf is what the users of a build are told of an error, and whether that is all there is to it.
func reasonOf(ctx context.Context, id string, err error) (r Reason, all bool) {
	var failed *templates.Failure
	cause := context.Cause(ctx)
	switch {
	case errors.Is(cause, errCanceled):
		return Reason{Message: canceled}, true
	case errors.Is(cause, errClosing):
		return Reason{Message: interrupted}, true
	case errors.As(err, &failed):
		r = Reason{Message: failed.Error(), Step: failed.Step}
		for _, line := range failed.Last {
			r.Last = append(r.Last, clean(line))
		}
		if cause != nil {
			r.Message = cause.Error() + ": " + r.Message
		}
		return r, true
	case cause != nil:
		return Reason{Message: cause.Error()}, true
	case templates.Told(err):
		return Reason{Message: err.Error(), Step: stepBase}, true
	}
	return Reason{Message: "internal error: the log of cube up has it under build " + id}, false
}

// stepBase is what comes before the first step.
const stepBase = "base"

// prepare has what a build needs stay until it has had its turn.
func (s *Service) prepare(j db.Job, p Plan, registry *templates.Registry) (*work, error) {
	var sums []string
	for _, step := range p.Steps {
		if step.Files != "" {
			sums = append(sums, step.Files)
		}
	}
	release, missing := s.uploads.pin(j.Team, sums)
	if missing != "" {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("steps: the files %s aren't here: upload them to where GET /templates/TEMPLATE/files/%[1]s says", missing))
	}
	return &work{id: j.ID, team: j.Team, plan: p, registry: registry, release: release}, nil
}

// build has a build made, whose turn it is, and writes down what has come of it.
func (s *Service) build(ctx context.Context, w *work) {
	log := s.Log.With("build", w.id, "team", w.team)
	limit := s.Timeout(buildTimeout)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, late{limit})
	defer cancel()
	began := time.Now()
	lines := newLog(s, w.id)
	j, err := s.make(ctx, w, lines)
	defer s.tell(w.id)
	defer func() {
		entry := audit.Entry{Action: audit.Build, By: w.plan.By, Team: w.team, Template: j.Template, Build: w.id}
		if entry.Result, entry.Error = audit.Outcome(err); err != nil && context.Cause(ctx) != nil {
			entry.Result, entry.Error = audit.Outcome(context.Cause(ctx))
		}
		s.Audit.Record(entry)
		state := db.JobReady
		if err != nil {
			state = db.JobError
		}
		s.measured.took.WithLabelValues(string(state)).Observe(time.Since(began).Seconds())
	}()
	if err == nil {
		log.Info("a template's build is ready", "took", time.Since(began).Round(time.Millisecond))
		return
	}
	reason, all := reasonOf(ctx, w.id, err)
	wctx, stop := context.WithTimeout(context.WithoutCancel(ctx), s.Timeout(writeTimeout))
	defer stop()
	switch gone := s.db.EndJob(wctx, w.id, reason.encode(), lines.end()); {
	case errdefs.IsNotFound(gone), errdefs.IsFailedPrecondition(gone):
		log.Info("a build that was canceled, or whose template was deleted, has been given up")
	case gone != nil: // the next Open does it
		log.Error("a build has come to nothing, which can't be written down", "error", err, "failed", gone)
	case !all:
		log.Error("a build has come to nothing", "error", err)
	default:
		log.Info("a build has come to nothing", "error", err)
	}
}

// make makes and publishes a build.
func (s *Service) make(ctx context.Context, w *work, lines *log) (j db.Job, err error) {
	if j, err = s.db.Job(ctx, w.id); err != nil {
		return j, err
	}
	if err := s.db.MoveJob(ctx, w.id, db.JobQueued, db.JobBuilding, nil); err != nil {
		return j, err
	}
	s.tell(w.id)
	recipe := templates.Recipe{
		Team: w.team, Image: w.plan.Image, Artefact: w.plan.Artefact, Registry: w.registry, User: w.plan.User, Workdir: w.plan.Workdir, Steps: w.plan.Steps, Run: w.plan.Run, Ready: w.plan.Ready, Start: w.plan.Start, Hook: w.plan.Hook,
		Force: w.plan.Force, CPUs: j.CPUs, MemoryMB: j.MemoryMB, DiskMB: j.DiskMB, Profile: w.plan.Profile,
	}
	if w.plan.Template != "" {
		done, err := s.base(ctx, w, &recipe)
		if err != nil {
			return j, err
		}
		defer done()
	}
	snapshot, done, err := s.engine.Begin(ctx, db.Build{ID: w.id, Team: w.team, Key: w.plan.By.Key, CreatedAt: time.Now(), CPUs: j.CPUs, MemoryMB: j.MemoryMB, DiskMB: recipe.DiskMB})
	if err != nil {
		return j, err
	}
	defer done()
	made, err := s.builder.Make(ctx, recipe, s.uploads, lines.tell, snapshot)
	if err != nil {
		return j, err
	}
	if err := context.Cause(ctx); err != nil {
		return j, err
	}
	product := Product{Digest: made.Digest, Builder: made.Builder, Inputs: made.Inputs}
	if recipe.Base != nil {
		product.Base = recipe.Base.ID
	}
	b, err := json.Marshal(product)
	if err != nil {
		return j, err
	}
	wctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.Timeout(writeTimeout))
	defer cancel()
	return j, s.db.PublishJob(wctx, w.id, made.DiskMB, made.Settings, b, lines.end())
}

// base finds the build that a recipe goes on from, which stays until done is called.
func (s *Service) base(ctx context.Context, w *work, r *templates.Recipe) (done func(), err error) {
	ref, err := db.ParseRef(w.plan.Template)
	if err != nil {
		return nil, err
	}
	_, base, err := s.db.Resolve(ctx, w.team, ref)
	if err != nil {
		return nil, fmt.Errorf("fromTemplate: %w", err)
	}
	if done, err = s.engine.Keep(ctx, base.ID); err != nil {
		return nil, fmt.Errorf("fromTemplate: %w", err)
	}
	r.Base = &base
	return done, nil
}

var _ templates.Files = (*Uploads)(nil)

// level is a level of a log as the database has it.
func level(l lifecycle.Level) int {
	switch l {
	case lifecycle.Debug:
		return 0
	case lifecycle.Warn:
		return 2
	case lifecycle.Error:
		return 3
	}
	return 1
}

// levels are those that the database has.
var levels = [...]lifecycle.Level{lifecycle.Debug, lifecycle.Info, lifecycle.Warn, lifecycle.Error}
