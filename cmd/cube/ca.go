package main

import (
	"errors"
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/orchestrator/ca"
)

func caCommand() *cli.Command {
	return &cli.Command{
		Name:   "ca",
		Usage:  "the certificate authority of the sandboxes' domain",
		Action: noCommand("ca"),
		Subcommands: []*cli.Command{
			{
				Name:  "export",
				Usage: "print the authority's certificate, for those who are to trust it",
				Action: withAuthority(func(c *cli.Context, a *ca.Authority) error {
					_, err := c.App.Writer.Write(a.Root())
					return err
				}),
			},
			{
				Name:  "trust",
				Usage: "have this host's programs trust the authority, and print the file by which they do",
				Action: withAuthority(func(c *cli.Context, a *ca.Authority) error {
					file, err := a.Trust(c.Context)
					if err != nil {
						return fmt.Errorf("ca trust: %w", err)
					}
					fmt.Fprintln(c.App.Writer, file)
					fmt.Fprintf(c.App.ErrWriter, "programs with a store of their own need it named: NODE_EXTRA_CA_CERTS=%s for Node.js, SSL_CERT_FILE for Python\nto undo it: rm %s && update-ca-certificates --fresh\n", file, file)
					return nil
				}),
			},
		},
	}
}

func withAuthority(action func(*cli.Context, *ca.Authority) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		if c.NArg() > 0 {
			return errors.New("it takes no arguments")
		}
		cfg := at(c).cfg
		if cfg.Proxy.TLSCert != "" {
			return errors.New("the sandboxes' certificate is proxy.tls_cert of the configuration: its authority isn't Cube's")
		}
		a, err := ca.Open(c.Context, cfg.CADir(), cfg.Proxy.Name())
		if err != nil {
			return err
		}
		return action(c, a)
	}
}
