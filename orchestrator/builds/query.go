package builds

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

// Build is a build as its users see it.
type Build struct {
	ID, Template, Team string
	State              db.JobState
	CreatedAt          time.Time
	UpdatedAt          time.Time
	FinishedAt         time.Time // zero while it is under way
	CPUs               int
	MemoryMB, DiskMB   int
	Tags               []string
	EnvdVersion        string   // "" unless that is known
	Plan               *Plan    // nil until it is started
	Reason             *Reason  // nil unless it is an error
	Product            *Product // nil unless it is ready
}

// Line is a line of a build's log.
type Line struct {
	At      time.Time       `json:"at"`
	Level   lifecycle.Level `json:"level"`
	Step    string          `json:"step,omitempty"` // "" is none
	Message string          `json:"message"`
}

// LogQuery says which lines of a build's log are asked for.
type LogQuery struct {
	Level    lifecycle.Level // and above; "" is all
	From     time.Time       // leaves out what is older, with Backward what is newer; zero leaves out nothing
	Backward bool            // newest first
	Offset   int             // lines that are passed over
	Limit    int
}

// Find finds a build of a template of the team's own.
func (s *Service) Find(ctx context.Context, team string, of db.Ref, id string) (Build, error) {
	t, err := s.ownTemplate(ctx, team, of)
	if err != nil {
		return Build{}, err
	}
	j, err := s.db.Job(ctx, id)
	switch {
	case errdefs.IsNotFound(err):
		return s.made(ctx, t, id)
	case err != nil:
		return Build{}, err
	case j.Template != t.ID:
		return Build{}, notFound(id)
	}
	return buildOf(j)
}

// made finds a build that was made otherwise.
func (s *Service) made(ctx context.Context, t db.Template, id string) (Build, error) {
	all, err := s.db.Builds(ctx, t.ID)
	if err != nil {
		return Build{}, err
	}
	i := slices.IndexFunc(all, func(b db.BuildInfo) bool { return b.ID == id })
	if i < 0 {
		return Build{}, notFound(id)
	}
	return madeOf(t, all[i]), nil
}

// madeOf is a build that was made otherwise.
func madeOf(t db.Template, b db.BuildInfo) Build {
	return Build{ID: b.ID, Template: t.ID, Team: t.Team, State: b.State, CreatedAt: b.CreatedAt, UpdatedAt: b.UpdatedAt, FinishedAt: b.FinishedAt,
		CPUs: b.CPUs, MemoryMB: b.MemoryMB, DiskMB: b.DiskMB, EnvdVersion: b.EnvdVersion}
}

func notFound(id string) error {
	return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("build '%s' not found", id))
}

func buildOf(j db.Job) (b Build, err error) {
	b = Build{ID: j.ID, Template: j.Template, Team: j.Team, State: j.State, CreatedAt: j.CreatedAt, UpdatedAt: j.UpdatedAt, FinishedAt: j.FinishedAt,
		CPUs: j.CPUs, MemoryMB: j.MemoryMB, DiskMB: j.DiskMB, Tags: j.Tags}
	if err := errors.Join(json.Unmarshal(j.Plan, &b.Plan), json.Unmarshal(j.Reason, &b.Reason), json.Unmarshal(j.Product, &b.Product)); err != nil {
		return b, errdefs.ErrDataLoss.WithMessage(fmt.Sprintf("build '%s' can't be read: %v", j.ID, err))
	}
	return b, nil
}

// ownTemplate is a template of the team's own.
func (s *Service) ownTemplate(ctx context.Context, team string, of db.Ref) (db.Template, error) {
	t, err := s.db.Template(ctx, team, of)
	if err == nil && t.Team != team {
		err = errdefs.ErrPermissionDenied.WithMessage(fmt.Sprintf("template '%s' is of another team", of))
	}
	return t, err
}

// Lines reads the log of a build.
func (s *Service) Lines(ctx context.Context, id string, q LogQuery) ([]Line, error) {
	f := db.LogFilter{From: q.From, Backward: q.Backward, Offset: q.Offset, Limit: q.Limit}
	if q.Level != "" {
		f.Level = level(q.Level)
	}
	all, err := s.db.JobLog(ctx, id, f)
	if err != nil {
		return nil, err
	}
	lines := make([]Line, 0, len(all))
	for _, l := range all {
		lines = append(lines, Line{l.At, levels[min(max(l.Level, 0), len(levels)-1)], l.Step, l.Message})
	}
	return lines, nil
}

// Follow waits until a build's log has more lines than offset, which it returns, or has ended.
func (s *Service) Follow(ctx context.Context, id string, offset, limit int) (Build, []Line, error) {
	defer s.tell(id) // whoever else waits for the same looks again
	for {
		news := s.news(id)
		j, err := s.db.Job(ctx, id)
		if err != nil {
			return Build{}, nil, err
		}
		lines, err := s.Lines(ctx, id, LogQuery{Offset: offset, Limit: limit})
		if err != nil {
			return Build{}, nil, err
		}
		if len(lines) > 0 || !j.FinishedAt.IsZero() {
			b, err := buildOf(j)
			return b, lines, err
		}
		select {
		case <-news:
		case <-ctx.Done():
			return Build{}, nil, context.Cause(ctx)
		case <-s.life.Done():
			return Build{}, nil, errClosing
		}
	}
}

// Start says what a build is to be of, which has its turn from now on. One that has been told already is
// errdefs.ErrFailedPrecondition.
func (s *Service) Start(ctx context.Context, team string, of db.Ref, id string, p Plan, registry *templates.Registry) error {
	if err := s.ready(); err != nil {
		return err
	}
	if err := s.Audit.Ready(); err != nil {
		return err
	}
	p.Secret, p.By = registry != nil, audit.Of(ctx)
	if err := p.check(); err != nil {
		return err
	}
	b, err := s.Find(ctx, team, of, id)
	if err != nil {
		return err
	}
	if b.State != db.JobWaiting {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("build '%s' is in the state %s already: ask for another build", id, b.State))
	}
	if p.Template != "" { // it may be another build's when it is its turn
		ref, err := db.ParseRef(p.Template)
		if err == nil {
			_, _, err = s.db.Resolve(ctx, team, ref)
		}
		if err != nil {
			return fmt.Errorf("fromTemplate: %w", err)
		}
	}
	w, err := s.prepare(db.Job{ID: id, Team: team}, p, registry)
	if err != nil {
		return err
	}
	if err := s.db.MoveJob(ctx, id, db.JobWaiting, db.JobQueued, p.encode()); err != nil {
		w.release()
		return err
	}
	s.enqueue(w)
	return nil
}

// Cancel gives up a build that is under way. It returns when nothing of it is left, unless ctx ends before.
func (s *Service) Cancel(ctx context.Context, id string) error {
	if err := s.ready(); err != nil {
		return err
	}
	if !s.cancel(ctx, id) {
		err := s.db.EndJob(ctx, id, Reason{Message: canceled}.encode(), nil)
		s.tell(id)
		return err
	}
	defer s.tell(id)
	for {
		news := s.news(id)
		if j, err := s.db.Job(ctx, id); err != nil || !j.FinishedAt.IsZero() {
			return err
		}
		select {
		case <-news:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Delete deletes a template or snapshot of the team's own, or a tag of it, and gives up what is under way for it. That sandboxes are
// of it is errdefs.ErrInvalidArgument.
func (s *Service) Delete(ctx context.Context, team, id string) error {
	if err := s.engine.DeleteSnapshot(ctx, team, id); err != nil {
		return err
	}
	s.mu.Lock()
	var all []string
	for _, w := range s.queue {
		all = append(all, w.id)
	}
	for id := range s.going {
		all = append(all, id)
	}
	s.mu.Unlock()
	for _, id := range all {
		if _, err := s.db.Job(ctx, id); errdefs.IsNotFound(err) {
			s.cancel(ctx, id)
		}
	}
	return nil
}

// SetPublic says whether all teams may use a template of the team's own, and returns it.
func (s *Service) SetPublic(ctx context.Context, team string, of db.Ref, public bool) (db.Template, error) {
	if _, err := s.ownTemplate(ctx, team, of); err != nil {
		return db.Template{}, err
	}
	if err := s.db.SetPublic(ctx, team, of, public); err != nil {
		return db.Template{}, err
	}
	return s.db.Template(ctx, team, of)
}

// AddTags has more tags stand for the build that one of a template of the team's own stands for, and returns its id.
func (s *Service) AddTags(ctx context.Context, team string, of db.Ref, tags []string) (build string, err error) {
	if _, err := s.ownTemplate(ctx, team, of); err != nil {
		return "", err
	}
	defer s.engine.Tidy() // what no tag stands for any more goes
	return s.db.AddTags(ctx, team, of, tags)
}

// RemoveTags has tags of a template of the team's own stand for nothing any more.
func (s *Service) RemoveTags(ctx context.Context, team string, of db.Ref, tags []string) error {
	if _, err := s.ownTemplate(ctx, team, of); err != nil {
		return err
	}
	defer s.engine.Tidy()
	return s.db.RemoveTags(ctx, team, of, tags)
}
