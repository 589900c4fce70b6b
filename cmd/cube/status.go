package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/health"
	"github.com/cubesandbox/cube/orchestrator/stack"
)

func statusCommand() *cli.Command {
	return &cli.Command{
		Name:        "status",
		Usage:       "tell whether the stack runs and each part of it is ready",
		Description: "The exit code is 0 when all parts are ready. It is what /readyz answers on the control socket.",
		Flags:       []cli.Flag{&cli.BoolFlag{Name: "json", Usage: "as JSON"}},
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return errors.New("status takes no arguments")
			}
			cfg := at(c).cfg
			if pid, err := stack.Running(cfg); err != nil {
				return fmt.Errorf("status: %w", err)
			} else if pid == 0 {
				return fmt.Errorf("status: no stack runs in %s: start it with `cube up -d`", cfg.RunDir)
			}
			r, err := health.Query(c.Context, cfg.ControlSocket())
			if err != nil {
				return fmt.Errorf("status: %w", err)
			}
			if c.Bool("json") {
				err = writeJSON(c.App.Writer, r)
			} else {
				t := newTable(c.App.Writer, "PART", "STATE", "REASON")
				for _, d := range r.Dependencies {
					t.row(d.Name, string(d.State), d.Reason)
				}
				err = t.flush()
			}
			if err == nil && !r.Ready {
				err = fmt.Errorf("status: not ready: %s", strings.Join(r.Missing(), "; "))
			}
			return err
		},
	}
}
