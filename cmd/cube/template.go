package main

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/docker/go-units"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/api"
	"github.com/cubesandbox/cube/orchestrator/client"
	"github.com/cubesandbox/cube/orchestrator/db"
)

func templateCommand() *cli.Command {
	team := &cli.StringFlag{Name: "team", Value: db.DefaultTeam, Usage: "whose it is"}
	detach := &cli.BoolFlag{Name: "detach", Aliases: []string{"d"}, Usage: "don't wait for it: print its build's id, for `cube template logs`"}
	return &cli.Command{
		Name:   "template",
		Usage:  "what E2B's sandboxes are made of",
		Action: noCommand("template"),
		Subcommands: []*cli.Command{
			{
				Name:      "build",
				Usage:     "make a template, or another build of it, of an image or another template, and print its id",
				ArgsUsage: "NAME [IMAGE]",
				Description: "A machine is started from the image, with envd in it, and saved; a sandbox that is made of that has to work before the template is there.\n" +
					"The image needs a shell, and bash when all steps are done. Interrupted, the build is given up.",
				Flags: []cli.Flag{
					team, detach,
					&cli.StringSliceFlag{Name: "tag", Usage: "what the build is called; more than one is possible", DefaultText: db.DefaultTag},
					&cli.BoolFlag{Name: "public", Usage: "all teams may use it"},
					&cli.StringFlag{Name: "from", Usage: "the `TEMPLATE` or snapshot that it is made of, instead of an image"},
					&cli.StringSliceFlag{Name: "step", Usage: "`COMMAND` line that root's shell runs before it is saved, and that is in the template then; more than one are run in turn, and what was done before isn't done again"},
					&cli.BoolFlag{Name: "force", Usage: "do all of it, also what was done before"},
					&cli.IntFlag{Name: "cpus", Usage: "of its sandboxes: 1, or an even number", DefaultText: "2"},
					&cli.IntFlag{Name: "memory", Usage: "of its sandboxes, in `MiB`", DefaultText: "1024"},
					&cli.IntFlag{Name: "disk", Usage: "of its sandboxes, in `MiB` (store.disk_size of the configuration)"},
					&cli.StringFlag{Name: "profile", Usage: "disposable or resident: how much of that is reserved for each of them", DefaultText: "disposable"},
					&cli.StringFlag{Name: "user", Usage: "that commands run as by default (user, or the other template's)"},
					&cli.StringFlag{Name: "workdir", Usage: "where they run by default (the user's home)"},
					&cli.StringFlag{Name: "run", Usage: "`COMMAND` line that runs when the machine is saved, and so in each sandbox already"},
					&cli.StringFlag{Name: "ready", Usage: "`COMMAND` line that succeeds when the one of --run can be saved"},
					&cli.IntFlag{Name: "hook-port", Usage: "where an HTTP server of --run is told who the sandbox is, before anybody else gets to it"},
					&cli.StringFlag{Name: "hook-path", Value: "/", Usage: "the `PATH` there"},
					&cli.StringFlag{Name: "start", Usage: "`COMMAND` line that is started afresh in each sandbox"},
				},
				Action: withAPI(templateBuild),
			},
			{
				Name:        "create",
				Usage:       "make a template, or another build of it, of a running sandbox, which goes on, and print its id",
				ArgsUsage:   "NAME SANDBOX",
				Description: "The template has the sandbox's disk, and runs what the sandbox's own template runs.",
				Flags: []cli.Flag{
					team, detach,
					&cli.StringSliceFlag{Name: "tag", Usage: "what the build is called; more than one is possible", DefaultText: db.DefaultTag},
					&cli.BoolFlag{Name: "public", Usage: "all teams may use it"},
					&cli.IntFlag{Name: "cpus", Usage: "of its sandboxes: 1, or an even number", DefaultText: "2"},
					&cli.IntFlag{Name: "memory", Usage: "of its sandboxes, in `MiB`", DefaultText: "1024"},
				},
				Action: withAPI(templateCreate),
			},
			{
				Name:      "rebuild",
				Usage:     "make another build of what templates were made of, and print the ids of those that there are then",
				ArgsUsage: "NAME[:TAG]...",
				Flags: []cli.Flag{team,
					&cli.BoolFlag{Name: "outdated", Usage: "only of those that were made by another version of cube, or of an image or template that is another one since; without names, of all of the team's"}},
				Action: withAPI(templateRebuild),
			},
			{
				Name:      "push",
				Usage:     "have a registry have a template, and print the name that it has there by its digest",
				ArgsUsage: "NAME[:TAG] REGISTRY/REPOSITORY[:TAG]",
				Description: "The template is pushed with its machine's disk and memory: whoever may read the repository has what is in them. What is there already\n" +
					"isn't sent again, so that one that was interrupted can be begun again.",
				Flags:  []cli.Flag{team, registryUserFlag()},
				Action: withAPI(templatePush),
			},
			{
				Name:      "pull",
				Usage:     "make a template, or another build of it, of what was pushed to a registry, and print its id",
				ArgsUsage: "REGISTRY/REPOSITORY[:TAG|@DIGEST] [NAME[:TAG]]",
				Description: "Without a name it is called as the last word of the repository. It is there when a sandbox that is made of it has worked. Interrupted, it is\n" +
					"given up.",
				Flags: []cli.Flag{team, detach, registryUserFlag(),
					&cli.StringSliceFlag{Name: "tag", Usage: "what the build is called; more than one is possible", DefaultText: db.DefaultTag},
					&cli.BoolFlag{Name: "public", Usage: "all teams may use it"}},
				Action: withAPI(templatePull),
			},
			{
				Name:   "ls",
				Usage:  "list templates, of all teams",
				Flags:  []cli.Flag{&cli.BoolFlag{Name: "quiet", Aliases: []string{"q"}, Usage: "ids only"}, &cli.BoolFlag{Name: "json", Usage: "as a JSON array"}},
				Action: withAPI(templateList),
			},
			{
				Name:      "inspect",
				Usage:     "show what is known of a template and its builds, as JSON",
				ArgsUsage: "NAME",
				Flags:     []cli.Flag{team},
				Action: withAPI(func(c *cli.Context, client *api.Client) error {
					if c.NArg() != 1 {
						return errors.New("which template? `cube template ls` lists them")
					}
					t, err := client.Template(c.Context, c.String("team"), c.Args().First())
					if err != nil {
						return err
					}
					return writeJSON(c.App.Writer, t)
				}),
			},
			{
				Name:      "logs",
				Usage:     "show what a build has told, and wait for its end",
				ArgsUsage: "BUILD|NAME",
				Flags:     []cli.Flag{team},
				Action:    withAPI(templateLogs),
			},
			{
				Name:      "cancel",
				Usage:     "give builds up",
				ArgsUsage: "BUILD...",
				Action: eachByAPI(func(c *cli.Context, client *api.Client, build string) error {
					return client.CancelBuild(c.Context, build)
				}),
			},
			{
				Name:      "rm",
				Usage:     "delete templates, or tags of them, of which there are no sandboxes",
				ArgsUsage: "NAME[:TAG]...",
				Flags:     []cli.Flag{team},
				Action: eachByAPI(func(c *cli.Context, client *api.Client, name string) error {
					return client.DeleteTemplate(c.Context, c.String("team"), name)
				}),
			},
		},
	}
}

func templateList(c *cli.Context, of *api.Client) error {
	if c.NArg() > 0 {
		return errors.New("it takes no arguments: `cube template inspect` tells of one template")
	}
	list, err := of.Templates(c.Context)
	if err != nil {
		return err
	}
	w := c.App.Writer
	switch {
	case c.Bool("quiet"):
		for _, t := range list {
			fmt.Fprintln(w, t.ID)
		}
		return nil
	case c.Bool("json"):
		return writeJSON(w, list)
	}
	t := newTable(w, "ID", "TEAM", "NAME", "TAGS", "STATE", "SIZE", "UPDATED", "SANDBOXES", "OUTDATED")
	for _, one := range list {
		var tags []string
		for _, tag := range one.Tags {
			tags = append(tags, tag.Name)
		}
		state, size := "-", "-"
		if len(one.Builds) > 0 {
			b := one.Builds[0]
			state = string(b.State)
			if b.Reason != nil {
				state += ": " + short(client.Printable(b.Reason.Message), 40)
			}
			size = fmt.Sprintf("%d CPUs, %s", b.CPUs, units.BytesSize(float64(b.MemoryMB)*units.MiB))
		}
		name := strings.Join(one.Names, ",")
		if one.Public {
			name += " (public)"
		}
		t.row(one.ID, one.Team, name, cmp.Or(strings.Join(tags, ","), "-"), state, size, ago(one.Updated), fmt.Sprint(one.Sandboxes), cmp.Or(one.Outdated, "-"))
	}
	return t.flush()
}
