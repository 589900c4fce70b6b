package builds

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/registry"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// Carrier takes templates from registries and has them there: a templates.Builder.
type Carrier interface {
	// Look finds out what a registry has by a name.
	Look(ctx context.Context, from string, r *templates.Registry) (templates.Artefact, error)
	// Push has a registry have a build, and returns the name that it has by its digest.
	Push(ctx context.Context, of db.Build, to string, r *templates.Registry, tell registry.Report) (at string, err error)
}

// PullRequest asks for a template of a registry.
type PullRequest struct {
	Team string `json:"team"`
	// From is REGISTRY/REPOSITORY[:TAG|@DIGEST], and Name what the template is to be called here, as in Request.
	From   string   `json:"from"`
	Name   string   `json:"name"`
	Tags   []string `json:"tags,omitempty"`
	Public bool     `json:"public,omitempty"`
}

// Pull asks for a build that is what a registry has by a name at this moment. What it takes is found out before anything is fetched.
func (s *Service) Pull(ctx context.Context, r PullRequest, as *templates.Registry) (Created, error) {
	if err := s.ready(); err != nil {
		return Created{}, err
	}
	if ref, err := db.ParseRef(r.Name); err != nil || ref.Team != "" && ref.Team != r.Team {
		return Created{}, bad("%.200q can't be the name of a template of team %s: NAME[:TAG] is of a-z, 0-9, - and _", r.Name, r.Team)
	}
	a, err := s.Carrier.Look(ctx, r.From, as)
	if err != nil {
		return Created{}, err
	}
	set := a.Settings
	plan := Plan{Artefact: a.Name, User: set.User, Workdir: set.Workdir, Run: set.Run, Ready: set.Ready, Start: set.Start, Hook: set.Hook, Profile: admission.Profile(set.Profile)}
	if err := plan.check(); err != nil {
		return Created{}, fmt.Errorf("%s: %w", a.Name, err)
	}
	made, err := s.Create(ctx, Request{Team: r.Team, Name: r.Name, Tags: r.Tags, Public: r.Public, CPUs: a.CPUs, MemoryMB: a.MemoryMB, DiskMB: a.DiskMB})
	if err != nil {
		return Created{}, err
	}
	if err := s.Start(ctx, r.Team, db.Ref{Name: made.Template}, made.Build, plan, as); err != nil {
		s.giveUp(ctx, made.Build)
		return Created{}, err
	}
	return made, nil
}

// Push has a registry have what a tag of a template of the team's own stands for, and returns the name that it has there by its digest.
// It is given up when ctx ends, and can be begun again: what has been sent by then stays there.
func (s *Service) Push(ctx context.Context, team string, of db.Ref, to string, as *templates.Registry, tell registry.Report) (at string, err error) {
	if err := s.ready(); err != nil {
		return "", err
	}
	if err := s.Audit.Ready(); err != nil {
		return "", err
	}
	t, err := s.ownTemplate(ctx, team, of)
	if err != nil {
		return "", err
	}
	if t.Snapshot {
		return "", errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("'%s' is a snapshot of a sandbox, with its secrets in memory: `cube template create` makes a template of a sandbox's disk", of))
	}
	_, b, err := s.db.Resolve(ctx, team, db.Ref{Team: t.Team, Name: t.ID, Tag: of.Tag})
	if errdefs.IsNotFound(err) {
		return "", of.NotFound()
	}
	if err != nil {
		return "", err
	}
	defer func() {
		e := audit.Entry{Action: audit.Push, By: audit.Of(ctx), Team: team, Template: t.ID, Build: b.ID}
		e.Result, e.Error = audit.Outcome(err)
		s.Audit.Record(e)
	}()
	ctx, leave, err := s.enter(ctx)
	if err != nil {
		return "", err
	}
	defer leave()
	done, err := s.engine.Keep(ctx, b.ID)
	if err != nil {
		return "", err
	}
	defer done()
	began := time.Now()
	at, err = s.Carrier.Push(ctx, b, to, as, tell)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err == nil {
		s.Log.Info("a template was pushed", "team", team, "build", b.ID, "to", at, "took", time.Since(began).Round(time.Millisecond))
	}
	return at, err
}

// enter has something be waited for when the service is closed, which ends its context.
func (s *Service) enter(ctx context.Context) (bounded context.Context, leave func(), err error) {
	s.mu.Lock()
	open := s.open
	if open {
		s.group.Add(1)
	}
	s.mu.Unlock()
	if !open {
		return nil, nil, errClosing
	}
	limit := s.Timeout(buildTimeout)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.life, func() { cancel(errClosing) })
	ctx, expire := context.WithTimeoutCause(ctx, limit, late{limit})
	return ctx, func() {
		expire()
		stop()
		cancel(nil)
		s.group.Done()
	}, nil
}
