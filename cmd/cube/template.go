package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/api"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

func templateCommand() *cli.Command {
	return &cli.Command{
		Name:   "template",
		Usage:  "what E2B's sandboxes are made of",
		Action: noCommand("template"),
		Subcommands: []*cli.Command{{
			Name:      "build",
			Usage:     "make a template, or another build of it, of an image",
			ArgsUsage: "NAME IMAGE",
			Description: "A machine is started from the image, with envd in it, and saved; a sandbox that is made of that has to work before the template is there.\n" +
				"The image needs bash, nothing else.",
			Flags: []cli.Flag{
				&cli.StringFlag{Name: "team", Value: db.DefaultTeam, Usage: "whose it is"},
				&cli.StringFlag{Name: "tag", Value: db.DefaultTag, Usage: "what the build is called"},
				&cli.BoolFlag{Name: "public", Usage: "all teams may use it"},
				&cli.IntFlag{Name: "cpus", Value: 2, Usage: "of its sandboxes"},
				&cli.IntFlag{Name: "memory", Value: 1024, Usage: "of its sandboxes, in `MiB`"},
				&cli.IntFlag{Name: "disk", Usage: "of its sandboxes, in `MiB` (store.disk_size of the configuration)"},
				&cli.StringFlag{Name: "user", Value: "user", Usage: "that commands run as by default"},
				&cli.StringFlag{Name: "workdir", Usage: "where they run by default (the user's home)"},
				&cli.StringFlag{Name: "run", Usage: "`COMMAND` line that runs when the machine is saved, and so in each sandbox already"},
				&cli.StringFlag{Name: "ready", Usage: "`COMMAND` line that succeeds when the one of --run can be saved"},
				&cli.IntFlag{Name: "hook-port", Usage: "where an HTTP server of --run is told who the sandbox is, before anybody else gets to it"},
				&cli.StringFlag{Name: "hook-path", Value: "/", Usage: "the `PATH` there"},
				&cli.StringFlag{Name: "start", Usage: "`COMMAND` line that is started afresh in each sandbox"},
			},
			Action: templateBuild,
		}},
	}
}

func templateBuild(c *cli.Context) error {
	if c.NArg() != 2 {
		return errors.New("template build takes a name and an image: cube template build NAME IMAGE")
	}
	r := templates.Request{
		Team: c.String("team"), Name: c.Args().Get(0), Tag: c.String("tag"), Public: c.Bool("public"), Image: c.Args().Get(1),
		CPUs: c.Int("cpus"), MemoryMB: c.Int("memory"), DiskMB: c.Int("disk"), User: c.String("user"), Workdir: c.String("workdir"),
		Run: c.String("run"), Ready: c.String("ready"), Start: c.String("start"),
	}
	if port := c.Int("hook-port"); port != 0 {
		r.Hook = &db.Hook{Port: port, Path: c.String("hook-path")}
	}
	done := reporter(sayTo(os.Stderr))("making template " + r.Name)
	res, err := api.NewClient(at(c).cfg).Template(c.Context, r)
	done()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(c.App.Writer, res.Template)
	return err
}
