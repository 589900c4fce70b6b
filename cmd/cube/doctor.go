package main

import (
	"errors"
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/doctor"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:        "doctor",
		Usage:       "tell whether this host can run the stack, and what to do where it can't",
		Description: "Each line is: ok, warn or fail, what was looked at, what was found, and the remedy. The exit code is 1 when\nsomething failed, which keeps the stack from working.",
		Flags:       []cli.Flag{&cli.BoolFlag{Name: "json", Usage: "as a JSON array"}},
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return errors.New("doctor takes no arguments")
			}
			cfg := at(c).cfg
			findings := doctor.Judge(cfg, doctor.Gather(c.Context, cfg))
			var err error
			if c.Bool("json") {
				err = writeJSON(c.App.Writer, findings)
			} else {
				err = doctor.Write(c.App.Writer, findings)
			}
			if err != nil {
				return err
			}
			if n := doctor.Failed(findings); n > 0 {
				return fmt.Errorf("doctor: %d findings keep the stack from working: see the remedies above", n)
			}
			return nil
		},
	}
}
