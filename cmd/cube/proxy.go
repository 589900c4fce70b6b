package main

import (
	"errors"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/ingress/daemon"
)

// proxyCommand is the process that takes requests into sandboxes. `cube up` starts it.
func proxyCommand() *cli.Command {
	return &cli.Command{
		Name:   "proxy",
		Usage:  "take requests into sandboxes, until SIGTERM",
		Hidden: true,
		Flags:  []cli.Flag{&cli.StringFlag{Name: "keeper", Usage: "the `IDENTITY` that the process which has started this one knows it by"}},
		Action: func(c *cli.Context) error {
			if c.NArg() > 0 {
				return errors.New("proxy takes no arguments")
			}
			st := at(c)
			return daemon.Run(c.Context, st.cfg, daemon.Options{Log: st.log, Identity: c.String("keeper")})
		},
	}
}
