package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/cubesandbox/cube/cni/network"
)

func networkCommand() *cli.Command {
	return &cli.Command{
		Name:  "network",
		Usage: "look at the containers' network, and set what they may reach",
		Description: "An ID is a container's as `cube ps` shows it, or NAMESPACE/ID, or what CNI plugins are told. None of the commands needs\n" +
			"the stack's daemon, but for the latest drops. They take root.",
		Action: noCommand("network"),
		Subcommands: []*cli.Command{
			{
				Name:        "status",
				Usage:       "tell what there is of the network, and what isn't as it should be",
				Description: "The exit code is 0 when containers get all of it.",
				Flags:       []cli.Flag{jsonFlag()},
				Action:      withNetwork(0, "no arguments", networkStatus),
			},
			networkPolicyCommand(),
			{
				Name:      "flows",
				Usage:     "list what a container has open",
				ArgsUsage: "ID",
				Flags: []cli.Flag{
					&cli.BoolFlag{Name: "watch", Aliases: []string{"w"}, Usage: "list them again and again, until interrupted"},
					jsonFlag(),
				},
				Action: withNetwork(1, oneContainer, networkFlows),
			},
			{
				Name:      "drops",
				Usage:     "tell what of a container's packets was dropped, and why",
				ArgsUsage: "ID",
				Flags:     []cli.Flag{jsonFlag()},
				Action:    withNetwork(1, oneContainer, networkDrops),
			},
			{
				Name:      "trace",
				Usage:     "tell what becomes of a container's packets to a destination",
				ArgsUsage: "ID ADDRESS[:PORT][/PROTOCOL]",
				Description: "The protocol is tcp where there is a port, and icmp where there is none. Nothing is sent: it is what the policy, the\n" +
					"kernel's tables and the host's firewall say. The exit code is 0 when nothing of that is in the way.",
				Flags:  []cli.Flag{jsonFlag()},
				Action: withNetwork(2, "a container and a destination, and flags before them", networkTrace),
			},
		},
	}
}

// oneContainer is what most of them take.
const oneContainer = "one container, and flags before it"

func jsonFlag() cli.Flag { return &cli.BoolFlag{Name: "json", Usage: "as JSON"} }

// noCommand is the action of a command that only has others below it.
func noCommand(name string) cli.ActionFunc {
	return func(c *cli.Context) error {
		if c.NArg() > 0 {
			return fmt.Errorf("%s: there is no command %q: `cube %[1]s --help` lists them", name, c.Args().First())
		}
		return cli.ShowSubcommandHelp(c)
	}
}

// withNetwork runs f with what the configuration's network is worked on by, and says for which command an error is.
func withNetwork(args int, takes string, f func(*cli.Context, *network.Network) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		name := strings.TrimPrefix(c.Command.HelpName, "cube ")
		err := errors.New("it takes " + takes)
		switch {
		case c.NArg() != args:
		case os.Geteuid() != 0:
			err = errors.New("it takes root: use sudo")
		default:
			err = f(c, network.New(at(c).cfg))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	}
}

// attached finds the container that the first argument names.
func attached(c *cli.Context, n *network.Network) (*network.Attachment, error) {
	return n.Find(c.Context, at(c).cfg.Containerd.Namespace, c.Args().First())
}

func networkStatus(c *cli.Context, n *network.Network) error {
	o, err := n.Overview(c.Context)
	if err != nil {
		return err
	}
	w := c.App.Writer
	if c.Bool("json") {
		err = writeJSON(w, o)
	} else {
		t := fields(w)
		t.row("gateway", fmt.Sprintf("%s, %s, MTU %d", o.Device, o.Address, o.MTU))
		t.row("uplink", orNone(strings.Join(o.Uplink, ", ")))
		t.row("pool", o.Pool.String())
		t.row("hook", orNone(o.Hook))
		t.row("containers", fmt.Sprintf("%d open, %d closed", o.Open, o.Closed))
		t.row("warm taps", fmt.Sprint(o.Warm))
		t.row("ports", fmt.Sprint(o.Ports))
		for _, f := range o.Findings {
			t.row(string(f.Level), strings.TrimSuffix(f.Detail+"; "+f.Remedy, "; "))
		}
		err = t.flush()
	}
	if err != nil {
		return err
	}
	return n.Status(c.Context)
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
