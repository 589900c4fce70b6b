package db

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

// Build is one version of a template: a snapshot of a machine, and what is to be known of it.
type Build struct {
	ID string // a UUID
	// Team is whose it is, and Key the id of the API key that has made it, "" if none has.
	Team, Key string
	// Template is its template's id, "" while it is being made and when nobody asks for it any more.
	Template string
	// Snapshot is its name in the store of machines' snapshots.
	Snapshot string
	// Origin is the sandbox that it is a snapshot of, "" of a template.
	Origin           string
	CreatedAt        time.Time
	CPUs             int
	MemoryMB, DiskMB int
	Settings         Settings
}

// Settings is what a build says of sandboxes that are made of it.
type Settings struct {
	EnvdVersion string `json:"envdVersion"`
	// User and Workdir are the defaults of processes and files.
	User    string `json:"user,omitempty"`
	Workdir string `json:"workdir,omitempty"`
	// Hook is told who the sandbox is before anybody else gets to it.
	Hook *Hook `json:"hook,omitempty"`
	// Run is a command line that runs in the snapshot, and Ready one that succeeds when it is ready; "" are none. They are of the
	// default user's shell.
	Run   string `json:"run,omitempty"`
	Ready string `json:"ready,omitempty"`
	// Start is a command that is started afresh in each sandbox: none runs in the snapshot. It is of the default user's shell.
	Start string `json:"start,omitempty"`
	// Image is what its machines begin with, by its name; "": they go on from the snapshot, otherwise there is none.
	Image string `json:"image,omitempty"`
	// Digest is that of the image that it was made of, "" where that was a template's build. Builder is the version of what has made
	// it, and Inputs the digest of all that went into its disk.
	Digest  string `json:"digest,omitempty"`
	Builder string `json:"builder,omitempty"`
	Inputs  string `json:"inputs,omitempty"`
	// Profile is how much of what a sandbox has is reserved for it, unless its create says so; "" is as by default.
	Profile string `json:"profile,omitempty"`
	// Container is what has to be known to make a container of the snapshot, for whoever makes it.
	Container json.RawMessage `json:"container,omitempty"`
}

// Hook is an HTTP endpoint in the sandbox.
type Hook struct {
	Port int    `json:"port"`
	Path string `json:"path"`
}

const buildColumns = "b.id, b.team, b.key, ifnull(b.template, ''), b.snapshot, b.origin, b.created, b.cpus, b.memory, b.disk, b.settings"

// fields are where buildColumns are scanned to; read completes the build with them.
func (b *Build) fields() (to []any, read func() error) {
	var created int64
	var settings []byte
	return []any{&b.ID, &b.Team, &b.Key, &b.Template, &b.Snapshot, &b.Origin, &created, &b.CPUs, &b.MemoryMB, &b.DiskMB, &settings}, func() error {
		b.CreatedAt = at(created)
		return json.Unmarshal(settings, &b.Settings)
	}
}

// BeginBuild writes down that a build's snapshot is going to be made. It belongs to no template until Publish.
func (d *DB) BeginBuild(ctx context.Context, b Build) error {
	settings, err := json.Marshal(b.Settings)
	if err != nil {
		return err
	}
	err = d.update(ctx, func(tx *sql.Tx) error {
		if err := teamOpen(ctx, tx, b.Team); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "INSERT INTO builds (id, team, key, snapshot, origin, created, cpus, memory, disk, settings) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
			b.ID, b.Team, b.Key, b.Snapshot, b.Origin, stamp(b.CreatedAt), b.CPUs, b.MemoryMB, b.DiskMB, string(settings))
		return err
	})
	return d.explain("write to", err)
}

// Build finds one by its id.
func (d *DB) Build(ctx context.Context, id string) (Build, error) {
	var b Build
	to, read := b.fields()
	err := d.read.QueryRowContext(ctx, "SELECT "+buildColumns+" FROM builds b WHERE id = ?", id).Scan(to...)
	if err == nil {
		err = read()
	}
	return b, d.explain("read", err)
}

// isLoose is of a build b that belongs to no template and that no sandbox nor a member of the pool is of.
const isLoose = "b.template IS NULL AND NOT EXISTS (SELECT 1 FROM sandboxes s WHERE s.build = b.id) AND NOT EXISTS (SELECT 1 FROM members m WHERE m.build = b.id)"

// Loose lists the builds that belong to no template and that no sandbox nor a member of the pool is of: what is being made, and
// what can be deleted.
func (d *DB) Loose(ctx context.Context) ([]Build, error) {
	rows, err := d.read.QueryContext(ctx, "SELECT "+buildColumns+" FROM builds b WHERE "+isLoose)
	return collect(d, rows, err, func(b *Build) error {
		to, read := b.fields()
		return errors.Join(rows.Scan(to...), read())
	})
}

// DropBuild forgets a build that is loose. Its machine's snapshot has been deleted.
func (d *DB) DropBuild(ctx context.Context, id string) error {
	_, err := d.write.ExecContext(ctx, "DELETE FROM builds WHERE id = ? AND template IS NULL", id)
	return d.explain("write to", err)
}

// Publication makes a build what a template's tag stands for.
type Publication struct {
	Build string
	Team  string
	// Name is the template's, "" for one without. There may be one of the name, of which it becomes another build.
	Name string
	// Template is the id of the template if it has to be made, MaxTemplates how many the team may have then; 0 is any number.
	Template     string
	MaxTemplates int
	Tag          string
	// New: if the tag stands for a build already, it goes on to do so, and that is errdefs.ErrAlreadyExists.
	New      bool
	Snapshot bool // of a sandbox
	Public   bool
}

// Publish is what ends the making of a build. It returns the template's id. A name that stands for a template where a snapshot
// is to be, or the other way round, is errdefs.ErrAlreadyExists, and a template too many errdefs.ErrResourceExhausted.
func (d *DB) Publish(ctx context.Context, p Publication) (template string, err error) {
	err = d.update(ctx, func(tx *sql.Tx) error {
		if err := teamOpen(ctx, tx, p.Team); err != nil {
			return err
		}
		now := stamp(time.Now())
		template = p.Template
		var snapshot bool
		err := tx.QueryRowContext(ctx, "SELECT t.id, t.snapshot FROM names n JOIN templates t ON t.id = n.template WHERE n.team = ? AND n.name = ?", p.Team, p.Name).Scan(&template, &snapshot)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			if err := within(ctx, tx, p.MaxTemplates, "templates", keptBeside, p.Team, template, "[]"); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, "INSERT INTO templates (id, team, public, snapshot, created, updated) VALUES (?, ?, ?, ?, ?, ?)",
				template, p.Team, p.Public, p.Snapshot, now, now); err != nil {
				return err
			}
			if p.Name != "" {
				if _, err := tx.ExecContext(ctx, "INSERT INTO names (team, name, template) VALUES (?, ?, ?)", p.Team, p.Name, template); err != nil {
					return err
				}
			}
		case err != nil:
			return err
		case snapshot != p.Snapshot:
			return taken(p.Name, snapshot)
		}
		if p.New {
			var there bool
			if err := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM tags WHERE template = ? AND tag = ?)", template, p.Tag).Scan(&there); err != nil {
				return err
			}
			if there {
				return errdefs.ErrAlreadyExists.WithMessage(fmt.Sprintf("there is a build of %s:%s", p.Name, p.Tag))
			}
		}
		res, err := tx.ExecContext(ctx, "UPDATE builds SET template = ? WHERE id = ?", template, p.Build)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n != 1 {
			return fmt.Errorf("build %s: %w", p.Build, errdefs.ErrNotFound)
		}
		if err := assign(ctx, tx, template, p.Build, []string{p.Tag}, now); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE templates SET updated = ?, public = public OR ? WHERE id = ?", now, p.Public, template); err != nil {
			return err
		}
		return loosen(ctx, tx, template)
	})
	return template, d.explain("write to", err)
}

// taken is the error of a name that is a snapshot's or a template's.
func taken(name string, snapshot bool) error {
	return errdefs.ErrAlreadyExists.WithMessage(fmt.Sprintf("the name %s is a %s's: choose another", name, map[bool]string{true: "snapshot", false: "template"}[snapshot]))
}

// assign has tags of a template stand for a build.
func assign(ctx context.Context, tx *sql.Tx, template, build string, tags []string, now int64) error {
	for _, tag := range tags {
		if _, err := tx.ExecContext(ctx, "INSERT INTO tags (template, tag, build, assigned) VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET build = excluded.build, assigned = excluded.assigned",
			template, tag, build, now); err != nil {
			return err
		}
	}
	return nil
}

// loosen parts a template from its builds that no tag stands for any more.
func loosen(ctx context.Context, tx *sql.Tx, template string) error {
	_, err := tx.ExecContext(ctx, "UPDATE builds SET template = NULL WHERE template = ? AND NOT EXISTS (SELECT 1 FROM tags WHERE tags.build = builds.id)", template)
	return err
}
