// Package db is what the control plane remembers: sandboxes, teams and their keys, the names of templates and snapshots. One
// SQLite file, whose rows of sandboxes and templates have one process that writes them; what a call has written is on the disk
// when it returns. The package knows which rows there can be, not what they mean.
package db

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	sqlite "modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"
)

// DB is the open file. All methods may be called from many goroutines.
type DB struct {
	path string
	// write has one connection, so that a write waits for its turn and is never refused for another; read has several, which
	// see what was committed before.
	write, read *sql.DB
	uses        lastUses
}

// readers bounds how many queries run at once.
const readers = 4

// Open opens the database, or makes it where there is no file. One that is damaged, or of a later version, is an error that
// says so: it is never replaced.
func Open(ctx context.Context, path string) (_ *DB, err error) {
	d := &DB{path: path}
	defer func() {
		if err != nil {
			d.Close()
			err = d.explain("open", err)
		}
	}()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	// SQLite gives its other files the same mode.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(f.Chmod(0o600), f.Close()); err != nil {
		return nil, err
	}
	if d.write, err = sql.Open("sqlite", dsn(path, "immediate")); err != nil {
		return nil, err
	}
	d.write.SetMaxOpenConns(1)
	if err := d.migrate(ctx); err != nil {
		return nil, err
	}
	if d.read, err = sql.Open("sqlite", dsn(path, "deferred")+"&_pragma=query_only(1)"); err != nil {
		return nil, err
	}
	d.read.SetMaxOpenConns(readers)
	return d, nil
}

// dsn has every connection set up alike.
func dsn(path, lock string) string {
	v := url.Values{"_txlock": {lock}, "_pragma": {
		"busy_timeout(10000)", "journal_mode(WAL)", "synchronous(FULL)", "foreign_keys(1)", "trusted_schema(0)", "secure_delete(1)",
	}}
	return (&url.URL{Scheme: "file", Opaque: url.PathEscape(path), RawQuery: v.Encode()}).String()
}

// Close ends the connections.
func (d *DB) Close() error {
	var errs []error
	for _, c := range []*sql.DB{d.read, d.write} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// migrate brings the schema up to date, one version after the other.
func (d *DB) migrate(ctx context.Context) error {
	var found string
	if err := d.write.QueryRowContext(ctx, "PRAGMA quick_check(1)").Scan(&found); err != nil {
		return err
	}
	if found != "ok" {
		return errdefs.ErrDataLoss.WithMessage(found)
	}
	var version int
	if err := d.write.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		return err
	}
	if version > len(migrations) {
		return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("%s has version %d and this cube knows up to %d: run the newer cube, or restore the file's backup", d.path, version, len(migrations)))
	}
	for ; version < len(migrations); version++ {
		err := d.update(ctx, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, migrations[version]); err != nil {
				return fmt.Errorf("version %d: %w", version+1, err)
			}
			_, err := tx.ExecContext(ctx, fmt.Sprintf("PRAGMA user_version = %d", version+1))
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// update runs f in a transaction.
func (d *DB) update(ctx context.Context, f func(*sql.Tx) error) (err error) {
	tx, err := d.write.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // nothing to do after a commit
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// explain gives an error of SQLite its class, and the user the way out.
func (d *DB) explain(what string, err error) error {
	var failed *sqlite.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s %s: %w: use sudo", what, d.path, err)
	case errors.Is(err, sql.ErrNoRows):
		return errdefs.ErrNotFound
	case errdefs.IsDataLoss(err):
		return errdefs.ErrDataLoss.WithMessage(d.damage(err))
	case errdefs.IsNotFound(err), errdefs.IsAlreadyExists(err), errdefs.IsInvalidArgument(err), errdefs.IsFailedPrecondition(err), errdefs.IsResourceExhausted(err):
		return err // it is about a row, and says all
	case !errors.As(err, &failed):
		return fmt.Errorf("%s %s: %w", what, d.path, err)
	}
	switch failed.Code() & 0xff {
	case lib.SQLITE_CORRUPT, lib.SQLITE_NOTADB:
		return errdefs.ErrDataLoss.WithMessage(d.damage(err))
	case lib.SQLITE_FULL:
		return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("%s %s: the disk is full", what, d.path))
	case lib.SQLITE_BUSY:
		return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("%s %s: another process has it", what, d.path))
	}
	return fmt.Errorf("%s %s: %w", what, d.path, err)
}

func (d *DB) damage(err error) string {
	return fmt.Sprintf("%s is damaged (%v): restore a backup of it, or move it and its -wal and -shm away to begin with no sandboxes, keys and templates", d.path, err)
}

// stamp is a time in a row: microseconds since 1970, 0 for none.
func stamp(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// at is the time that stamp has made us of.
func at(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}
