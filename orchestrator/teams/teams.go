// Package teams removes a team with all that it has, and proves that nothing is left. What teams have is of other packages: each
// says so by an Asset for each kind of it.
package teams

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// Asset is one kind of what teams have.
type Asset struct {
	// Kind names it: "sandboxes".
	Kind string
	// List names all that a team has of it, what is half made or half removed, too. It looks where the things are, not only where
	// they are written down.
	List func(ctx context.Context, team string) ([]string, error)
	// Remove removes all that a team has of it, and ends what is making more: the team is closed then (see db.CloseTeam). It may be
	// called again. What it can't remove keeps it from nothing else, and List tells of it.
	Remove func(ctx context.Context, team string) error
	// Left tells which of what List has named is still anywhere on this host; nil is what List tells then.
	Left func(ctx context.Context, names []string) ([]string, error)
	// Why says what keeps one of it, "" if that isn't known; it may be nil.
	Why func(name string) string
}

// Item is one thing that a team had, or has.
type Item struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
	Why  string `json:"why,omitempty"` // it is still there
}

// Report is what has come of a purge.
type Report struct {
	Team    string `json:"team"`
	Removed []Item `json:"removed"`
	// Left is what is still there. If there is nothing, the team is gone.
	Left []Item `json:"left"`
	// Failed says what went wrong, a line each.
	Failed []string `json:"failed,omitempty"`
}

// Done tells whether nothing is left.
func (r Report) Done() bool { return len(r.Left) == 0 && len(r.Failed) == 0 }

// Purger removes teams.
type Purger struct {
	DB    *db.DB
	Audit audit.Recorder
	// Assets are all that teams have, in the order in which it can be removed.
	Assets []Asset
}

// Purge removes all that a team has, and then the team, so that nothing of it is in the database any more; entries of the audit log
// stay. Nothing can be made for the team from the beginning on. It may be cut short anywhere: another one goes on, and what is left
// is found again, as rows go after what they are about.
func (p *Purger) Purge(ctx context.Context, team string) (r Report, err error) {
	r = Report{Team: team, Removed: []Item{}, Left: []Item{}}
	by := audit.Of(ctx)
	defer func() {
		failed := err
		if failed == nil && !r.Done() {
			failed = errdefs.ErrFailedPrecondition
		}
		entry := audit.Entry{Action: audit.Purge, By: by, Team: team}
		entry.Result, entry.Error = audit.Outcome(failed)
		p.Audit.Record(entry)
	}()
	known, err := p.known(ctx, team)
	if err != nil {
		return r, err
	}
	if !known {
		return r, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("there is no team %s: `cube team ls` lists them", team))
	}
	if err := p.DB.CloseTeam(ctx, team); err != nil {
		return r, err
	}
	purging := by
	purging.Via = audit.Purging
	ctx = audit.With(ctx, purging)
	had := make([][]string, len(p.Assets))
	for i, a := range p.Assets { // all before any is removed: one may be how another is found
		if had[i], err = a.List(ctx, team); err != nil {
			return r, fmt.Errorf("look for the %s of team %s: %w", a.Kind, team, err)
		}
	}
	for _, a := range p.Assets {
		if err := a.Remove(ctx, team); err != nil {
			r.Failed = append(r.Failed, a.Kind+": "+err.Error())
		}
	}
	for i, a := range p.Assets {
		left, err := a.left(ctx, team, had[i])
		if err != nil {
			r.Failed = append(r.Failed, a.Kind+": "+err.Error())
			left = had[i] // as far as anybody knows
		}
		for _, name := range had[i] {
			if !slices.Contains(left, name) {
				r.Removed = append(r.Removed, Item{Kind: a.Kind, Name: name})
			}
		}
		for _, name := range left {
			item := Item{Kind: a.Kind, Name: name}
			if a.Why != nil {
				item.Why = a.Why(name)
			}
			r.Left = append(r.Left, item)
		}
	}
	if !r.Done() {
		return r, nil
	}
	if err := p.DB.DropTeam(ctx, team); err != nil && !errdefs.IsFailedPrecondition(err) {
		return r, err
	}
	rows, err := p.DB.TeamRows(ctx, team)
	if err != nil {
		return r, err
	}
	for _, row := range rows {
		r.Left = append(r.Left, Item{Kind: "rows", Name: row})
	}
	return r, nil
}

// left is what there is of an asset that was to be removed.
func (a Asset) left(ctx context.Context, team string, had []string) ([]string, error) {
	left, err := a.List(ctx, team)
	if err != nil || a.Left == nil || len(had) == 0 {
		return left, err
	}
	more, err := a.Left(ctx, had)
	for _, name := range more {
		if !slices.Contains(left, name) {
			left = append(left, name)
		}
	}
	return left, err
}

// known tells whether a team is in the database, or anything is its.
func (p *Purger) known(ctx context.Context, team string) (bool, error) {
	all, err := p.DB.Teams(ctx)
	if err != nil || slices.ContainsFunc(all, func(t db.Team) bool { return t.ID == team }) {
		return err == nil, err
	}
	for _, a := range p.Assets {
		if names, err := a.List(ctx, team); err != nil || len(names) > 0 {
			return err == nil, err
		}
	}
	return false, nil
}
