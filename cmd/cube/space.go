package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/api"
	"github.com/cubesandbox/cube/orchestrator/usage"
)

func dfCommand() *cli.Command {
	return &cli.Command{
		Name:  "df",
		Usage: "show what takes the disk's space",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "each snapshot, base snapshot and artefact, too"},
			&cli.BoolFlag{Name: "json", Usage: "as JSON"},
		},
		Action: withAPI(func(c *cli.Context, client *api.Client) error {
			if c.NArg() > 0 {
				return errors.New("it takes no arguments")
			}
			u, err := client.Usage(c.Context)
			if err != nil {
				return err
			}
			if c.Bool("json") {
				return writeJSON(c.App.Writer, u)
			}
			return showUsage(c, u)
		}),
	}
}

func showUsage(c *cli.Context, u usage.Usage) error {
	w := c.App.Writer
	at := u.Store.Dir
	if u.Store.Image != "" {
		at += " in " + u.Store.Image
	}
	fmt.Fprintf(w, "The store %s has %s, of which %s are free.\n", at, bytesSize(u.Store.Size), bytesSize(u.Store.Free))
	if u.Store.Full != "" {
		fmt.Fprintln(w, u.Store.Full)
	}
	fmt.Fprintln(w)
	t := newTable(w, "KIND", "COUNT", "SIZE", "ALONE", "TEAM", "KEY")
	for _, k := range u.Kinds {
		t.row(k.Name, strconv.Itoa(k.Count), bytesSize(k.Bytes), bytesSize(k.Own), "", "")
		if !c.Bool("verbose") {
			continue
		}
		for _, i := range k.Items {
			t.row("  "+i.Name, "", bytesSize(i.Bytes), bytesSize(i.Own), i.Team, i.Key)
		}
	}
	for _, l := range u.Lingering {
		t.row("deleted "+l.Name, "used by "+strings.Join(l.Users, ", "), bytesSize(l.Bytes), "", "", "")
	}
	return t.flush()
}

func pruneCommand() *cli.Command {
	return &cli.Command{
		Name:  "prune",
		Usage: "remove what takes space and nobody needs, and what retention doesn't keep",
		Description: "What is kept of teams' snapshots and paused sandboxes is what [retention] of the configuration says as it is written at the moment, or the flags\n" +
			"for this once, of all teams: with --dry-run they tell what another configuration would do.",
		Flags: append([]cli.Flag{
			&cli.BoolFlag{Name: "dry-run", Usage: "only show it"},
			&cli.BoolFlag{Name: "json", Usage: "as JSON"},
		}, retentionFlags()...),
		Action: withAPI(func(c *cli.Context, client *api.Client) error {
			if c.NArg() > 0 {
				return errors.New("it takes no arguments: it removes all that nobody needs")
			}
			keep, err := retentionOf(c)
			if err != nil {
				return err
			}
			freed, err := client.Prune(c.Context, c.Bool("dry-run"), keep)
			if err != nil && len(freed.Items) == 0 {
				return err
			}
			return errors.Join(err, showFreed(c, freed))
		}),
	}
}

func showFreed(c *cli.Context, freed usage.Freed) error {
	if c.Bool("json") {
		return writeJSON(c.App.Writer, freed)
	}
	say := sayTo(c.App.ErrWriter)
	for _, note := range freed.Notes {
		say(note)
	}
	what := "freed"
	if c.Bool("dry-run") {
		what = "could be freed"
	}
	var sum int64
	t := newTable(c.App.Writer, "KIND", "NAME", "SIZE", "WHY")
	for _, r := range freed.Items {
		sum += r.Bytes
		t.row(r.Kind, r.Name, bytesSize(r.Bytes), r.Why)
	}
	if len(freed.Items) > 0 {
		if err := t.flush(); err != nil {
			return err
		}
	}
	say(fmt.Sprintf("%s %s", bytesSize(sum), what))
	return nil
}

func bytesSize(n int64) string { return units.BytesSize(float64(n)) }
