package db

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

// Layer is a disk as it is after a step of a template's build, kept for the builds of the same team that come there again.
type Layer struct {
	// Snapshot is its name in the store of machines' snapshots.
	Snapshot string
	Team     string
	// Sum is the digest of all that went into it. There may be several of one sum.
	Sum string
	// Bytes are what it has that the layer before hasn't.
	Bytes             int64
	CreatedAt, UsedAt time.Time
	// Ready: its snapshot is there.
	Ready bool
}

// BeginLayer writes down that a layer's snapshot is going to be made.
func (d *DB) BeginLayer(ctx context.Context, l Layer) error {
	now := stamp(time.Now())
	err := d.update(ctx, func(tx *sql.Tx) error {
		if err := teamOpen(ctx, tx, l.Team); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "INSERT INTO layers (snapshot, team, sum, created, used) VALUES (?, ?, ?, ?, ?)", l.Snapshot, l.Team, l.Sum, now, now)
		return err
	})
	return d.explain("write to", err)
}

// FinishLayer writes down that the snapshot is there.
func (d *DB) FinishLayer(ctx context.Context, snapshot string, bytes int64) error {
	return d.changeLayer(ctx, snapshot, "UPDATE layers SET ready = 1, bytes = ?, used = ? WHERE snapshot = ?", bytes, stamp(time.Now()), snapshot)
}

// UseLayer writes down that it is made use of.
func (d *DB) UseLayer(ctx context.Context, snapshot string) error {
	return d.changeLayer(ctx, snapshot, "UPDATE layers SET used = ? WHERE snapshot = ?", stamp(time.Now()), snapshot)
}

func (d *DB) changeLayer(ctx context.Context, snapshot, query string, args ...any) error {
	res, err := d.write.ExecContext(ctx, query, args...)
	if err == nil {
		var n int64
		if n, err = res.RowsAffected(); err == nil && n == 0 {
			return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("there is no layer %s", snapshot))
		}
	}
	return d.explain("write to", err)
}

const layerColumns = "snapshot, team, sum, bytes, created, used, ready"

func (l *Layer) scan(scan func(...any) error) error {
	var created, used int64
	err := scan(&l.Snapshot, &l.Team, &l.Sum, &l.Bytes, &created, &used, &l.Ready)
	l.CreatedAt, l.UsedAt = at(created), at(used)
	return err
}

// Layer finds a team's newest that is ready.
func (d *DB) Layer(ctx context.Context, team, sum string) (Layer, error) {
	var l Layer
	err := l.scan(d.read.QueryRowContext(ctx, "SELECT "+layerColumns+" FROM layers WHERE team = ? AND sum = ? AND ready ORDER BY created DESC, snapshot LIMIT 1", team, sum).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return Layer{}, errdefs.ErrNotFound.WithMessage("there is no such layer")
	}
	return l, d.explain("read", err)
}

// Layers lists all of them, those first that were not used for longest.
func (d *DB) Layers(ctx context.Context) ([]Layer, error) {
	rows, err := d.read.QueryContext(ctx, "SELECT "+layerColumns+" FROM layers ORDER BY used, snapshot")
	return collect(d, rows, err, func(l *Layer) error { return l.scan(rows.Scan) })
}

// DropLayer forgets one, whose snapshot has been deleted.
func (d *DB) DropLayer(ctx context.Context, snapshot string) error {
	_, err := d.write.ExecContext(ctx, "DELETE FROM layers WHERE snapshot = ?", snapshot)
	return d.explain("write to", err)
}
