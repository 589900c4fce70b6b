package main

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/docker/go-units"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/api"
)

func snapshotCommand() *cli.Command {
	return &cli.Command{
		Name:   "snapshot",
		Usage:  "save running containers with all that runs in them",
		Action: noCommand("snapshot"),
		Subcommands: []*cli.Command{
			{
				Name:      "create",
				Usage:     "make a snapshot of a running container, which goes on, and print its name",
				ArgsUsage: "ID",
				Flags:     []cli.Flag{&cli.StringFlag{Name: "name", Usage: "the snapshot's `NAME` (default: one made of the container's id)"}},
				Action: withAPI(func(c *cli.Context, client *api.Client) error {
					if c.NArg() != 1 {
						return errors.New("of which container? `cube ps` lists them")
					}
					name, err := client.Save(c.Context, c.Args().First(), c.String("name"))
					if err == nil {
						fmt.Fprintln(c.App.Writer, name)
					}
					return err
				}),
			},
			{
				Name:  "ls",
				Usage: "list snapshots",
				Flags: []cli.Flag{
					&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "names only"},
					&cli.BoolFlag{Name: "json", Usage: "as a JSON array"},
				},
				Action: withAPI(snapshotListAction),
			},
			{
				Name:      "inspect",
				Usage:     "show what is known of a snapshot, as JSON",
				ArgsUsage: "SNAPSHOT",
				Action: withAPI(func(c *cli.Context, client *api.Client) error {
					if c.NArg() != 1 {
						return errors.New("which snapshot? `cube snapshot ls` lists them")
					}
					s, err := client.Snapshot(c.Context, c.Args().First())
					if err != nil {
						return err
					}
					return writeJSON(c.App.Writer, s)
				}),
			},
			{
				Name:      "rm",
				Usage:     "delete snapshots; containers that have been made of them go on",
				ArgsUsage: "SNAPSHOT...",
				Action: eachByAPI(func(c *cli.Context, client *api.Client, name string) error {
					users, err := client.DeleteSnapshot(c.Context, name)
					if len(users) > 0 {
						fmt.Fprintf(c.App.ErrWriter, "cube: %s is deleted; still in use by %s, it takes its space until they have ended\n", name, strings.Join(users, ", "))
					}
					return err
				}),
			},
		},
	}
}

func snapshotListAction(c *cli.Context, client *api.Client) error {
	if c.NArg() > 0 {
		return errors.New("it takes no arguments: `cube snapshot inspect` tells of one snapshot")
	}
	list, err := client.Snapshots(c.Context)
	if err != nil {
		return err
	}
	w := c.App.Writer
	switch {
	case c.Bool("quiet"):
		for _, d := range list {
			fmt.Fprintln(w, d.Name)
		}
		return nil
	case c.Bool("json"):
		return writeJSON(w, list)
	}
	t := newTable(w, "NAME", "OF", "CREATED", "MEMORY", "FOR", "TEAM", "KEY", "USED BY")
	for _, d := range list {
		if d.Damage != "" {
			t.row(d.Name, "-", "-", "-", "-", cmp.Or(d.Team, "-"), cmp.Or(d.Key, "-"), d.Damage)
			continue
		}
		t.row(d.Name, d.Pod, ago(d.Created), units.BytesSize(float64(d.Memory)), cmp.Or(string(d.Purpose), "-"), cmp.Or(d.Team, "-"), cmp.Or(d.Key, "-"), strings.Join(d.UsedBy, ","))
	}
	return t.flush()
}
