package db

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

// Member is a machine that is kept for a sandbox to come.
type Member struct {
	ID string // the sandbox's, then
	// Ready: it can be claimed. Before that it is being made.
	Ready     bool
	CreatedAt time.Time
	Build     Build
	// Stale: no tag stands for the build any more, so that nobody asks for it.
	Stale bool
}

// AddMember writes down that a machine of a build is going to be made. A build that no tag stands for is errdefs.ErrNotFound.
func (d *DB) AddMember(ctx context.Context, id, build string) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, "INSERT INTO members (id, build, ready, created) SELECT ?1, ?2, 0, ?3 WHERE EXISTS (SELECT 1 FROM tags WHERE build = ?2)", id, build, stamp(time.Now()))
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, errdefs.ErrNotFound.WithMessage(fmt.Sprintf("build %s is no template's any more", build)))
		}
		return nil
	})
	return d.explain("write to", err)
}

// MemberReady writes down that a machine can be claimed. One that isn't there is errdefs.ErrNotFound.
func (d *DB) MemberReady(ctx context.Context, id string) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, "UPDATE members SET ready = 1 WHERE id = ?", id)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, errdefs.ErrNotFound.WithMessage("there is no member "+id+" of the pool"))
		}
		return nil
	})
	return d.explain("write to", err)
}

// ClaimMember makes a member of the pool the sandbox of that id: it is written in one piece that it is no member any more, and
// the sandbox's row. Of those who try it one succeeds; it is errdefs.ErrFailedPrecondition for the others, and where the member
// isn't ready or is of another build.
func (d *DB) ClaimMember(ctx context.Context, s Sandbox) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, "DELETE FROM members WHERE id = ? AND build = ? AND ready", s.ID, s.Build)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, errdefs.ErrFailedPrecondition.WithMessage("member "+s.ID+" of the pool can't be claimed any more"))
		}
		return addSandbox(ctx, tx, s)
	})
	return d.explain("write to", err)
}

// DropMember deletes a member's row, if there is one. Its machine has been removed.
func (d *DB) DropMember(ctx context.Context, id string) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM members WHERE id = ?", id)
		return err
	})
	return d.explain("write to", err)
}

// Members lists all of them, the oldest first.
func (d *DB) Members(ctx context.Context) ([]Member, error) {
	rows, err := d.read.QueryContext(ctx, "SELECT m.id, m.ready, m.created, NOT EXISTS (SELECT 1 FROM tags WHERE tags.build = m.build), "+buildColumns+
		" FROM members m JOIN builds b ON b.id = m.build ORDER BY m.created, m.id")
	return collect(d, rows, err, func(m *Member) error {
		to, read := m.Build.fields()
		var created int64
		err := rows.Scan(append([]any{&m.ID, &m.Ready, &created, &m.Stale}, to...)...)
		m.CreatedAt = at(created)
		return errors.Join(err, read())
	})
}
