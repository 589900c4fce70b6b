package db

import (
	"context"
	"database/sql"
	"time"
)

// LogLine is a line of a job's log.
type LogLine struct {
	Seq     int // from 0 on
	At      time.Time
	Level   int    // 0 is the least
	Step    string // that it is of
	Message string
}

// AddLog appends lines to a job's log. One that was forgotten is errdefs.ErrNotFound.
func (d *DB) AddLog(ctx context.Context, job string, lines []LogLine) error {
	err := d.update(ctx, func(tx *sql.Tx) error {
		if err := inState(ctx, tx, job, JobBuilding); err != nil {
			return err
		}
		return addLog(ctx, tx, job, lines)
	})
	return d.explain("write to", err)
}

func addLog(ctx context.Context, tx *sql.Tx, job string, lines []LogLine) error {
	for _, l := range lines {
		if _, err := tx.ExecContext(ctx, "INSERT INTO build_log (job, seq, at, level, step, message) VALUES (?, ?, ?, ?, ?, ?)", job, l.Seq, stamp(l.At), l.Level, l.Step, l.Message); err != nil {
			return err
		}
	}
	return nil
}

// LogFilter says which lines of a job's log are read.
type LogFilter struct {
	Level int // and above
	// From leaves out what is older; with Backward, what is newer. Zero is the log's beginning, or its end.
	From     time.Time
	Backward bool // newest first
	Offset   int  // lines that are passed over
	Limit    int
}

// JobLog reads a job's log.
func (d *DB) JobLog(ctx context.Context, job string, f LogFilter) ([]LogLine, error) {
	q := "SELECT seq, at, level, step, message FROM build_log WHERE job = ? AND level >= ?"
	args := []any{job, f.Level}
	order := " ORDER BY seq"
	compare := ">="
	if f.Backward {
		order, compare = " ORDER BY seq DESC", "<="
	}
	if !f.From.IsZero() {
		q += " AND at " + compare + " ?"
		args = append(args, stamp(f.From))
	}
	rows, err := d.read.QueryContext(ctx, q+order+" LIMIT ? OFFSET ?", append(args, f.Limit, f.Offset)...)
	return collect(d, rows, err, func(l *LogLine) error {
		var us int64
		err := rows.Scan(&l.Seq, &us, &l.Level, &l.Step, &l.Message)
		l.At = at(us)
		return err
	})
}
