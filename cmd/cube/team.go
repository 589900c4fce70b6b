package main

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/orchestrator/api"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/teams"
)

func teamCommand() *cli.Command {
	return &cli.Command{
		Name:   "team",
		Usage:  "handle those whose sandboxes, templates and keys there are",
		Action: noCommand("team"),
		Subcommands: []*cli.Command{
			{
				Name:   "ls",
				Usage:  "list the teams with what they have",
				Flags:  []cli.Flag{&cli.BoolFlag{Name: "json", Usage: "as a JSON array"}},
				Action: withDB(teamList),
			},
			{
				Name:      "purge",
				Usage:     "remove a team: its sandboxes, disks, snapshots, templates, caches of builds, logs and keys",
				ArgsUsage: "TEAM",
				Description: "What was removed is printed, and what is left, which is looked for on the disk, in containerd and in the database. The exit code is 0\n" +
					"if nothing is. It can be repeated whenever it was cut short; the team can have nothing made meanwhile. Entries of the audit log stay.",
				Flags: []cli.Flag{
					&cli.BoolFlag{Name: "yes", Usage: "also the team " + db.DefaultTeam},
					&cli.BoolFlag{Name: "json", Usage: "as JSON"},
				},
				Action: withAPI(teamPurge),
			},
		},
	}
}

// teamLine is a team as JSON has it.
type teamLine struct {
	ID        string     `json:"id"`
	Created   time.Time  `json:"created"`
	Keys      int        `json:"keys"`
	Sandboxes int        `json:"sandboxes"`
	Templates int        `json:"templates"`
	Snapshots int        `json:"snapshots"`
	Closed    *time.Time `json:"closed,omitempty"`
}

func teamList(c *cli.Context, d *db.DB) error {
	if c.NArg() > 0 {
		return errors.New("it takes no arguments")
	}
	all, err := d.Teams(c.Context)
	if err != nil {
		return err
	}
	lines := []teamLine{} // an empty list is one, in JSON too
	for _, t := range all {
		l := teamLine{ID: t.ID, Created: t.CreatedAt, Keys: t.Keys, Sandboxes: t.Sandboxes, Templates: t.Templates, Snapshots: t.Snapshots}
		if !t.ClosedAt.IsZero() {
			l.Closed = &t.ClosedAt
		}
		lines = append(lines, l)
	}
	if c.Bool("json") {
		return writeJSON(c.App.Writer, lines)
	}
	t := newTable(c.App.Writer, "TEAM", "CREATED", "KEYS", "SANDBOXES", "TEMPLATES", "SNAPSHOTS", "STATE")
	for _, l := range lines {
		state := "good"
		if l.Closed != nil {
			state = "is being removed, begun " + ago(*l.Closed)
		}
		t.row(l.ID, ago(l.Created), strconv.Itoa(l.Keys), strconv.Itoa(l.Sandboxes), strconv.Itoa(l.Templates), strconv.Itoa(l.Snapshots), state)
	}
	return t.flush()
}

func teamPurge(c *cli.Context, client *api.Client) error {
	if c.NArg() != 1 {
		return errors.New("which team? `cube team ls` lists them")
	}
	team := c.Args().First()
	if team == db.DefaultTeam && !c.Bool("yes") {
		return fmt.Errorf("team %s owns what was made for nobody in particular, such as public templates: --yes removes it all the same", team)
	}
	r, err := client.PurgeTeam(c.Context, team)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		err = writeJSON(c.App.Writer, r)
	} else {
		err = showPurge(c, r)
	}
	if err == nil && !r.Done() {
		err = fmt.Errorf("of team %s %d things are left, and %d steps have failed: the same again goes on", team, len(r.Left), len(r.Failed))
	}
	return err
}

func showPurge(c *cli.Context, r teams.Report) error {
	t := newTable(c.App.Writer, "KIND", "NAME", "STATE")
	for _, i := range r.Removed {
		t.row(i.Kind, i.Name, "removed")
	}
	for _, i := range r.Left {
		state := "left"
		if i.Why != "" {
			state += ": " + i.Why
		}
		t.row(i.Kind, i.Name, state)
	}
	if len(r.Removed)+len(r.Left) > 0 {
		if err := t.flush(); err != nil {
			return err
		}
	}
	say := sayTo(c.App.ErrWriter)
	for _, why := range r.Failed {
		say(why)
	}
	if r.Done() {
		say(fmt.Sprintf("team %s is gone: %d things removed, nothing left", r.Team, len(r.Removed)))
	}
	return nil
}

// retentionFlags are what is kept, for once.
func retentionFlags() []cli.Flag {
	return []cli.Flag{
		&cli.DurationFlag{Name: "snapshot-ttl", Usage: "snapshots are kept for `TIME`; 0: for good"},
		&cli.IntFlag{Name: "snapshot-keep", Usage: "the last `N` snapshots are kept of each name, or of a sandbox; 0: all"},
		&cli.DurationFlag{Name: "paused-ttl", Usage: "sandboxes are kept paused for `TIME`; 0: for good"},
		&cli.IntFlag{Name: "paused-keep", Usage: "the last `N` paused sandboxes are kept of a team; 0: all"},
	}
}

// retentionOf is what the configuration keeps as it is written, or the flags, which are for all teams.
func retentionOf(c *cli.Context) (*config.Retention, error) {
	r := at(c).cfg.Retention
	var flags config.Keep
	duration := func(name string) *config.Duration {
		d := config.Duration(c.Duration(name))
		return &d
	}
	number := func(name string) *int {
		n := c.Int(name)
		return &n
	}
	for name, set := range map[string]func(name string){
		"snapshot-ttl":  func(name string) { flags.SnapshotTTL = duration(name) },
		"snapshot-keep": func(name string) { flags.SnapshotKeep = number(name) },
		"paused-ttl":    func(name string) { flags.PausedTTL = duration(name) },
		"paused-keep":   func(name string) { flags.PausedKeep = number(name) },
	} {
		if c.IsSet(name) {
			set(name)
		}
	}
	r = r.With(flags)
	return &r, r.Validate()
}
