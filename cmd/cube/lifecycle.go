package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/api"
)

// withAPI runs f with a client of the daemon, says what takes long, and for which command an error is.
func withAPI(f func(*cli.Context, *api.Client) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		command := strings.TrimPrefix(c.Command.HelpName, "cube ")
		defer reporter(sayTo(os.Stderr))(command)()
		if err := f(c, api.NewClient(at(c).cfg)); err != nil {
			return fmt.Errorf("%s: %w", command, err)
		}
		return nil
	}
}

// eachByAPI runs f for all arguments, and goes on after errors.
func eachByAPI(f func(*cli.Context, *api.Client, string) error) cli.ActionFunc {
	return withAPI(func(c *cli.Context, client *api.Client) error {
		if c.NArg() == 0 {
			return errors.New("it takes at least one " + strings.TrimSuffix(c.Command.ArgsUsage, "..."))
		}
		var errs []error
		for _, arg := range c.Args().Slice() {
			errs = append(errs, f(c, client, arg))
		}
		return errors.Join(errs...)
	})
}

func pauseCommand() *cli.Command {
	return &cli.Command{
		Name:      "pause",
		Usage:     "save running containers to disk, with all that runs in them, and end their machines",
		ArgsUsage: "ID...",
		Action: eachByAPI(func(c *cli.Context, client *api.Client, id string) error {
			return client.Pause(c.Context, id)
		}),
	}
}

func resumeCommand() *cli.Command {
	return &cli.Command{
		Name:      "resume",
		Usage:     "have paused containers go on from where they were",
		ArgsUsage: "ID...",
		Action: eachByAPI(func(c *cli.Context, client *api.Client, id string) error {
			note, err := client.Resume(c.Context, id)
			if note != "" {
				sayTo(c.App.ErrWriter)(id + ": " + note)
			}
			return err
		}),
	}
}

func rollbackCommand() *cli.Command {
	return &cli.Command{
		Name:      "rollback",
		Usage:     "put a running container back to a snapshot of it: its memory and its disk",
		ArgsUsage: "ID SNAPSHOT",
		Action: withAPI(func(c *cli.Context, client *api.Client) error {
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
		Action: withAPI(func(c *cli.Context, client *api.Client) error {
			if c.NArg() != 1 {
				return errors.New("it takes one container: `cube ps` lists them")
			}
			ids, failed := client.Clone(c.Context, c.Args().First(), c.Int("number"))
			for _, id := range ids {
				fmt.Fprintln(c.App.Writer, id)
			}
			if len(ids) > 0 && len(failed) > 0 {
				failed = append([]error{fmt.Errorf("%d of %d clones are there, %d failed", len(ids), c.Int("number"), len(failed))}, failed...)
			}
			return errors.Join(failed...)
		}),
	}
}
