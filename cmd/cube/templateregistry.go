package main

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/distribution/reference"
	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/api"
	"github.com/cubesandbox/cube/orchestrator/builds"
)

func templatePush(c *cli.Context, of *api.Client) error {
	if c.NArg() != 2 {
		return errors.New("it takes a template and where to: cube template push NAME[:TAG] REGISTRY/REPOSITORY[:TAG]")
	}
	name, to := c.Args().Get(0), c.Args().Get(1)
	at, err := of.Push(c.Context, c.String("team"), name, to, registryAs(c), sayTo(c.App.ErrWriter))
	if err != nil {
		return fmt.Errorf("template %s: %w", name, err)
	}
	_, err = fmt.Fprintln(c.App.Writer, at)
	return err
}

func templatePull(c *cli.Context, of *api.Client) error {
	if n := c.NArg(); n < 1 || n > 2 {
		return errors.New("it takes what is to be pulled, and maybe a name: cube template pull REGISTRY/REPOSITORY[:TAG|@DIGEST] [NAME[:TAG]]")
	}
	r := builds.PullRequest{Team: c.String("team"), From: c.Args().Get(0), Name: c.Args().Get(1), Tags: c.StringSlice("tag"), Public: c.Bool("public")}
	if r.Name == "" {
		r.Name = nameOf(r.From)
	}
	id, err := of.Pull(c.Context, r, registryAs(c))
	if err != nil {
		return fmt.Errorf("template %s: %w", r.Name, err)
	}
	return followBuild(c, of, r.Name, id)
}

func registryAs(c *cli.Context) (as api.RegistryUser) {
	as.User, as.Password = registryUser(c)
	return as
}

// nameOf is what a template is called that is pulled from there: as the last word of the repository, in what names of templates are of.
func nameOf(from string) string {
	named, err := reference.ParseNormalizedNamed(from)
	if err != nil {
		return from // it is refused, for that
	}
	return strings.ReplaceAll(path.Base(reference.Path(named)), ".", "-")
}
