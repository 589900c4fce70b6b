package db

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	sqlite "modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"
)

// keepEnded is how long it is known why a sandbox has ended.
const keepEnded = 7 * 24 * time.Hour

// Sandbox is a sandbox's row.
type Sandbox struct {
	ID, Team        string
	Template, Build string // ids
	State           string
	StartedAt       time.Time
	// Deadline is what its owner makes of it.
	Deadline time.Time
	Metadata map[string]string // no key has NUL in it
	// Spec is its owner's, in JSON.
	Spec json.RawMessage
}

const sandboxColumns = `s.id, s.team, s.template, s.build, s.state, s.started, s.deadline, s.spec,
	(SELECT json_group_object(key, value) FROM metadata WHERE sandbox = s.id)`

// fields are where sandboxColumns are scanned to; read completes the row with them.
func (s *Sandbox) fields() (to []any, read func() error) {
	var started, deadline int64
	var metadata []byte
	return []any{&s.ID, &s.Team, &s.Template, &s.Build, &s.State, &started, &deadline, (*[]byte)(&s.Spec), &metadata}, func() error {
		s.StartedAt, s.Deadline = at(started), at(deadline)
		return json.Unmarshal(metadata, &s.Metadata)
	}
}

// BuildGone is the error of a sandbox whose build may not be used any more, as it is loose: its snapshot may be being deleted. It is
// errdefs.ErrNotFound. By its template's name there may be another one.
type BuildGone struct{ Template string }

func (g *BuildGone) Error() string {
	return fmt.Sprintf("template '%s' has just been deleted, or built anew", g.Template)
}
func (g *BuildGone) Unwrap() error { return errdefs.ErrNotFound }

// AddSandbox writes the row of a sandbox before there is anything else of it. A build that is no more, or loose, is a *BuildGone: what
// Loose has told nobody can want any more.
func (d *DB) AddSandbox(ctx context.Context, s Sandbox) error {
	return d.explain("write to", d.update(ctx, func(tx *sql.Tx) error {
		var loose bool
		err := tx.QueryRowContext(ctx, "SELECT "+isLoose+" FROM builds b WHERE id = ?", s.Build).Scan(&loose)
		if errors.Is(err, sql.ErrNoRows) || err == nil && loose {
			return &BuildGone{s.Template}
		}
		if err != nil {
			return err
		}
		return addSandbox(ctx, tx, s)
	}))
}

func addSandbox(ctx context.Context, tx *sql.Tx, s Sandbox) error {
	if err := teamOpen(ctx, tx, s.Team); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, "INSERT INTO sandboxes (id, team, template, build, state, started, deadline, spec) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
		s.ID, s.Team, s.Template, s.Build, s.State, stamp(s.StartedAt), stamp(s.Deadline), string(s.Spec))
	var failed *sqlite.Error
	switch {
	case errors.As(err, &failed) && failed.Code() == lib.SQLITE_CONSTRAINT_PRIMARYKEY:
		return errdefs.ErrAlreadyExists.WithMessage(fmt.Sprintf("there is a sandbox %s", s.ID))
	case errors.As(err, &failed) && failed.Code() == lib.SQLITE_CONSTRAINT_FOREIGNKEY: // the build is there
		return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("team '%s' has just been removed", s.Team))
	case err != nil:
		return err
	}
	for k, v := range s.Metadata {
		if _, err := tx.ExecContext(ctx, "INSERT INTO metadata (sandbox, key, value) VALUES (?, ?, ?)", s.ID, k, v); err != nil {
			return err
		}
	}
	_, err = tx.ExecContext(ctx, "UPDATE templates SET spawns = spawns + 1, spawned = ? WHERE id = ?", stamp(s.StartedAt), s.Template)
	return err
}

// SetSandbox writes a row's state, times and spec, if its state is still from; otherwise it is errdefs.ErrFailedPrecondition.
// After an error, also that of the context, the row is as it was.
func (d *DB) SetSandbox(ctx context.Context, s Sandbox, from string) error {
	// By itself the statement could be done and told as given up, if the context ends while the disk is waited for.
	err := d.update(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, "UPDATE sandboxes SET state = ?, started = ?, deadline = ?, spec = ? WHERE id = ? AND state = ?",
			s.State, stamp(s.StartedAt), stamp(s.Deadline), string(s.Spec), s.ID, from)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("sandbox %s isn't %s any more", s.ID, from))
		}
		return nil
	})
	return d.explain("write to", err)
}

// DropSandbox deletes a row, if there is one. reason is why it has ended, "" if somebody has asked for it.
func (d *DB) DropSandbox(ctx context.Context, id, reason string) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		var team string
		err := tx.QueryRowContext(ctx, "DELETE FROM sandboxes WHERE id = ? RETURNING team", id).Scan(&team)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		if err != nil || reason == "" {
			return err
		}
		now := time.Now()
		if _, err := tx.ExecContext(ctx, "DELETE FROM ended WHERE at < ?", stamp(now.Add(-keepEnded))); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "INSERT OR REPLACE INTO ended (id, team, at, reason) VALUES (?, ?, ?, ?)", id, team, stamp(now), reason)
		return err
	})
	return d.explain("write to", err)
}

// Ended tells when and why a team's sandbox has ended that nobody has killed; errdefs.ErrNotFound if nothing is known of it.
func (d *DB) Ended(ctx context.Context, team, id string) (when time.Time, reason string, err error) {
	var us int64
	err = d.read.QueryRowContext(ctx, "SELECT at, reason FROM ended WHERE id = ? AND team = ?", id, team).Scan(&us, &reason)
	return at(us), reason, d.explain("read", err)
}

// Sandbox finds a row; team "" is any.
func (d *DB) Sandbox(ctx context.Context, team, id string) (Sandbox, error) {
	var s Sandbox
	to, read := s.fields()
	err := d.read.QueryRowContext(ctx, "SELECT "+sandboxColumns+" FROM sandboxes s WHERE id = ?1 AND (?2 = '' OR team = ?2)", id, team).Scan(to...)
	if err == nil {
		err = read()
	}
	return s, d.explain("read", err)
}

// SandboxesIn lists all rows in one of the states, or all.
func (d *DB) SandboxesIn(ctx context.Context, states ...string) ([]Sandbox, error) {
	q, args := "SELECT "+sandboxColumns+" FROM sandboxes s", []any{}
	if len(states) > 0 {
		q += " WHERE state IN " + list(&args, states)
	}
	rows, err := d.read.QueryContext(ctx, q, args...)
	return collect(d, rows, err, func(s *Sandbox) error {
		to, read := s.fields()
		return errors.Join(rows.Scan(to...), read())
	})
}

// Filter says which rows of a team are listed, and how.
type Filter struct {
	Team     string
	States   []string
	Template string            // an id, "" is any
	Metadata map[string]string // each of these
	Since    time.Time         // started after that, zero is any
	// Ascending is oldest start first, otherwise the newest.
	Ascending bool
	Page
}

// Sandboxes lists rows by when they were started.
func (d *DB) Sandboxes(ctx context.Context, f Filter) ([]Sandbox, error) {
	where, args := f.where()
	order, behind := "DESC", "<"
	if f.Ascending {
		order, behind = "ASC", ">"
	}
	if !f.After.IsZero() {
		where += fmt.Sprintf(" AND (started, id) %s (?, ?)", behind)
		args = append(args, stamp(f.After), f.AfterID)
	}
	q := fmt.Sprintf("SELECT %s FROM sandboxes s WHERE %s ORDER BY started %s, id %[3]s LIMIT ?", sandboxColumns, where, order)
	rows, err := d.read.QueryContext(ctx, q, append(args, f.Limit)...)
	return collect(d, rows, err, func(s *Sandbox) error {
		to, read := s.fields()
		return errors.Join(rows.Scan(to...), read())
	})
}

// CountSandboxes counts the rows that all pages of Sandboxes have.
func (d *DB) CountSandboxes(ctx context.Context, f Filter) (n int, err error) {
	where, args := f.where()
	err = d.read.QueryRowContext(ctx, "SELECT count(*) FROM sandboxes s WHERE "+where, args...).Scan(&n)
	return n, d.explain("read", err)
}

// where is the condition of rows on any page.
func (f *Filter) where() (where string, args []any) {
	args = []any{f.Team}
	where = "team = ? AND state IN " + list(&args, f.States)
	if !f.Since.IsZero() {
		where += " AND started > ?"
		args = append(args, stamp(f.Since))
	}
	if f.Template != "" {
		where += " AND template = ?"
		args = append(args, f.Template)
	}
	for _, k := range slices.Sorted(maps.Keys(f.Metadata)) {
		where += " AND EXISTS (SELECT 1 FROM metadata WHERE sandbox = s.id AND key = ? AND value = ?)"
		args = append(args, k, f.Metadata[k])
	}
	return where, args
}

// list is a list of values for IN, which it adds to the arguments.
func list(args *[]any, values []string) string {
	for _, v := range values {
		*args = append(*args, v)
	}
	return "(" + strings.TrimSuffix(strings.Repeat("?,", len(values)), ",") + ")"
}
