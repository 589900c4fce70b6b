package db

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"
)

// JobState is what has become of a job.
type JobState string

const (
	JobWaiting  JobState = "waiting" // for its client to say what is to be built
	JobQueued   JobState = "queued"
	JobBuilding JobState = "building"
	JobReady    JobState = "ready"
	JobError    JobState = "error"
)

// underWay are the states of jobs that may still become a build.
const underWay = "('waiting', 'queued', 'building')"

const (
	// keepWaiting is how long a client may take to say what is to be built.
	keepWaiting = 24 * time.Hour
	// keepJobs is how many of a template's jobs are remembered beside those that are under way or that a tag stands for.
	keepJobs = 10
)

// Job is the making of a template's build, whose id it has.
type Job struct {
	ID, Template, Team    string
	State                 JobState
	CreatedAt, UpdatedAt  time.Time
	FinishedAt            time.Time // zero while it is under way
	CPUs                  int
	MemoryMB, DiskMB      int
	Tags                  []string        // that are to stand for the build
	Plan, Reason, Product json.RawMessage // its owner's: what is to be built, why it couldn't, and what was. null at first
}

const jobColumns = "j.id, j.template, j.team, j.state, j.created, j.updated, j.finished, j.cpus, j.memory, j.disk, j.tags, j.plan, j.reason, j.made"

// fields are where jobColumns are scanned to; read completes the job with them.
func (j *Job) fields() (to []any, read func() error) {
	var created, updated, finished int64
	var tags []byte
	return []any{&j.ID, &j.Template, &j.Team, &j.State, &created, &updated, &finished, &j.CPUs, &j.MemoryMB, &j.DiskMB, &tags, (*[]byte)(&j.Plan), (*[]byte)(&j.Reason), (*[]byte)(&j.Product)}, func() error {
		j.CreatedAt, j.UpdatedAt, j.FinishedAt = at(created), at(updated), at(finished)
		return json.Unmarshal(tags, &j.Tags)
	}
}

// JobRequest asks for a job.
type JobRequest struct {
	ID, Team string
	// Name is the template's, and Template the id that it gets if there is none of the name.
	Name, Template string
	Public         bool // from now on; false leaves it
	Tags           []string
	CPUs           int
	MemoryMB       int
	DiskMB         int
	// MaxTemplates and MaxJobs bound how many templates the team has, each build that tags stand for by itself, and how many jobs of it
	// are under way; 0 doesn't.
	MaxTemplates, MaxJobs int
	// Expired is the reason of jobs whose client has said for a day nothing of what is to be built, and Replaced of those of the template
	// that wait for it by one of the same tags: they end now.
	Expired, Replaced json.RawMessage
}

// CreateJob writes down that a build of a template will be asked for, and makes the template if there is none of the name. A
// snapshot's name is errdefs.ErrAlreadyExists, a bound that is reached errdefs.ErrResourceExhausted.
func (d *DB) CreateJob(ctx context.Context, r JobRequest) (template string, err error) {
	tags, err := json.Marshal(r.Tags)
	if err != nil {
		return "", err
	}
	err = d.update(ctx, func(tx *sql.Tx) error {
		now := time.Now()
		if err := forgetJobs(ctx, tx, now, r.Expired); err != nil {
			return err
		}
		var team string
		if err := tx.QueryRowContext(ctx, "SELECT id FROM teams WHERE id = ?", r.Team).Scan(&team); errors.Is(err, sql.ErrNoRows) {
			return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("there is no team %s: `cube key create --team %[1]s` begins one", r.Team))
		} else if err != nil {
			return err
		}
		if err := teamOpen(ctx, tx, r.Team); err != nil {
			return err
		}
		var snapshot bool
		err := tx.QueryRowContext(ctx, "SELECT t.id, t.snapshot FROM names n JOIN templates t ON t.id = n.template WHERE n.team = ? AND n.name = ?", r.Team, r.Name).Scan(&template, &snapshot)
		isNew := errors.Is(err, sql.ErrNoRows)
		switch {
		case isNew:
			template = r.Template
		case err != nil:
			return err
		case snapshot:
			return taken(r.Name, snapshot)
		}
		if err := replaceJobs(ctx, tx, now, template, string(tags), r.Replaced); err != nil {
			return err
		}
		if err := within(ctx, tx, r.MaxJobs, "builds", "SELECT count(*) FROM build_jobs WHERE team = ? AND state IN "+underWay, r.Team); err != nil {
			return err
		}
		if err := within(ctx, tx, r.MaxTemplates, "templates", keptBeside, r.Team, template, string(tags)); err != nil {
			return err
		}
		if isNew {
			if _, err := tx.ExecContext(ctx, "INSERT INTO templates (id, team, public, snapshot, created, updated) VALUES (?, ?, ?, 0, ?, ?)", template, r.Team, r.Public, stamp(now), stamp(now)); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, "INSERT INTO names (team, name, template) VALUES (?, ?, ?)", r.Team, r.Name, template); err != nil {
				return err
			}
		}
		if _, err := tx.ExecContext(ctx, "UPDATE templates SET updated = ?, public = public OR ? WHERE id = ?", stamp(now), r.Public, template); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "INSERT INTO build_jobs (id, template, team, state, created, updated, cpus, memory, disk, tags) VALUES (?, ?, ?, 'waiting', ?, ?, ?, ?, ?, ?)",
			r.ID, template, r.Team, stamp(now), stamp(now), r.CPUs, r.MemoryMB, r.DiskMB, string(tags))
		return err
	})
	return template, d.explain("write to", err)
}

// keptBeside counts a team's templates, each build that tags stand for by itself, as they will be beside another build of one of them
// by those tags. A template without a build is one, too.
const keptBeside = `SELECT ifnull(sum(CASE id WHEN ?2 THEN kept ELSE max(1, kept) END), 0) FROM (SELECT t.id,
	(SELECT count(DISTINCT build) FROM tags WHERE template = t.id AND NOT (t.id = ?2 AND tag IN (SELECT value FROM json_each(?3)))) AS kept
	FROM templates t WHERE t.team = ?1 AND NOT t.snapshot)`

// within checks that there may be one more of a team's, which is the query's first argument.
func within(ctx context.Context, tx *sql.Tx, most int, what, query, team string, more ...any) error {
	if most == 0 {
		return nil
	}
	var n int
	if err := tx.QueryRowContext(ctx, query, append([]any{team}, more...)...).Scan(&n); err != nil {
		return err
	}
	if n < most {
		return nil
	}
	out := "delete one or a tag, or raise limits.templates"
	if what == "builds" {
		out = "wait for one to end or cancel it, or raise limits.builds"
	}
	return errdefs.ErrResourceExhausted.WithMessage(fmt.Sprintf("team %s has %d %s%s, which is all that it may: %s", team, n, what, map[bool]string{true: " under way"}[what == "builds"], out))
}

// replaceJobs ends jobs of a template that wait for their client by any of those tags. Nobody else could end them who has no root's
// rights, and a client that has failed before it has said what is to be built begins again by the same.
func replaceJobs(ctx context.Context, tx *sql.Tx, now time.Time, template, tags string, replaced json.RawMessage) error {
	_, err := tx.ExecContext(ctx, `UPDATE build_jobs SET state = 'error', updated = ?1, finished = ?1, reason = ?2 WHERE template = ?3 AND state = 'waiting'
		AND EXISTS (SELECT 1 FROM json_each(build_jobs.tags) WHERE value IN (SELECT value FROM json_each(?4)))`, stamp(now), string(replaced), template, tags)
	return err
}

// forgetJobs ends jobs that wait for their client in vain, and forgets old ones.
func forgetJobs(ctx context.Context, tx *sql.Tx, now time.Time, expired json.RawMessage) error {
	_, err := tx.ExecContext(ctx, "UPDATE build_jobs SET state = 'error', updated = ?1, finished = ?1, reason = ?2 WHERE state = 'waiting' AND created < ?3",
		stamp(now), string(expired), stamp(now.Add(-keepWaiting)))
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `DELETE FROM build_jobs WHERE id IN (SELECT id FROM
		(SELECT id, row_number() OVER (PARTITION BY template ORDER BY created DESC, id DESC) AS n FROM build_jobs
			WHERE state NOT IN `+underWay+` AND NOT EXISTS (SELECT 1 FROM tags WHERE tags.build = build_jobs.id))
		WHERE n > ?)`, keepJobs)
	return err
}

// Job finds a job by its id.
func (d *DB) Job(ctx context.Context, id string) (Job, error) {
	var j Job
	to, read := j.fields()
	err := d.read.QueryRowContext(ctx, "SELECT "+jobColumns+" FROM build_jobs j WHERE id = ?", id).Scan(to...)
	if err == nil {
		err = read()
	}
	return j, d.explain("read", err)
}

// JobsUnderWay lists the jobs that may still become a build, oldest first.
func (d *DB) JobsUnderWay(ctx context.Context) ([]Job, error) {
	rows, err := d.read.QueryContext(ctx, "SELECT "+jobColumns+" FROM build_jobs j WHERE state IN "+underWay+" ORDER BY updated, id")
	return collect(d, rows, err, func(j *Job) error {
		to, read := j.fields()
		return errors.Join(rows.Scan(to...), read())
	})
}

// MoveJob has a job that is in the state from be in another one, or the same, which is written before that has any effect. plan replaces its own
// unless it is nil. A job in another state is errdefs.ErrFailedPrecondition, none errdefs.ErrNotFound.
func (d *DB) MoveJob(ctx context.Context, id string, from, to JobState, plan json.RawMessage) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		if err := inState(ctx, tx, id, from); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "UPDATE build_jobs SET state = ?, updated = ?, plan = ifnull(?, plan) WHERE id = ?",
			to, stamp(time.Now()), nullable(plan), id)
		return err
	})
	return d.explain("write to", err)
}

func nullable(j json.RawMessage) any {
	if j == nil {
		return nil
	}
	return string(j)
}

// inState checks that a job is in one of those states.
func inState(ctx context.Context, tx *sql.Tx, id string, possible ...JobState) error {
	var state JobState
	err := tx.QueryRowContext(ctx, "SELECT state FROM build_jobs WHERE id = ?", id).Scan(&state)
	if errors.Is(err, sql.ErrNoRows) {
		return errdefs.ErrNotFound.WithMessage(fmt.Sprintf("build '%s' not found", id))
	}
	if err == nil && !slices.Contains(possible, state) {
		err = errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("build '%s' is in the state %s already", id, state))
	}
	return err
}

// EndJob has a job under way come to nothing, for a reason, with the last lines of its log.
func (d *DB) EndJob(ctx context.Context, id string, reason json.RawMessage, log []LogLine) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		if err := inState(ctx, tx, id, JobWaiting, JobQueued, JobBuilding); err != nil {
			return err
		}
		if err := addLog(ctx, tx, id, log); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "UPDATE build_jobs SET state = 'error', updated = ?, finished = ?1, reason = ? WHERE id = ?", stamp(time.Now()), string(reason), id)
		return err
	})
	return d.explain("write to", err)
}

// PublishJob has the build of a job, of which all is known by now, be what its tags stand for, with the last lines of its log. A job
// that was forgotten since is errdefs.ErrNotFound. diskMB is in MiB.
func (d *DB) PublishJob(ctx context.Context, id string, diskMB int, s Settings, product json.RawMessage, log []LogLine) error {
	settings, err := json.Marshal(s)
	if err != nil {
		return err
	}
	err = d.update(ctx, func(tx *sql.Tx) error {
		if err := inState(ctx, tx, id, JobBuilding); err != nil {
			return err
		}
		var template string
		var raw []byte
		var tags []string
		err := tx.QueryRowContext(ctx, "SELECT template, tags FROM build_jobs WHERE id = ?", id).Scan(&template, &raw)
		if err = errors.Join(err, json.Unmarshal(raw, &tags)); err != nil {
			return err
		}
		now := stamp(time.Now())
		if _, err := tx.ExecContext(ctx, "UPDATE builds SET template = ?, disk = ?, settings = ? WHERE id = ?", template, diskMB, string(settings), id); err != nil {
			return err
		}
		if err := assign(ctx, tx, template, id, tags, now); err != nil {
			return err
		}
		if err := addLog(ctx, tx, id, log); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE build_jobs SET state = 'ready', updated = ?, finished = ?1, disk = ?, made = ? WHERE id = ?", now, diskMB, string(product), id); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE templates SET updated = ? WHERE id = ?", now, template); err != nil {
			return err
		}
		return loosen(ctx, tx, template)
	})
	return d.explain("write to", err)
}
