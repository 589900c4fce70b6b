package db

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// Team is who owns sandboxes, templates and keys.
type Team struct {
	ID        string
	CreatedAt time.Time
	// ClosedAt is since when it is being removed, zero if it isn't: nothing can be made for it any more.
	ClosedAt time.Time
	// Keys are those that are good. Sandboxes are those that run or are paused.
	Keys, Sandboxes, Templates, Snapshots int
}

// Teams lists all teams, by id.
func (d *DB) Teams(ctx context.Context) ([]Team, error) {
	rows, err := d.read.QueryContext(ctx, `SELECT id, created, closed,
		(SELECT count(*) FROM keys WHERE team = t.id AND revoked = 0), (SELECT count(*) FROM sandboxes WHERE team = t.id),
		(SELECT count(*) FROM templates WHERE team = t.id AND NOT snapshot),
		(SELECT count(*) FROM tags JOIN templates s ON s.id = tags.template WHERE s.team = t.id AND s.snapshot)
		FROM teams t ORDER BY id`)
	return collect(d, rows, err, func(t *Team) error {
		var created, closed int64
		err := rows.Scan(&t.ID, &created, &closed, &t.Keys, &t.Sandboxes, &t.Templates, &t.Snapshots)
		t.CreatedAt, t.ClosedAt = at(created), at(closed)
		return err
	})
}

// teamOpen refuses to make anything for a team that is being removed.
func teamOpen(ctx context.Context, tx *sql.Tx, team string) error {
	var closed int64
	err := tx.QueryRowContext(ctx, "SELECT closed FROM teams WHERE id = ?", team).Scan(&closed)
	if errors.Is(err, sql.ErrNoRows) {
		return nil // the row that is to be made says whether that can be
	}
	if err == nil && closed != 0 {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("team %s is being removed: `cube team purge %[1]s` ends that", team))
	}
	return err
}

// CloseTeam has nothing be made for a team any more, and its keys be worth nothing. It stays so until DropTeam. There need be no
// such team: what it owned may still be there.
func (d *DB) CloseTeam(ctx context.Context, team string) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		now := stamp(time.Now())
		if _, err := tx.ExecContext(ctx, "UPDATE teams SET closed = ? WHERE id = ? AND closed = 0", now, team); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "UPDATE keys SET revoked = ? WHERE team = ? AND revoked = 0", now, team)
		return err
	})
	return d.explain("write to", err)
}

// DropTeamTemplates forgets all templates and snapshots of a team. Their builds are loose then, unless sandboxes of other teams
// are of them.
func (d *DB) DropTeamTemplates(ctx context.Context, team string) error {
	_, err := d.write.ExecContext(ctx, "DELETE FROM templates WHERE team = ?", team)
	return d.explain("write to", err)
}

// TeamBuilds lists all builds of a team, also those that belong to no template.
func (d *DB) TeamBuilds(ctx context.Context, team string) ([]Build, error) {
	rows, err := d.read.QueryContext(ctx, "SELECT "+buildColumns+" FROM builds b WHERE team = ? ORDER BY created, id", team)
	return collect(d, rows, err, func(b *Build) error {
		to, read := b.fields()
		return errors.Join(rows.Scan(to...), read())
	})
}

// DropTeam forgets a team with its keys and the reasons of its sandboxes' ends, if nothing else is its: otherwise it is
// errdefs.ErrFailedPrecondition. What is forgotten is in no file of the database any more; that somebody reads what was, for longer
// than a write waits, is errdefs.ErrUnavailable.
func (d *DB) DropTeam(ctx context.Context, team string) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		for _, q := range []string{"DELETE FROM ended WHERE team = ?", "DELETE FROM keys WHERE team = ?"} {
			if _, err := tx.ExecContext(ctx, q, team); err != nil {
				return err
			}
		}
		left, err := rowsOf(ctx, tx, team)
		if err != nil {
			return err
		}
		if len(left) > 0 {
			return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("team %s still has rows: %s", team, strings.Join(left, ", ")))
		}
		_, err = tx.ExecContext(ctx, "DELETE FROM teams WHERE id = ?", team)
		return err
	})
	if err != nil {
		return d.explain("write to", err)
	}
	var busy bool
	var pages, moved int
	if err := d.write.QueryRowContext(ctx, "PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &pages, &moved); err != nil {
		return d.explain("write to", err)
	}
	if busy {
		return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("team %s is gone, but its rows are in the database's log until nobody reads what was before: a restart of `cube up` ends that", team))
	}
	return nil
}

// TeamRows tells which rows of any table say that they are a team's: "2 in builds", say.
func (d *DB) TeamRows(ctx context.Context, team string) (left []string, err error) {
	tx, err := d.read.BeginTx(ctx, nil)
	if err != nil {
		return nil, d.explain("read", err)
	}
	defer tx.Rollback()
	left, err = rowsOf(ctx, tx, team)
	return left, d.explain("read", err)
}

// rowsOf asks all tables that have a column of teams, whichever there are.
func rowsOf(ctx context.Context, tx *sql.Tx, team string) (left []string, err error) {
	rows, err := tx.QueryContext(ctx, "SELECT m.name FROM sqlite_schema m JOIN pragma_table_info(m.name) c WHERE m.type = 'table' AND c.name = 'team' ORDER BY m.name")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var tables []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		tables = append(tables, name)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	for _, name := range tables {
		var n int
		if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM "`+name+`" WHERE team = ?`, team).Scan(&n); err != nil { // a name of ours
			return nil, err
		}
		if n > 0 {
			left = append(left, fmt.Sprintf("%d in %s", n, name))
		}
	}
	return left, nil
}

// Owner is whose something on the disk is.
type Owner struct {
	Team string
	Key  string // the id of the one that has made it, "" if none has
}

// Owners tells whose machines' snapshots are, by their names in the store, and sandboxes, by their ids.
func (d *DB) Owners(ctx context.Context) (map[string]Owner, error) {
	type owned struct {
		Owner
		name string
	}
	rows, err := d.read.QueryContext(ctx, "SELECT snapshot, team, key FROM builds UNION ALL SELECT snapshot, team, '' FROM layers UNION ALL SELECT id, team, ifnull(spec ->> '$.key', '') FROM sandboxes")
	all, err := collect(d, rows, err, func(o *owned) error { return rows.Scan(&o.name, &o.Team, &o.Key) })
	owners := make(map[string]Owner, len(all))
	for _, o := range all {
		owners[o.name] = o.Owner
	}
	return owners, err
}
