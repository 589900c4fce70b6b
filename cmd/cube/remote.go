package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/client"
)

// withKey runs f with a client of the E2B API that the environment names, and says for which command an error is.
func withKey(f func(*cli.Context, *client.Client) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		o := client.FromEnv()
		o.Timeout = at(c).cfg.Timeout
		api, err := client.New(o)
		if err == nil {
			defer api.Close()
			err = f(c, api)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", strings.TrimPrefix(c.Command.HelpName, "cube "), err)
		}
		return nil
	}
}

// hereOrThere is here for this machine's containers, and there where the environment names an API to be asked instead.
func hereOrThere(here, there cli.ActionFunc) cli.ActionFunc {
	return func(c *cli.Context) error {
		if os.Getenv(client.EnvAPI) != "" {
			return there(c)
		}
		return here(c)
	}
}

// leftAlone is no error where who has asked for something endless ends it.
func leftAlone(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return exitCode(codeInterrupted)
	}
	return err
}
