package db

import (
	"context"
	"database/sql"
	"errors"
)

// Saved is a snapshot of a sandbox, for who decides whether it is kept.
type Saved struct {
	Tagged
	Machine string // the name of its machine's snapshot in the store
	Used    int    // sandboxes that are of it
}

// SavedByAll lists the snapshots of sandboxes of all teams, newest first.
func (d *DB) SavedByAll(ctx context.Context) ([]Saved, error) {
	rows, err := d.read.QueryContext(ctx, "SELECT "+templateColumns+`, tags.tag, tags.build, tags.assigned, b.origin, b.snapshot,
		(SELECT count(*) FROM sandboxes WHERE build = b.id)
		FROM tags JOIN templates t ON t.id = tags.template JOIN builds b ON b.id = tags.build
		WHERE t.snapshot ORDER BY tags.assigned DESC, t.id, tags.tag`)
	return collect(d, rows, err, func(s *Saved) error {
		to, read := s.Template.fields()
		var assigned int64
		err := rows.Scan(append(to, &s.Tag.Name, &s.Tag.Build, &assigned, &s.Origin, &s.Machine, &s.Used)...)
		s.Tag.AssignedAt = at(assigned)
		return errors.Join(err, read())
	})
}

// DropTag takes a tag from a template, and the template with its last one, and tells whether it has: not if the tag stands for
// another build by now, or sandboxes are of this one. The build is loose then.
func (d *DB) DropTag(ctx context.Context, template, tag, build string) (dropped bool, err error) {
	err = d.update(ctx, func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, "DELETE FROM tags WHERE template = ? AND tag = ? AND build = ?3 AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE build = ?3)", template, tag, build)
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		if err != nil || n == 0 {
			return err
		}
		dropped = true
		if err := loosen(ctx, tx, template); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "DELETE FROM templates WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM tags WHERE template = ?1)", template)
		return err
	})
	return dropped && err == nil, d.explain("write to", err)
}
