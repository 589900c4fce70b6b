package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/client"
	"github.com/cubesandbox/cube/orchestrator/sandbox"
)

func logsCommand() *cli.Command {
	return &cli.Command{
		Name:      "logs",
		Usage:     "show what a container that was run with -d has written; with $" + client.EnvAPI + ", a sandbox's log",
		ArgsUsage: "ID",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "and what comes until it ends"},
			&cli.IntFlag{Name: "tail", Aliases: []string{"n"}, Usage: "only the last `N` lines of what is there", DefaultText: "all"},
		},
		Action: hereOrThere(
			withClient(func(c *cli.Context, client *sandbox.Client) error {
				tail, err := readTail(c)
				if err != nil {
					return err
				}
				return client.Logs(c.Context, c.Args().First(), sandbox.LogOptions{Follow: c.Bool("follow"), Tail: tail}, c.App.Writer)
			}),
			withKey(func(c *cli.Context, api *client.Client) error {
				tail, err := readTail(c)
				if err != nil {
					return err
				}
				err = api.Logs(c.Context, c.Args().First(), tail, c.Bool("follow"), func(e client.LogEntry) error {
					_, err := fmt.Fprintln(c.App.Writer, logLine(e))
					return err
				})
				return leftAlone(c.Context, err)
			})),
	}
}

// readTail is how many lines are asked for, of which there is one log.
func readTail(c *cli.Context) (int, error) {
	if c.NArg() != 1 {
		return 0, errors.New("it takes one id: `cube ps` lists them")
	}
	if !c.IsSet("tail") {
		return -1, nil
	}
	tail := c.Int("tail")
	if tail < 0 {
		return 0, fmt.Errorf("--tail %d must not be negative", tail)
	}
	return tail, nil
}

func logLine(e client.LogEntry) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %-5s %s", e.Timestamp.Local().Format(time.RFC3339), strings.ToUpper(e.Level), e.Message)
	for _, k := range slices.Sorted(maps.Keys(e.Fields)) {
		fmt.Fprintf(&b, " %s=%s", k, e.Fields[k])
	}
	return client.Printable(b.String())
}
