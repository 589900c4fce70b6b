package db

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// DefaultTag is the tag of what is asked for without one.
const DefaultTag = "default"

var (
	nameForm = regexp.MustCompile(`^[a-z0-9_-]{1,128}$`)
	tagForm  = regexp.MustCompile(`^[a-z0-9_.-]{1,128}$`)
)

// Template is what sandboxes are made of: a build for each of its tags. A snapshot of a sandbox is one, too.
type Template struct {
	ID, Team string
	// Public: all teams may use it.
	Public bool
	// Snapshot: it was made of a sandbox.
	Snapshot bool
	// Names are without the team, sorted.
	Names                []string
	CreatedAt, UpdatedAt time.Time
	SpawnedAt            time.Time // when a sandbox was last made of it, zero if never
	Spawns               int64
	Builds               int
}

// Ref is how users call a template or a snapshot: [TEAM/]NAME[:TAG], with an id for the name or not.
type Ref struct{ Team, Name, Tag string }

// ParseRef reads one; case doesn't matter. The error is errdefs.ErrInvalidArgument.
func ParseRef(s string) (Ref, error) {
	var r Ref
	rest := strings.ToLower(s)
	team, name, namespaced := strings.Cut(rest, "/")
	if namespaced {
		r.Team, rest = team, name
	}
	name, tag, tagged := strings.Cut(rest, ":")
	r.Name, r.Tag = name, tag
	if namespaced && !teamForm.MatchString(r.Team) || !nameForm.MatchString(r.Name) || tagged && !tagForm.MatchString(r.Tag) {
		return Ref{}, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%q is not a template: it is called [TEAM/]NAME[:TAG], the name of a-z, 0-9, - and _, the tag of those and dots", s))
	}
	return r, nil
}

func (r Ref) String() string {
	s := r.Name
	if r.Team != "" {
		s = r.Team + "/" + s
	}
	if r.Tag != "" {
		s += ":" + r.Tag
	}
	return s
}

// NotFound is the error of a template that isn't there for whoever asks.
func (r Ref) NotFound() error {
	return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("template '%s' not found", r))
}

const templateColumns = `t.id, t.team, t.public, t.snapshot, t.created, t.updated, t.spawned, t.spawns,
	(SELECT count(*) FROM build_jobs WHERE template = t.id) +
	(SELECT count(*) FROM builds b WHERE template = t.id AND NOT EXISTS (SELECT 1 FROM build_jobs j WHERE j.id = b.id)), (SELECT json_group_array(name) FROM names WHERE template = t.id)`

// fields are where templateColumns are scanned to; read completes the template with them.
func (t *Template) fields() (to []any, read func() error) {
	var created, updated, spawned int64
	var names []byte
	return []any{&t.ID, &t.Team, &t.Public, &t.Snapshot, &created, &updated, &spawned, &t.Spawns, &t.Builds, &names}, func() error {
		t.CreatedAt, t.UpdatedAt, t.SpawnedAt = at(created), at(updated), at(spawned)
		err := json.Unmarshal(names, &t.Names)
		slices.Sort(t.Names)
		return err
	}
}

// Template finds what a team calls so: one of its own, or a public one, which without a team in the name is DefaultTeam's. One
// that the team may not use isn't there.
func (d *DB) Template(ctx context.Context, team string, r Ref) (Template, error) {
	teams := []string{r.Team}
	if r.Team == "" {
		teams = []string{team, DefaultTeam}
	}
	for _, owner := range teams {
		var t Template
		to, read := t.fields()
		err := d.read.QueryRowContext(ctx, "SELECT "+templateColumns+` FROM templates t
			WHERE id = ifnull((SELECT template FROM names WHERE team = ?1 AND name = ?2), ?2) AND team = ?1 AND (team = ?3 OR public)`,
			owner, r.Name, team).Scan(to...)
		if errors.Is(err, sql.ErrNoRows) {
			continue
		}
		if err == nil {
			err = read()
		}
		return t, d.explain("read", err)
	}
	return Template{}, r.NotFound()
}

// Resolve finds the build that a team's name for a template stands for.
func (d *DB) Resolve(ctx context.Context, team string, r Ref) (Template, Build, error) {
	t, err := d.Template(ctx, team, r)
	if err != nil {
		return Template{}, Build{}, err
	}
	tag := r.Tag
	if tag == "" {
		tag = DefaultTag
	}
	var b Build
	to, read := b.fields()
	err = d.read.QueryRowContext(ctx, "SELECT "+buildColumns+" FROM tags JOIN builds b ON b.id = tags.build WHERE tags.template = ? AND tags.tag = ?", t.ID, tag).Scan(to...)
	if errors.Is(err, sql.ErrNoRows) {
		return Template{}, Build{}, r.NotFound()
	}
	if err == nil {
		err = read()
	}
	return t, b, d.explain("read", err)
}

// Tag is a tag of a template.
type Tag struct {
	Name, Build string // Build is its id
	AssignedAt  time.Time
}

// Tags lists a template's tags, by name.
func (d *DB) Tags(ctx context.Context, template string) ([]Tag, error) {
	rows, err := d.read.QueryContext(ctx, "SELECT tag, build, assigned FROM tags WHERE template = ? ORDER BY tag", template)
	return collect(d, rows, err, func(t *Tag) error {
		var assigned int64
		err := rows.Scan(&t.Name, &t.Build, &assigned)
		t.AssignedAt = at(assigned)
		return err
	})
}

// Page is a part of a list that is sorted by time, newest first: at most Limit entries behind one of that time and id.
type Page struct {
	After   time.Time // zero is the list's beginning
	AfterID string
	Limit   int
}

// bounds are what a page begins behind.
func (p Page) bounds() (int64, string) {
	if p.After.IsZero() {
		return 1<<63 - 1, ""
	}
	return stamp(p.After), p.AfterID
}

// Templates lists the templates that a team may use, without snapshots.
func (d *DB) Templates(ctx context.Context, team string, p Page) ([]Template, error) {
	before, id := p.bounds()
	rows, err := d.read.QueryContext(ctx, "SELECT "+templateColumns+` FROM templates t
		WHERE (team = ? OR public) AND NOT snapshot AND (created, id) < (?, ?) ORDER BY created DESC, id DESC LIMIT ?`, team, before, id, p.Limit)
	return collect(d, rows, err, func(t *Template) error {
		to, read := t.fields()
		return errors.Join(rows.Scan(to...), read())
	})
}

// AllTemplates lists the templates of all teams, without snapshots, newest first.
func (d *DB) AllTemplates(ctx context.Context) ([]Template, error) {
	rows, err := d.read.QueryContext(ctx, "SELECT "+templateColumns+" FROM templates t WHERE NOT snapshot ORDER BY created DESC, id DESC")
	return collect(d, rows, err, func(t *Template) error {
		to, read := t.fields()
		return errors.Join(rows.Scan(to...), read())
	})
}

// Tagged is a tag of a template that was made of a sandbox.
type Tagged struct {
	Template Template
	Tag      Tag
	Origin   string // the sandbox
}

// SnapshotFilter says which are listed.
type SnapshotFilter struct {
	Origin string // "" is any
	Ref    *Ref   // nil is any
	Page          // AfterID is a template's id, a colon and a tag
}

// Snapshots lists a team's snapshots of sandboxes.
func (d *DB) Snapshots(ctx context.Context, team string, f SnapshotFilter) ([]Tagged, error) {
	before, id := f.bounds()
	q := "SELECT " + templateColumns + `, tags.tag, tags.build, tags.assigned, b.origin
		FROM tags JOIN templates t ON t.id = tags.template JOIN builds b ON b.id = tags.build
		WHERE t.team = ? AND t.snapshot AND (tags.assigned, t.id || ':' || tags.tag) < (?, ?)`
	args := []any{team, before, id}
	if f.Origin != "" {
		q += " AND b.origin = ?"
		args = append(args, f.Origin)
	}
	if f.Ref != nil {
		q += " AND t.id = ifnull((SELECT template FROM names WHERE team = ? AND name = ?), ?)"
		args = append(args, team, f.Ref.Name, f.Ref.Name)
		if f.Ref.Tag != "" {
			q += " AND tags.tag = ?"
			args = append(args, f.Ref.Tag)
		}
	}
	q += " ORDER BY tags.assigned DESC, t.id || ':' || tags.tag DESC LIMIT ?"
	rows, err := d.read.QueryContext(ctx, q, append(args, f.Limit)...)
	return collect(d, rows, err, func(s *Tagged) error {
		to, read := s.Template.fields()
		var assigned int64
		err := rows.Scan(append(to, &s.Tag.Name, &s.Tag.Build, &assigned, &s.Origin)...)
		s.Tag.AssignedAt = at(assigned)
		return errors.Join(err, read())
	})
}

// CountSnapshots tells how many Snapshots there are of a team's.
func (d *DB) CountSnapshots(ctx context.Context, team string) (n int, err error) {
	err = d.read.QueryRowContext(ctx, "SELECT count(*) FROM tags JOIN templates t ON t.id = tags.template WHERE t.team = ? AND t.snapshot", team).Scan(&n)
	return n, d.explain("read", err)
}

// DeleteTemplate forgets a template of the team's own with its jobs, or with a tag only that, and the template with its last one
// unless there will be others. Its builds are loose then. While sandboxes are of them it is errdefs.ErrInvalidArgument.
func (d *DB) DeleteTemplate(ctx context.Context, team string, r Ref) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		id, err := own(ctx, tx, team, r)
		if err != nil {
			return err
		}
		var used int
		if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM tags JOIN sandboxes s ON s.build = tags.build WHERE tags.template = ?1 AND (?2 = '' OR tags.tag = ?2)`, id, r.Tag).Scan(&used); err != nil {
			return err
		}
		if used > 0 {
			return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("template '%s' can't be deleted: %d of the sandboxes that run or are paused were made of it; kill them first", r, used))
		}
		if r.Tag != "" {
			res, err := tx.ExecContext(ctx, "DELETE FROM tags WHERE template = ? AND tag = ?", id, r.Tag)
			if err != nil {
				return err
			}
			if n, err := res.RowsAffected(); err != nil || n == 0 {
				return r.NotFound()
			}
			if err := loosen(ctx, tx, id); err != nil {
				return err
			}
		}
		_, err = tx.ExecContext(ctx, `DELETE FROM templates WHERE id = ?1 AND (?2 = '' OR NOT EXISTS (SELECT 1 FROM tags WHERE template = ?1)
			AND NOT EXISTS (SELECT 1 FROM build_jobs WHERE template = ?1 AND state IN `+underWay+`))`, id, r.Tag)
		return err
	})
	return d.explain("write to", err)
}

// own is the id of a template of the team's own.
func own(ctx context.Context, tx *sql.Tx, team string, r Ref) (id string, err error) {
	owner := r.Team
	if owner == "" {
		owner = team
	}
	err = tx.QueryRowContext(ctx, "SELECT id FROM templates WHERE id = ifnull((SELECT template FROM names WHERE team = ?1 AND name = ?2), ?2) AND team = ?1 AND team = ?3",
		owner, r.Name, team).Scan(&id)
	if errors.Is(err, sql.ErrNoRows) {
		return "", r.NotFound()
	}
	return id, err
}
