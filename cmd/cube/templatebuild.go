package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/api"
	"github.com/cubesandbox/cube/orchestrator/builds"
	"github.com/cubesandbox/cube/orchestrator/client"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/templates"
)

func templateBuild(c *cli.Context, of *api.Client) error {
	from := c.String("from")
	switch n := c.NArg(); {
	case from == "" && n != 2:
		return errors.New("it takes a name and an image: cube template build NAME IMAGE, or cube template build --from TEMPLATE NAME")
	case from != "" && n != 1:
		return errors.New("with --from it takes a name alone: cube template build --from TEMPLATE NAME")
	}
	r := api.TemplateRequest{
		Request: builds.Request{Team: c.String("team"), Name: c.Args().First(), Tags: c.StringSlice("tag"), Public: c.Bool("public"), CPUs: c.Int("cpus"), MemoryMB: c.Int("memory"), DiskMB: c.Int("disk")},
		Plan: builds.Plan{
			Image: c.Args().Get(1), Template: from, User: c.String("user"), Workdir: c.String("workdir"),
			Run: c.String("run"), Ready: c.String("ready"), Start: c.String("start"), Force: c.Bool("force"), Profile: admission.Profile(c.String("profile")),
		},
	}
	for _, command := range c.StringSlice("step") {
		r.Plan.Steps = append(r.Plan.Steps, templates.Step{Type: templates.Run, Args: []string{command, "root"}})
	}
	if port := c.Int("hook-port"); port != 0 {
		r.Plan.Hook = &db.Hook{Port: port, Path: c.String("hook-path")}
	}
	return askBuild(c, of, r)
}

func templateCreate(c *cli.Context, of *api.Client) error {
	if c.NArg() != 2 {
		return errors.New("it takes a name and the id of a sandbox: cube template create NAME SANDBOX")
	}
	return askBuild(c, of, api.TemplateRequest{
		Request: builds.Request{Team: c.String("team"), Name: c.Args().First(), Tags: c.StringSlice("tag"), Public: c.Bool("public"), CPUs: c.Int("cpus"), MemoryMB: c.Int("memory")},
		Sandbox: c.Args().Get(1),
	})
}

// askBuild asks for a build, and waits for it unless it needn't.
func askBuild(c *cli.Context, of *api.Client, r api.TemplateRequest) error {
	id, err := of.Build(c.Context, r)
	if err != nil {
		return fmt.Errorf("template %s: %w", r.Name, err)
	}
	return followBuild(c, of, r.Name, id)
}

// followBuild waits for a build unless it needn't.
func followBuild(c *cli.Context, of *api.Client, name string, id api.BuildID) error {
	if c.Bool("detach") {
		_, err := fmt.Fprintln(c.App.Writer, id.Build)
		return err
	}
	return awaitBuild(c, of, name, id)
}

// awaitBuild shows what a build tells until it is ready, and prints its template's id then. When the command is interrupted, the build
// is given up.
func awaitBuild(c *cli.Context, of *api.Client, name string, id api.BuildID) error {
	err := showBuild(c, of, id.Build)
	if c.Context.Err() != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Context), at(c).cfg.Timeout(cancelTimeout))
		defer cancel()
		if gone := of.CancelBuild(ctx, id.Build); gone != nil && !errdefs.IsFailedPrecondition(gone) {
			err = errors.Join(err, gone)
		}
	}
	if err != nil {
		return fmt.Errorf("template %s: %w", name, err)
	}
	_, err = fmt.Fprintln(c.App.Writer, id.Template)
	return err
}

// cancelTimeout bounds how long the end of a build is waited for that is given up.
const cancelTimeout = time.Minute

// showBuild shows on stderr what a build tells, and fails as it does.
func showBuild(c *cli.Context, of *api.Client, build string) error {
	for told := 0; ; {
		p, err := of.BuildLog(c.Context, build, told)
		if err != nil {
			return err
		}
		for _, l := range p.Lines {
			fmt.Fprintln(c.App.ErrWriter, buildLine(l))
		}
		told += len(p.Lines)
		if !p.Done() {
			continue
		}
		if p.Reason != nil {
			return errors.New(client.Printable(p.Reason.Message))
		}
		return nil
	}
}

func buildLine(l builds.Line) string {
	line := l.At.Local().Format(time.TimeOnly) + " "
	if l.Step != "" {
		line += l.Step + ": "
	}
	return line + client.Printable(l.Message)
}

func templateLogs(c *cli.Context, of *api.Client) error {
	if c.NArg() != 1 {
		return errors.New("of which build, or of which template's newest? `cube template ls` lists templates, `cube template inspect` tells of their builds")
	}
	build := c.Args().First()
	t, err := of.Template(c.Context, c.String("team"), build)
	if err == nil && len(t.Builds) > 0 {
		build = t.Builds[0].ID
	} else if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return leftAlone(c.Context, showBuild(c, of, build))
}

func templateRebuild(c *cli.Context, of *api.Client) error {
	names, outdated, team := c.Args().Slice(), c.Bool("outdated"), c.String("team")
	if len(names) == 0 && !outdated {
		return errors.New("which template? `cube template ls` lists them")
	}
	if len(names) == 0 {
		list, err := of.Templates(c.Context)
		if err != nil {
			return err
		}
		names = rebuildable(list, team)
	}
	var errs []error
	for _, name := range names {
		id, err := of.Rebuild(c.Context, team, name, outdated)
		switch {
		case err != nil:
			err = fmt.Errorf("template %s: %w", name, err)
		case id.Build == "":
			fmt.Fprintf(c.App.ErrWriter, "cube: template %s isn't outdated\n", name)
		default:
			err = awaitBuild(c, of, name, id)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// rebuildable names each build of a team's templates that a tag stands for, by one of its tags.
func rebuildable(list []api.Template, team string) (names []string) {
	for _, t := range list {
		if t.Team != team || len(t.Names) == 0 {
			continue
		}
		seen := map[string]bool{}
		for _, tag := range t.Tags {
			if !seen[tag.Build] {
				seen[tag.Build] = true
				names = append(names, t.Names[0]+":"+tag.Name)
			}
		}
	}
	return names
}
