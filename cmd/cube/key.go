package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/audit"
	"github.com/cubesandbox/cube/orchestrator/db"
)

func keyCommand() *cli.Command {
	return &cli.Command{
		Name:   "key",
		Usage:  "handle the API keys of those who use sandboxes",
		Action: noCommand("key"),
		Subcommands: []*cli.Command{
			{
				Name:  "create",
				Usage: "make a key and print it; it can't be shown again",
				Flags: []cli.Flag{&cli.StringFlag{Name: "team", Usage: "whose sandboxes it is for, a `NAME`; a new one begins a team", Value: db.DefaultTeam}},
				Action: withDB(func(c *cli.Context, d *db.DB) error {
					if c.NArg() > 0 {
						return errors.New("it takes no arguments: --team says whose it is")
					}
					key, err := d.CreateKey(c.Context, c.String("team"))
					if err != nil {
						return err
					}
					fmt.Fprintln(c.App.Writer, key)
					return recordKey(c, d, audit.KeyCreate, key)
				}),
			},
			{
				Name:   "ls",
				Usage:  "list the keys, by what may be shown of them",
				Flags:  []cli.Flag{&cli.BoolFlag{Name: "json", Usage: "as a JSON array"}},
				Action: withDB(keyListAction),
			},
			{
				Name:      "revoke",
				Usage:     "make keys worth nothing, at once; their team's sandboxes go on",
				ArgsUsage: "ID...",
				Action: withDB(func(c *cli.Context, d *db.DB) error {
					if c.NArg() == 0 {
						return errors.New("which key? `cube key ls` lists their ids")
					}
					var errs []error
					for _, id := range c.Args().Slice() {
						err := d.RevokeKey(c.Context, id)
						if err == nil {
							err = recordKey(c, d, audit.KeyRevoke, id)
						}
						if err != nil {
							errs = append(errs, fmt.Errorf("%s: %w", masked(id), err))
						}
					}
					return errors.Join(errs...)
				}),
			},
		},
	}
}

// recordKey has the audit log have what was done with a key.
func recordKey(c *cli.Context, d *db.DB, action audit.Action, key string) error {
	k, err := d.Key(c.Context, key)
	if err != nil {
		return err
	}
	return audit.Append(audit.FileOf(at(c).cfg), audit.Entry{Action: action, Result: audit.OK, Team: k.Team, By: audit.By{Via: audit.CLI}, Subject: k.ID})
}

// masked leaves of a key only what may be shown.
func masked(key string) string {
	if digits, ok := strings.CutPrefix(key, db.KeyPrefix); ok && len(digits) > 6 {
		return db.KeyPrefix + digits[:2] + "..." + digits[len(digits)-4:]
	}
	return key
}

// withDB runs f with the control plane's database, whether `cube up` runs or not.
func withDB(f func(*cli.Context, *db.DB) error) cli.ActionFunc {
	return func(c *cli.Context) (err error) {
		command := strings.TrimPrefix(c.Command.HelpName, "cube ")
		d, err := db.Open(c.Context, at(c).cfg.DatabaseFile())
		if err == nil {
			err = errors.Join(f(c, d), d.Close())
		}
		if err != nil {
			return fmt.Errorf("%s: %w", command, err)
		}
		return nil
	}
}

// keyLine is a key as JSON has it.
type keyLine struct {
	ID      string     `json:"id"`
	Team    string     `json:"team"`
	Mask    string     `json:"mask"`
	Created time.Time  `json:"created"`
	Used    *time.Time `json:"used,omitempty"`
	Revoked *time.Time `json:"revoked,omitempty"`
}

func keyListAction(c *cli.Context, d *db.DB) error {
	if c.NArg() > 0 {
		return errors.New("it takes no arguments")
	}
	keys, err := d.Keys(c.Context)
	if err != nil {
		return err
	}
	lines := []keyLine{} // an empty list is one, in JSON too
	for _, k := range keys {
		line := keyLine{ID: k.ID, Team: k.Team, Mask: db.KeyPrefix + k.Prefix + "..." + k.Suffix, Created: k.CreatedAt}
		if !k.UsedAt.IsZero() {
			line.Used = &k.UsedAt
		}
		if !k.RevokedAt.IsZero() {
			line.Revoked = &k.RevokedAt
		}
		lines = append(lines, line)
	}
	if c.Bool("json") {
		return writeJSON(c.App.Writer, lines)
	}
	t := newTable(c.App.Writer, "ID", "TEAM", "KEY", "CREATED", "USED", "STATE")
	for _, l := range lines {
		used, state := "never", "good"
		if l.Used != nil {
			used = ago(*l.Used)
		}
		if l.Revoked != nil {
			state = "revoked " + ago(*l.Revoked)
		}
		t.row(l.ID, l.Team, l.Mask, ago(l.Created), used, state)
	}
	return t.flush()
}
