package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/stack"
)

func downCommand() *cli.Command {
	return &cli.Command{
		Name:        "down",
		Usage:       "stop the sandboxes, then the stack; images, disks and stopped containers stay",
		Description: "What the stack has set up in the host's network stays too, for the next `cube up`, unless --purge removes it.",
		Flags: []cli.Flag{
			&cli.DurationFlag{Name: "timeout", Aliases: []string{"t"}, Value: 2 * time.Second, Usage: "how long a sandbox may take to end by itself"},
			&cli.BoolFlag{Name: "purge", Usage: "remove all that Cube has set up in the host's network"},
		},
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return errors.New("down takes no arguments")
			}
			st := at(c)
			err := stack.Down(c.Context, st.cfg, c.Duration("timeout"), c.Bool("purge"), stack.Options{Log: st.clientLog, Progress: waiting(sayTo(os.Stderr))})
			if err != nil {
				return fmt.Errorf("down: %w", err)
			}
			return nil
		},
	}
}
