package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/pkg/identifiers"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

func auditCommand() *cli.Command {
	return &cli.Command{
		Name:  "audit",
		Usage: "show what was done with sandboxes, snapshots, templates and keys: when, for whom, and what has come of it",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "team", Usage: "only what is `NAME`'s"},
			&cli.StringFlag{Name: "sandbox", Usage: "only what is about the sandbox `ID`, its children and snapshots"},
			&cli.StringFlag{Name: "since", Usage: "only what is of that `TIME` or later: 2h, 2026-01-31, 2026-01-31T12:00:00Z"},
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "and then what comes, until it is interrupted"},
			&cli.BoolFlag{Name: "json", Usage: "lines of JSON, as they are in the file"},
		},
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return errors.New("audit: it takes no arguments")
			}
			since, err := sinceWhen(c.String("since"), time.Now())
			if err != nil {
				return fmt.Errorf("audit: %w", err)
			}
			w := &auditWriter{c: c, filter: audit.Filter{Team: c.String("team"), Sandbox: c.String("sandbox"), Since: since}}
			var forever chan struct{} // unless it is nil
			if c.Bool("follow") {
				forever = make(chan struct{})
			}
			if !c.Bool("json") {
				fmt.Fprintf(c.App.Writer, auditLine, "TIME", "ACTION", "RESULT", "TEAM", "SANDBOX", "VIA", "KEY", "WHAT")
			}
			err = sandbox.CopyLog(c.Context, w, at(c).cfg.AuditFile(), sandbox.LogStart{Tail: -1}, forever)
			if errors.Is(err, sandbox.ErrNoLog) {
				return nil // nothing was done yet
			}
			if err != nil {
				return fmt.Errorf("audit: %w", err)
			}
			if forever != nil {
				return leftAlone(c.Context, nil)
			}
			return nil
		},
	}
}

// sinceWhen reads a time, or how long ago it is.
func sinceWhen(s string, now time.Time) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04:05", "2006-01-02T15:04", time.DateOnly} {
		if t, err := time.ParseInLocation(layout, s, time.Local); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("--since %q is no time: 2h, 2026-01-31 or 2026-01-31T12:00:00Z, say", s)
}

// recorded has the audit log have what has come of something that this command has asked containerd for, and returns the error.
func recorded(c *cli.Context, action audit.Action, id string, err error) error {
	e := audit.Entry{Action: action, Sandbox: id, By: audit.By{Via: audit.CLI}}
	if identifiers.Validate(id) != nil { // it isn't an id, but anything that was typed
		e.Sandbox = ""
	}
	e.Result, e.Error = audit.Outcome(err)
	return errors.Join(err, audit.Append(audit.FileOf(at(c).cfg), e))
}

// auditLine is how entries are shown.
const auditLine = "%-20s  %-10s  %-20s  %-12s  %-20s  %-9s  %-36s  %s\n"

// auditWriter shows the lines that are asked for.
type auditWriter struct {
	c      *cli.Context
	filter audit.Filter
	line   []byte // of which the end hasn't come
}

func (w *auditWriter) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		part, after, whole := bytes.Cut(rest, []byte{'\n'})
		w.line = append(w.line, part...)
		if rest = after; !whole {
			break
		}
		if err := w.show(w.line); err != nil {
			return 0, err
		}
		w.line = w.line[:0]
	}
	return len(b), nil
}

func (w *auditWriter) show(line []byte) error {
	out := w.c.App.Writer
	e, err := audit.Parse(line)
	if err != nil { // the end of the host has cut it short
		_, err = fmt.Fprintf(w.c.App.ErrWriter, "cube: %v: %q\n", err, line)
		return err
	}
	if !w.filter.Has(e) {
		return nil
	}
	if w.c.Bool("json") {
		_, err := fmt.Fprintf(out, "%s\n", line)
		return err
	}
	result := string(e.Result)
	if e.Error != "" {
		result = e.Error
	}
	_, err = io.WriteString(out, strings.TrimRight(fmt.Sprintf(auditLine, e.Time.Local().Format("2006-01-02 15:04:05"), e.Action, result, cmp.Or(e.Team, "-"), cmp.Or(e.Sandbox, "-"), e.Via, cmp.Or(e.Key, "-"), auditWhat(e)), " \n")+"\n")
	return err
}

// auditWhat is the rest of an entry.
func auditWhat(e audit.Entry) string {
	var all []string
	for _, one := range []struct{ name, value string }{
		{"snapshot", e.Snapshot}, {"template", e.Template}, {"of", e.Origin}, {"key", e.Subject}, {"request", e.Request}, {"from", e.From},
	} {
		if one.value != "" {
			all = append(all, one.name+"="+one.value)
		}
	}
	if e.Why != "" {
		all = append(all, e.Why)
	}
	return strings.Join(all, " ")
}
