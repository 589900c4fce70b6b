package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/sandbox"
	"github.com/cubesandbox/cube/shim/saved"
	"github.com/cubesandbox/cube/vmm/snapshot"
)

func snapshotCommand() *cli.Command {
	return &cli.Command{
		Name:  "snapshot",
		Usage: "save running containers with all that runs in them",
		Subcommands: []*cli.Command{
			{
				Name:      "create",
				Usage:     "make a snapshot of a running container, which goes on, and print its name",
				ArgsUsage: "ID",
				Flags:     []cli.Flag{&cli.StringFlag{Name: "name", Usage: "the snapshot's `NAME` (default: one made of the container's id)"}},
				Action: withClient(func(c *cli.Context, client *sandbox.Client) error {
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
				Action: inStore(snapshotListAction),
			},
			{
				Name:      "inspect",
				Usage:     "show what is known of a snapshot, as JSON",
				ArgsUsage: "SNAPSHOT",
				Action: inStore(func(c *cli.Context, store *snapshot.Store) error {
					if c.NArg() != 1 {
						return errors.New("which snapshot? `cube snapshot ls` lists them")
					}
					info, err := store.Inspect(c.Args().First())
					if err != nil {
						return err
					}
					d, err := describe(store, info)
					if err != nil {
						return err
					}
					return writeJSON(c.App.Writer, d)
				}),
			},
			{
				Name:      "rm",
				Usage:     "delete snapshots; containers that have been made of them go on",
				ArgsUsage: "SNAPSHOT...",
				Action: inStore(func(c *cli.Context, store *snapshot.Store) error {
					if c.NArg() == 0 {
						return errors.New("it takes at least one SNAPSHOT")
					}
					var errs []error
					for _, name := range c.Args().Slice() {
						users, err := store.Delete(name)
						errs = append(errs, err)
						if len(users) > 0 {
							fmt.Fprintf(c.App.ErrWriter, "%s is deleted; its space is free when %s have ended\n", name, strings.Join(names(users), ", "))
						}
					}
					return errors.Join(errs...)
				}),
			},
		},
	}
}

func rollbackCommand() *cli.Command {
	return &cli.Command{
		Name:      "rollback",
		Usage:     "put a running container back to a snapshot of it: its memory and its disk",
		ArgsUsage: "ID SNAPSHOT",
		Action: withClient(func(c *cli.Context, client *sandbox.Client) error {
			if c.NArg() != 2 {
				return errors.New("it takes a container and a snapshot: `cube snapshot ls` lists them")
			}
			return client.Rollback(c.Context, c.Args().Get(0), c.Args().Get(1))
		}),
	}
}

func cloneCommand() *cli.Command {
	return &cli.Command{
		Name:      "clone",
		Usage:     "make containers that go on from where a running one is, and print their ids",
		ArgsUsage: "ID",
		Description: "The container itself goes on, too. A clone has a machine, an identity and a network of its own, and an output that\n" +
			"`cube logs` reads; host ports stay with the container.",
		Flags: []cli.Flag{&cli.IntFlag{Name: "number", Aliases: []string{"n"}, Value: 1, Usage: "how many"}},
		Action: withClient(func(c *cli.Context, client *sandbox.Client) error {
			if c.NArg() != 1 || c.Int("number") < 1 {
				return errors.New("it takes a container, and a number of at least 1")
			}
			ids, err := client.Clone(c.Context, c.Args().First(), c.Int("number"))
			for _, id := range ids {
				fmt.Fprintln(c.App.Writer, id)
			}
			return err
		}),
	}
}

// inStore runs f with the store of snapshots, and says for which command an error is.
func inStore(f func(*cli.Context, *snapshot.Store) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		if err := f(c, snapshot.New(at(c).cfg, at(c).clientLog)); err != nil {
			return fmt.Errorf("%s: %w", strings.TrimPrefix(c.Command.HelpName, "cube "), err)
		}
		return nil
	}
}

// described is what is shown of a snapshot.
type described struct {
	Name       string    `json:"name"`
	Created    time.Time `json:"created,omitzero"`
	Parent     string    `json:"parent,omitempty"`
	Pod        string    `json:"pod,omitempty"`
	Containers []string  `json:"containers,omitempty"`
	VCPUs      int       `json:"vcpus,omitempty"`
	Memory     int64     `json:"memory,omitempty"` // bytes
	QEMU       string    `json:"qemu,omitempty"`
	Guest      string    `json:"guest,omitempty"`
	AtRest     bool      `json:"at_rest"`
	UsedBy     []string  `json:"used_by,omitempty"`
	Damage     string    `json:"damage,omitempty"`
}

func describe(store *snapshot.Store, info snapshot.Info) (d described, err error) {
	users, err := store.Users(info.ID)
	if err != nil {
		return d, err
	}
	d = described{
		Name: info.ID, Created: info.Created, Parent: info.Parent, VCPUs: info.Shape.VCPUs, Memory: int64(info.Shape.MemoryMiB) << 20,
		QEMU: info.Platform.QEMU, Guest: info.Platform.Guest, AtRest: info.Frozen, UsedBy: names(users), Damage: info.Damage,
	}
	if info.Damage != "" {
		return d, nil
	}
	pod, err := saved.Decode(info.Note)
	if err != nil {
		d.Damage = err.Error()
		return d, nil
	}
	d.Pod = pod.ID
	for _, c := range pod.Containers {
		d.Containers = append(d.Containers, c.ID)
	}
	return d, nil
}

func names(users []snapshot.User) (list []string) {
	for _, u := range users {
		list = append(list, u.Name)
	}
	return list
}

func snapshotListAction(c *cli.Context, store *snapshot.Store) error {
	all, err := store.List()
	if err != nil {
		return err
	}
	list := []described{}
	for _, info := range all {
		d, err := describe(store, info)
		if err != nil {
			return err
		}
		list = append(list, d)
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
	t := newTable(w, "NAME", "OF", "CREATED", "MEMORY", "USED BY")
	for _, d := range list {
		if d.Damage != "" {
			t.row(d.Name, "-", "-", "-", d.Damage)
			continue
		}
		t.row(d.Name, d.Pod, ago(d.Created), units.BytesSize(float64(d.Memory)), strings.Join(d.UsedBy, ","))
	}
	return t.flush()
}
