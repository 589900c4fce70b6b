package lifecycle

import (
	"context"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// List lists a team's sandboxes by when they were started, and tells how many of all pages run. next is the zero Cursor at the end.
func (e *Engine) List(ctx context.Context, team string, f Filter) (page []Sandbox, next Cursor, running int, err error) {
	if err := e.Ready(); err != nil {
		return nil, Cursor{}, 0, err
	}
	q := db.Filter{Team: team, Metadata: f.Metadata, Since: f.StartedAfter, Ascending: f.Ascending, Page: db.Page{After: f.After.At, AfterID: f.After.ID, Limit: f.Limit + 1}}
	for s := range table {
		for _, asked := range f.States {
			if s.Shown() == asked {
				q.States = append(q.States, string(s))
			}
		}
		if len(f.States) == 0 && s.Shown() != "" {
			q.States = append(q.States, string(s))
		}
	}
	if f.Template != "" {
		ref, err := db.ParseRef(f.Template)
		if err != nil {
			return nil, Cursor{}, 0, err
		}
		if ref.Tag != "" {
			return nil, Cursor{}, 0, errdefs.ErrInvalidArgument.WithMessage("template: sandboxes are listed by a template's name or id, without a tag")
		}
		t, err := e.db.Template(ctx, team, ref)
		if errdefs.IsNotFound(err) {
			return nil, Cursor{}, 0, nil
		}
		if err != nil {
			return nil, Cursor{}, 0, err
		}
		q.Template = t.ID
	}
	rows, err := e.db.Sandboxes(ctx, q)
	if err != nil {
		return nil, Cursor{}, 0, err
	}
	q.States = slices.DeleteFunc(q.States, func(s string) bool { return State(s).Shown() != Running })
	if running, err = e.db.CountSandboxes(ctx, q); err != nil {
		return nil, Cursor{}, 0, err
	}
	if len(rows) > f.Limit {
		rows = rows[:f.Limit]
		last := rows[f.Limit-1]
		next = Cursor{At: last.StartedAt, ID: last.ID}
	}
	for _, s := range rows {
		r, err := decodeRow(s)
		if err != nil {
			return nil, Cursor{}, 0, err
		}
		page = append(page, e.sandbox(r))
	}
	return page, next, running, nil
}
