package db

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

// ParseTag checks a tag. The error is errdefs.ErrInvalidArgument.
func ParseTag(s string) error {
	if !tagForm.MatchString(s) {
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%q is not a tag: up to 128 of a-z, 0-9, -, _ and . are possible", s))
	}
	return nil
}

// AddTags has more tags of a template of the team's own stand for the build that one stands for, and returns its id.
func (d *DB) AddTags(ctx context.Context, team string, of Ref, tags []string) (build string, err error) {
	tag := cmp.Or(of.Tag, DefaultTag)
	err = d.update(ctx, func(tx *sql.Tx) error {
		template, err := own(ctx, tx, team, of)
		if err != nil {
			return err
		}
		err = tx.QueryRowContext(ctx, "SELECT build FROM tags WHERE template = ? AND tag = ?", template, tag).Scan(&build)
		if errors.Is(err, sql.ErrNoRows) {
			return of.NotFound()
		}
		if err != nil {
			return err
		}
		now := stamp(time.Now())
		if err := assign(ctx, tx, template, build, tags, now); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE templates SET updated = ? WHERE id = ?", now, template); err != nil {
			return err
		}
		return loosen(ctx, tx, template)
	})
	return build, d.explain("write to", err)
}

// RemoveTags has tags of a template of the team's own stand for nothing any more. At least one has to stay: what no tag stands for
// nobody can use.
func (d *DB) RemoveTags(ctx context.Context, team string, of Ref, tags []string) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		template, err := own(ctx, tx, team, of)
		if err != nil {
			return err
		}
		for _, tag := range tags {
			res, err := tx.ExecContext(ctx, "DELETE FROM tags WHERE template = ? AND tag = ?", template, tag)
			if err != nil {
				return err
			}
			if n, err := res.RowsAffected(); err != nil || n == 0 {
				return errors.Join(err, Ref{Team: of.Team, Name: of.Name, Tag: tag}.NotFound())
			}
		}
		var left int
		if err := tx.QueryRowContext(ctx, "SELECT count(*) FROM tags WHERE template = ?", template).Scan(&left); err != nil {
			return err
		}
		if left == 0 {
			return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("template '%s' would have no tag left: delete the template instead", of))
		}
		if _, err := tx.ExecContext(ctx, "UPDATE templates SET updated = ? WHERE id = ?", stamp(time.Now()), template); err != nil {
			return err
		}
		return loosen(ctx, tx, template)
	})
	return d.explain("write to", err)
}

// SetPublic says whether all teams may use a template of the team's own.
func (d *DB) SetPublic(ctx context.Context, team string, r Ref, public bool) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		template, err := own(ctx, tx, team, r)
		if err == nil {
			_, err = tx.ExecContext(ctx, "UPDATE templates SET public = ?, updated = ? WHERE id = ?", public, stamp(time.Now()), template)
		}
		return err
	})
	return d.explain("write to", err)
}

// BuildInfo is a build of a template as its users see it, also one that isn't there yet, failed, or has been replaced.
type BuildInfo struct {
	ID                               string
	State                            JobState
	CreatedAt, UpdatedAt, FinishedAt time.Time // FinishedAt is zero while it is under way
	CPUs, MemoryMB, DiskMB           int
	EnvdVersion, Profile             string // "" unless it is there
}

// Builds lists a template's builds, newest first: its jobs, and what was made without one.
func (d *DB) Builds(ctx context.Context, template string) ([]BuildInfo, error) {
	rows, err := d.read.QueryContext(ctx, `
		SELECT j.id, j.state, j.created, j.updated, j.finished, j.cpus, j.memory, j.disk, ifnull(b.settings ->> 'envdVersion', ''), ifnull(b.settings ->> 'profile', '') FROM build_jobs j LEFT JOIN builds b ON b.id = j.id WHERE j.template = ?1
		UNION ALL
		SELECT b.id, 'ready', b.created, b.created, b.created, b.cpus, b.memory, b.disk, b.settings ->> 'envdVersion', ifnull(b.settings ->> 'profile', '') FROM builds b WHERE b.template = ?1 AND NOT EXISTS (SELECT 1 FROM build_jobs j WHERE j.id = b.id)
		ORDER BY 3 DESC, 1 DESC`, template)
	return collect(d, rows, err, func(b *BuildInfo) error {
		var created, updated, finished int64
		err := rows.Scan(&b.ID, &b.State, &created, &updated, &finished, &b.CPUs, &b.MemoryMB, &b.DiskMB, &b.EnvdVersion, &b.Profile)
		b.CreatedAt, b.UpdatedAt, b.FinishedAt = at(created), at(updated), at(finished)
		return err
	})
}
